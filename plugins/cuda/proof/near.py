"""Times of insertions, on host and GPU: entries uploaded, read in place, or passed in the launch.

    python -m hal_cuda.building && python plugins/cuda/proof/near.py [rounds] [--stand-in]

Microseconds, means (medians) over the rounds; three devices of one process in turn, each with its own ``NEAR`` and
``FEW`` (``insertion``), for the requests and for the entries. "host": duration of the call. "GPU": from the end of
the work before it to its own end, with the stream held until any upload is done, as between steps that overlap.
"idle": from the call to the end of its work on an idle GPU, upload included.
``--stand-in`` as native_bench.py, to try the script: these are no times of a GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import native_bench
from hal_core import Request, Task, TaskBatch, TaskKind
from hal_cuda import insertion
from hal_cuda.structs import FEW_BYTES

WAYS = {  # NEAR, FEW
    "uploaded": (0, 0),
    "in place": (64 << 10, 0),
    "in place, launch": (64 << 10, FEW_BYTES),
}
CASES = {  # new requests, requests that were handed over, running requests that get a block
    "insert 1": (1, 0, 0),
    "hand over 1": (0, 1, 0),
    "hand over 7": (0, 7, 0),
    "hand over 16": (0, 16, 0),
    "grow 8": (0, 0, 8),
    "hand over 1, grow 8": (0, 1, 8),
}
TOKENS, EACH = native_bench.TOKENS, native_bench.TOKENS // native_bench.BLOCK + 1
PROMPT = list(range(10, TOKENS + 10))


class Inserting:
    """A device with one setting, and the batches for it."""

    def __init__(self, way: str, stack: ExitStack, *, stand_in: bool) -> None:
        insertion.NEAR, insertion.FEW = WAYS[way]
        self.bound = stack.enter_context(native_bench.opened("native", stand_in=stand_in))
        self.state, self.stream = self.bound.state(native_bench.SIZES), self.bound.device.stream()

    def batch(self, new: int, handed: int, grow: int) -> TaskBatch:
        """Admit a batch and wait until the device is idle."""
        self.stream.synchronize()
        self.state.release(range(native_bench.SIZES.num_slots))
        running = [self._over(slot) for slot in range(grow)]
        if running:
            self.insert(TaskBatch.of(running))
            self.stream.synchronize()
        tasks = [Task(TaskKind.MORE_BLOCKS, one.slot, one.request, blocks=(1,), first_block=EACH) for one in running]
        tasks += [self._over(slot) for slot in range(grow, grow + handed)]
        tasks += [self._new(slot) for slot in range(grow + handed, grow + handed + new)]
        return TaskBatch.of(tasks)

    def insert(self, batch: TaskBatch) -> None:
        """Call the hook."""
        self.bound.insert_tasks(state=self.state, tasks=batch, stream=self.stream)

    def _admit(self, slot: int) -> Any:  # noqa: ANN401
        return self.state.admit(Request(f"r{slot}", PROMPT, native_bench.PARAMS))

    def _over(self, slot: int) -> Task:
        blocks = tuple(range(EACH))
        return Task(TaskKind.REMOTE_PREFILL, slot, self._admit(slot), TOKENS, 0, blocks, first_token=7)

    def _new(self, slot: int) -> Task:
        return Task(TaskKind.PREFILL, slot, self._admit(slot), 0, TOKENS, tuple(range(EACH)))


def host(one: Inserting, batch: TaskBatch) -> float:
    """Measure the call alone."""
    begin = time.perf_counter_ns()
    one.insert(batch)
    spent = time.perf_counter_ns() - begin
    one.stream.synchronize()
    return spent / 1e3


def idle(one: Inserting, batch: TaskBatch) -> float:
    """Measure from the call to the end of its work."""
    begin = time.perf_counter_ns()
    one.insert(batch)
    one.stream.synchronize()
    return (time.perf_counter_ns() - begin) / 1e3


def held(one: Inserting, batch: TaskBatch) -> float:
    """Measure the stream's part: the stream is held until all work is queued and the upload is done."""
    from cuda.bindings import driver  # type: ignore[import-not-found]

    events = [driver.cuEventCreate(0)[1] for _ in range(2)]
    with one.bound.device.hold_stream(one.stream):
        driver.cuEventRecord(events[0], one.stream.handle)  # type: ignore[attr-defined]
        one.insert(batch)
        driver.cuEventRecord(events[1], one.stream.handle)  # type: ignore[attr-defined]
        time.sleep(0.0002)
    one.stream.synchronize()
    spent: float = driver.cuEventElapsedTime(*events)[1] * 1e3
    for event in events:
        driver.cuEventDestroy(event)
    return spent


def main(words: list[str]) -> None:
    """Measure in turn, and print."""
    stand_in = "--stand-in" in words
    rounds = int(next((word for word in words if word.isdigit()), "60"))
    ways: dict[str, Callable[[Inserting, TaskBatch], float]] = {"host": host, "idle": idle}
    if not stand_in:
        ways["GPU"] = held
    found: dict[tuple[str, str, str], list[float]] = {}
    with ExitStack() as stack:
        devices = {name: Inserting(name, stack, stand_in=stand_in) for name in WAYS}
        for name, sizes in CASES.items():
            for turn in range(rounds + 5):
                for device, one in devices.items():
                    for way, measure in ways.items():
                        spent = measure(one, one.batch(*sizes))
                        if turn >= 5:
                            found.setdefault((name, way, device), []).append(spent)
    print(f"{'us, mean (median)':30s}" + "".join([f"{device:>18s}" for device in WAYS]))
    for name in CASES:
        for way in ways:
            times = [found[name, way, device] for device in WAYS]
            columns = [f"{statistics.mean(one):.1f} ({statistics.median(one):.1f})" for one in times]
            print(f"{f'{name}, {way}':30s}" + "".join([f"{column:>18s}" for column in columns]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
