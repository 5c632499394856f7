"""What plain Python saves for a few new requests: each twin beside the general way of the same work, in one run.

    python benchmarks/few.py            the cpu device
    python benchmarks/few.py cuda       another device of this installation
    python benchmarks/few.py stand-in   cuda over the driver that stands in for CUDA's in its tests: the host's part

An insertion of up to FEW new requests is planned, checked and booked in plain Python, as most of a NumPy call on so few
is overhead. Here each of those places takes the general way instead, in turn with what is installed and in a new order
each round. Prints medians from the batch object to the ticket, and how much is lost; "installed, again" is the error of
the measurement.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hal_core import Request, SamplingParams, StateConfig, TaskBatch
from hal_core.runtime.bound import BoundDevice, bind
from hal_core.slots.host_table import FEW
from hal_core.slots.state import SlotState

import hal

PROMPT, COUNTS = 64, (1, 8)
ROUNDS = 800
PARAMS = SamplingParams(temperature=0.7, top_p=0.9, seed=7, max_tokens=100, eos_token_ids=(2,))
PLACES = {
    "plan": ("hal_core.slots.insertion",),
    "check": ("hal_core.slots.checks",),
    "booking": ("hal_core.slots.host_table",),
    "entries (cuda)": ("hal_cuda.entering",),
}
"""What is done in plain Python for a few, and the module whose ``FEW`` says so."""


def choose(general: tuple[str, ...]) -> None:
    """Let these modules take the general way, and all others what is installed."""
    for modules in PLACES.values():
        for name in modules:
            module = sys.modules.get(name)
            if module is not None:
                module.FEW = 0 if name in general else FEW  # type: ignore[attr-defined]


def insertion_us(bound: BoundDevice, state: SlotState, count: int) -> float:
    """One insertion of ``count`` new requests, the batch object included, in microseconds."""
    slots, prompt = list(range(count)), list(range(PROMPT))
    requests = [state.admit(Request(f"r{at}", prompt, PARAMS)) for at in slots]
    blocks = [list(range(4 * at, 4 * at + 4)) for at in slots]
    begin = time.perf_counter()
    batch = TaskBatch.prefill(slots, requests, [PROMPT] * count, blocks)
    ticket = bound.insert_tasks(state=state, tasks=batch, stream=bound.default_stream)
    taken = (time.perf_counter() - begin) * 1e6
    ticket.wait()
    state.release(slots)
    return taken


def compare(bound: BoundDevice, state: SlotState, ways: Mapping[str, tuple[str, ...]], count: int) -> dict[str, float]:
    """Each way's median in microseconds."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    gc.disable()
    for turn in range(ROUNDS):
        for way in random.sample(list(ways), len(ways)):
            choose(ways[way])
            times[way].append(insertion_us(bound, state, count))
        if turn % 20 == 0:
            gc.collect()
    gc.enable()
    choose(())
    return {way: statistics.median(taken[5:]) for way, taken in times.items()}


def over_stand_in() -> BoundDevice:
    """A cuda device whose driver copies and launches nothing."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "plugins/cuda/tests"))
    from hal_cuda import launching
    from hal_cuda.device import CudaDevice
    from hal_cuda.driver import Driver

    from conftest import OK, StandIn

    class Idle(StandIn):
        cuLaunchKernel = cuMemcpyHtoDAsync = lambda self, *arguments: (OK,)

    launching.cubin = lambda name, arch: b""
    return bind(CudaDevice(0, {"stream": 1}, Driver(Idle({}))))


def main(names: list[str]) -> None:
    """Run and print everything."""
    chosen = names[0] if names else "cpu"
    with over_stand_in() if chosen == "stand-in" else hal.open_device(chosen) as bound:
        state = bound.state(StateConfig(num_slots=128, max_model_len=8192))
        here = {way: modules for way, modules in PLACES.items() if modules[0] in sys.modules}
        ways = {"installed": (), "installed, again": (), **here, "all": tuple(m for ms in here.values() for m in ms)}
        for count in COUNTS:
            medians = compare(bound, state, ways, count)
            print(f"{bound.name}, {count} requests x {PROMPT} tokens{'':8s} {'us':>8s} {'lost':>7s}")
            for way, taken in medians.items():
                print(f"  {way:40s} {taken:8.1f} {taken / medians['installed'] - 1:+7.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
