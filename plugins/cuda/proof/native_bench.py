"""Host time of hooks on both paths, idle and beside a thread that computes in Python: a short table.

    python -m hal_cuda.building && python plugins/cuda/proof/native_bench.py [rounds] [--stand-in] [--native]

Microseconds of host time, median and 99th percentile; insertions from the batch object to the ticket, right after their
staged_requests. The device is idle between two calls. ``--stand-in`` replaces a GPU's driver by the tests' library with
copies and kernels turned off, which leaves hal's own part. ``--native`` measures that path only.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hal_core import ByteRange, Group, Request, SamplingParams, StateConfig, Step, Task, TaskKind, View
from hal_core.devices import dtype_of
from hal_core.ranks.watchdog import Watchdog
from hal_core.runtime.bound import BoundDevice, bind
from hal_cuda import CudaPlugin, collectives
from hal_cuda.nccl import Comm

TOKENS, BLOCK = 1024, 16
SIZES = StateConfig(num_slots=128, max_model_len=9216, block_size=BLOCK)
PARAMS = SamplingParams(
    max_tokens=1000, temperature=0.5, eos_token_ids=(2,), stop_sequences=((5, 6), (7,)), bad_words=(9, 10)
)
Case = tuple[str, Callable[[], Any], Callable[[Any], object]]


class Unread:
    """A sink that drops outputs without reading them, to measure the hook alone."""

    session = 1

    def put(self, pending: Any) -> None:  # noqa: ANN401
        pending.complete(None)

    def close(self, timeout: float) -> None:
        """Do nothing: there is no thread to drain."""


def opened(path: str, *, stand_in: bool) -> BoundDevice:
    """Open the device on the ``native`` path, or as the fallback (``python``)."""
    os.environ["HAL_CUDA_NATIVE"] = "1" if path == "native" else "0"
    if not stand_in:
        return bind(CudaPlugin.open(0, {}))
    from hal_cuda import launching
    from hal_cuda.driver import Driver
    from hal_cuda.native_device import open_gpu

    file = Path(__file__).parents[1] / "tests" / "stand_in.py"
    spec = importlib.util.spec_from_file_location("hal_cuda_stand_in", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    native, library = module.built()
    api = module.Library(library)
    api.library.stand_in_idle(1)
    launching.cubin = lambda name, arch: b""  # type: ignore[assignment]
    return bind(open_gpu(0, {"stream": 1}, Driver(api, native if path == "native" else None, api.library)))


def cases(bound: BoundDevice) -> Iterator[Case]:
    """Yield each case: its name, its preparation, and the measured call."""
    state, stream = bound.state(SIZES), bound.device.stream()
    generator = np.random.default_rng(1)
    for count in (1, 16, 128):
        slots, each = list(range(count)), TOKENS // BLOCK
        blocks = [np.arange(each, dtype=np.int32) + i * each for i in slots]
        prompts = generator.integers(10, 30_000, (count, TOKENS))

        def admit(slots: list[int] = slots, prompts: Any = prompts, blocks: Any = blocks) -> list[Task]:  # noqa: ANN401
            stream.synchronize()
            state.release(slots)
            requests = [state.admit(Request(f"r{i}", prompts[i], PARAMS)) for i in slots]
            return [Task(TaskKind.PREFILL, at, requests[at], 0, TOKENS, blocks[at]) for at in slots]

        def insert(tasks: list[Task]) -> None:
            bound.insert_tasks(state=state, tasks=tasks, stream=stream)

        yield f"insert {count} x {TOKENS}", admit, insert
    yield from decoding(bound, state, stream)
    scalar, row = state.view("temperature")[3], state.view("token_ids")[3, :64]
    large = View.contiguous(bound.device.allocate(1 << 16), 0, (1 << 13,), dtype_of("int64"))
    values = np.arange(1 << 13)
    for name, target, value in (("scalar", scalar, 0.5), ("64 tokens", row, values[:64]), ("64 KB", large, values)):

        def put(_: object, target: View = target, value: Any = value) -> None:  # noqa: ANN401
            bound.async_set_value(target=target, value=value, stream=stream)

        yield f"set {name}", stream.synchronize, put

    def several(_: object) -> None:
        for _ in range(10):
            bound.async_set_value(target=scalar, value=0.5, stream=stream)

    yield "set 10 scalars in a row", stream.synchronize, several

    def written() -> None:
        bound.async_set_value(target=scalar, value=0.5, stream=stream)  # as in each step: finished copies are released
        stream.synchronize()

    step, sink = Step(1, {"target": np.arange(SIZES.num_slots)}), Unread()
    yield (
        "save output",
        written,
        lambda _: bound.save_output(state=state, step=step, sink=sink, stream=stream),
    )
    memory = bound.device.allocate(1 << 20)
    for name, nbytes in (("4 KB", 4096), ("1 MB", 1 << 20)):

        def copy(_: object, part: ByteRange = ByteRange(0, nbytes)) -> None:  # noqa: B008 (of this turn)
            bound.copy_out(memory=memory, parts=[part], stream=stream)

        yield f"copy out {name}", written, copy
    yield from broadcasting(bound, bound.state(SIZES, name="broadcast"))


def decoding(bound: BoundDevice, state: Any, stream: Any) -> Iterator[Case]:  # noqa: ANN401
    """Return a decode node's insertion in a step: requests that were handed over, and blocks for some running ones."""
    each, prompt = TOKENS // BLOCK + 1, list(range(10, TOKENS + 10))
    running: list[Any] = []

    def prepare(new: int, grow: int) -> list[Task]:
        stream.synchronize()
        state.release(range(SIZES.num_slots))
        running[:] = [state.admit(Request(f"g{i}", prompt, PARAMS)) for i in range(grow)]
        old = [handed(one, i) for i, one in enumerate(running)]
        if old:
            bound.insert_tasks(state=state, tasks=old, stream=stream)
        tasks = [Task(TaskKind.MORE_BLOCKS, i, one, blocks=(i,), first_block=each) for i, one in enumerate(running)]
        admitted = [state.admit(Request(f"h{i}", prompt, PARAMS)) for i in range(new)]
        tasks += [handed(one, grow + i) for i, one in enumerate(admitted)]
        stream.synchronize()
        return tasks

    def handed(request: Any, slot: int) -> Task:  # noqa: ANN401
        blocks = tuple(range(slot * each, slot * each + each))
        return Task(TaskKind.REMOTE_PREFILL, slot, request, TOKENS, 0, blocks, first_token=7)

    def insert(tasks: list[Task]) -> None:
        bound.insert_tasks(state=state, tasks=tasks, stream=stream)

    for new, grow in ((16, 0), (0, 8), (16, 8)):
        yield f"hand over {new}, grow {grow}", lambda new=new, grow=grow: prepare(new, grow), insert


class Nothing:
    """A replacement for NCCL, which benchmarks/gpu/broadcast.py measures: a call of C without effect that returns 0."""

    def address(self, name: str) -> int:
        """Return the address of that call."""
        return int(ctypes.cast(ctypes.pythonapi.PyErr_Occurred, ctypes.c_void_p).value or 0)

    def broadcast(self, *arguments: object) -> int:
        """The same from Python."""
        return 0

    def check(self, status: int, call: str) -> None:
        """Accept every status."""


class Sent:
    """A replacement for an open group of two over NCCL, with a collective without effect."""

    ranks = (0, 1)

    def __init__(self) -> None:
        self.watchdog = Watchdog(0, {}, 30.0, lambda: None)
        self.process_group = Comm(Nothing(), 0, self.ranks)  # type: ignore[arg-type]
        self.process_group.handle = 1
        self.process_group.failure = lambda: None  # type: ignore[method-assign]


def exchange(block: bytes) -> dict[int, bytes]:
    """Return the block of two ranks with equal terms."""
    return dict.fromkeys(Sent.ranks, block)


def broadcasting(bound: BoundDevice, state: Any) -> Iterator[Case]:  # noqa: ANN401
    """Measure hal's part of a broadcast on the sending rank, without the collective."""
    device, group = bound.device, Group(Sent.ranks, 0)
    with mock.patch.object(collectives, "opened", return_value=Sent()):
        made = collectives.open_communicator(device, group)  # type: ignore[arg-type]
    made.exchange = exchange  # type: ignore[method-assign]
    device._communicators[group.ranks] = made  # type: ignore[attr-defined]
    stream = bound.default_stream

    library = getattr(device.driver.api, "library", None)  # type: ignore[attr-defined]

    def ready() -> None:
        if library is not None:
            library.stand_in_idle(0)  # the header is compared with the present one
        stream.synchronize()

    def broadcast(_: object) -> None:
        bound.broadcast_tokens(state=state, group=group, stream=stream)
        if library is not None:
            library.stand_in_idle(1)

    yield "broadcast, hal's part", ready, broadcast


@contextmanager
def busy_thread(*, busy: bool) -> Iterator[None]:
    """With ``busy``, run a thread that computes in Python meanwhile."""
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(2000))

    thread = threading.Thread(target=compute)
    if busy:
        thread.start()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        stop.set()
        if busy:
            thread.join()


def measure(case: Case, rounds: int, *, busy: bool) -> str:
    """Return the median and the 99th percentile, without the first five rounds."""
    _, prepare, act = case
    times = []
    with busy_thread(busy=busy):
        for _ in range(rounds + 5):
            given = prepare()
            begin = time.perf_counter_ns()
            act(given)
            times.append((time.perf_counter_ns() - begin) / 1e3)
    times = sorted(times[5:])
    return f"{statistics.median(times):9.1f} /{times[min(len(times) - 1, int(len(times) * 0.99))]:9.1f}"


def main(words: list[str]) -> None:
    """Measure and print."""
    stand_in = "--stand-in" in words
    rounds = int(next((word for word in words if word.isdigit()), "200"))
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {rounds} rounds, us: median / p99")
    paths = [path for path in ("python", "native") if path == "native" or "--native" not in words]
    print(f"{'':22s}" + "".join([f"{f'{path} {how}':>22s}" for path in paths for how in ("quiet", "busy")]))
    found: dict[str, list[str]] = {}
    for path in paths:
        with opened(path, stand_in=stand_in) as bound:
            for case in cases(bound):
                for busy in (False, True):
                    found.setdefault(case[0], []).append(
                        measure(case, max(20, rounds // (4 if busy else 1)), busy=busy)
                    )
            native = bound.device.driver.native  # type: ignore[attr-defined]
            if native is not None:
                print(f"(the lock was given up {native.calls.given_up()} times)")
    for name, columns in found.items():
        print(f"{name:22s}" + "".join([f"{column:>22s}" for column in columns]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
