"""What plain Python saves for a few requests: each twin beside the general way of the same work, in one run.

    python benchmarks/few.py            the cpu device
    python benchmarks/few.py cuda       another device of this installation

An insertion of up to FEW new requests is planned, checked and booked in plain Python, as most of a NumPy call on so few
is overhead; and so are more blocks for up to FEW_GROWING running ones. Here each of those places takes the general way
instead, in turn with what is installed and in a new order each round. Prints medians from the batch object to the
ticket, and how much is lost; "installed, again" is the error of the measurement.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from hal_core import Request, SamplingParams, StateConfig, TaskBatch, TaskKind
from hal_core.runtime.bound import BoundDevice
from hal_core.slots.state import SlotState

import hal

PROMPT, COUNTS = 64, (1, 8)
ROUNDS = 800
PARAMS = SamplingParams(temperature=0.7, top_p=0.9, seed=7, max_tokens=100, eos_token_ids=(2,))


class Seam(NamedTuple):
    """A module's value, and what to give it so that the general way is taken."""

    module: str
    name: str
    general: object


NEW = {
    "plan": Seam("hal_core.slots.insertion", "FEW", 0),
    "check": Seam("hal_core.slots.checks", "FEW", 0),
    "booking": Seam("hal_core.slots.host_table", "FEW", 0),
}
"""What is done in plain Python for a few new requests, and for a few that get more blocks."""
GROWING = {
    "plan": Seam("hal_core.slots.insertion", "FEW_GROWING", 0),
    "check": Seam("hal_core.slots.checks", "_growing_are_sound", lambda *_: False),
}
Ways = Mapping[str, tuple[Seam, ...]]


def ways_of(places: Mapping[str, Seam]) -> tuple[Ways, dict[Seam, object]]:
    """Each place alone by the general way, and all of them; and what is installed, of the modules that are there."""
    here = {way: seam for way, seam in places.items() if seam.module in sys.modules}
    installed = {seam: getattr(sys.modules[seam.module], seam.name) for seam in here.values()}
    alone = {way: (seam,) for way, seam in here.items()}
    return {"installed": (), "installed, again": (), **alone, "all": tuple(here.values())}, installed


def choose(general: tuple[Seam, ...], installed: Mapping[Seam, object]) -> None:
    """Let these places take the general way, and all others what is installed."""
    for seam, value in installed.items():
        setattr(sys.modules[seam.module], seam.name, seam.general if seam in general else value)


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


def growth_us(bound: BoundDevice, state: SlotState, count: int) -> float:
    """One more block for each of ``count`` requests that run, the batch object included, in microseconds."""
    slots, prompt = list(range(count)), list(range(PROMPT))
    requests = [state.admit(Request(f"r{at}", prompt, PARAMS)) for at in slots]
    blocks = [list(range(4 * at, 4 * at + 4)) for at in slots]
    batch = TaskBatch.prefill(slots, requests, [PROMPT] * count, blocks)
    bound.insert_tasks(state=state, tasks=batch, stream=bound.default_stream).wait()
    more, none = [[4 * count + at] for at in slots], [0] * count
    begin = time.perf_counter()
    batch = TaskBatch([TaskKind.MORE_BLOCKS] * count, slots, requests, none, none, more, [4] * count)
    ticket = bound.insert_tasks(state=state, tasks=batch, stream=bound.default_stream)
    taken = (time.perf_counter() - begin) * 1e6
    ticket.wait()
    state.release(slots)
    return taken


def compare(time_us: Callable[[], float], places: Mapping[str, Seam]) -> dict[str, float]:
    """Each way's median in microseconds."""
    ways, installed = ways_of(places)
    times: dict[str, list[float]] = {way: [] for way in ways}
    gc.disable()
    for turn in range(ROUNDS):
        for way in random.sample(list(ways), len(ways)):
            choose(ways[way], installed)
            times[way].append(time_us())
        if turn % 20 == 0:
            gc.collect()
    gc.enable()
    choose((), installed)
    return {way: statistics.median(taken[5:]) for way, taken in times.items()}


def main(names: list[str]) -> None:
    """Run and print everything."""
    chosen = names[0] if names else "cpu"
    with hal.open_device(chosen) as bound:
        state = bound.state(StateConfig(num_slots=128, max_model_len=8192))
        for what, place_us, places in (("new", insertion_us, NEW), ("that get a block", growth_us, GROWING)):
            for count in COUNTS:
                medians = compare(partial(place_us, bound, state, count), places)
                print(f"{f'{bound.name}, {count} requests {what}, {PROMPT} tokens':42s} {'us':>8s} {'lost':>7s}")
                for way, taken in medians.items():
                    print(f"  {way:40s} {taken:8.1f} {taken / medians['installed'] - 1:+7.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
