"""An insertion of 128 requests on several devices, in turn in one run.

    python benchmarks/insertion.py [DEVICE ...]        by default cpu and opencl

Prints the median and the ratio to the first device: the call alone, and the call with the wait for its ticket.
"""

from __future__ import annotations

import statistics
import sys
import time

from hal_core import Request, SamplingParams, StateConfig, Task, TaskKind
from hal_core.runtime.bound import BoundDevice
from hal_core.slots.state import SlotState

import hal

SLOTS, WIDTH, PROMPT, ROUNDS = 128, 8192, 64, 60
PARAMS = SamplingParams(temperature=0.7, top_p=0.9, seed=7, max_tokens=100, eos_token_ids=(2,))


def inserted(bound: BoundDevice, state: SlotState) -> tuple[float, float]:
    """Insert a batch; return the microseconds of the call, and of the call with its wait. Admission is not counted."""
    requests = [state.admit(Request(f"r{i}", list(range(PROMPT)), PARAMS)) for i in range(SLOTS)]
    blocks = [list(range(4 * i, 4 * i + 4)) for i in range(SLOTS)]
    tasks = [Task(TaskKind.PREFILL, at, one, 0, PROMPT, blocks[at]) for at, one in enumerate(requests)]
    begin = time.perf_counter()
    ticket = bound.insert_tasks(state=state, tasks=tasks, stream=bound.default_stream)
    called = time.perf_counter()
    ticket.wait()
    done = time.perf_counter()
    state.release(range(SLOTS))
    return (called - begin) * 1e6, (done - begin) * 1e6


def main(names: list[str]) -> None:
    """Measure the devices in turn and print the medians."""
    opened = [hal.open_device(name) for name in names]
    states = [bound.state(StateConfig(num_slots=SLOTS, max_model_len=WIDTH)) for bound in opened]
    times: list[list[tuple[float, float]]] = [[] for _ in opened]
    for _ in range(ROUNDS):
        for bound, state, taken in zip(opened, states, times, strict=True):
            taken.append(inserted(bound, state))
    medians = [tuple(statistics.median(column) for column in zip(*taken[5:], strict=True)) for taken in times]
    print(f"{SLOTS} requests of {PROMPT} tokens, medians of {ROUNDS - 5}, microseconds (ratio to {names[0]})")
    for name, (call, total) in zip(names, medians, strict=True):
        print(
            f"{name:10s} call {call:8.1f} ({call / medians[0][0]:.2f})   with its wait {total:8.1f}"
            f" ({total / medians[0][1]:.2f})"
        )
    for bound in opened:
        bound.close()


if __name__ == "__main__":
    main(sys.argv[1:] or ["cpu", "opencl"])
