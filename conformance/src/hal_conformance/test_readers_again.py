"""Writes behind readers (G28) for the second and third time on one pair of streams, and to several owners at once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_core.memory.writes import Writes

from .fixtures.hook_cases import SIZES, filled, new_tasks
from .fixtures.stream_cases import Busy
from .fixtures.world import World
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .kit import Kit
from .test_readers import EMPTY, LEFT, NAMED, STREAMS, WRITES, step_held, still_waits, streams, update_held

if TYPE_CHECKING:
    from hal_core.slots.state import SlotState
    from hal_core.tickets import Ticket

AGAIN = ("a value for one slot", "a value on the device", "a write to several memories")
"""Writes that may be made again and again to the same slots."""


@guarantee(28, requires=("async_h2d", "can_hold_stream"), also=(1,))
@pytest.mark.parametrize("which", STREAMS)
def test_g28_a_write_waits_for_each_reader_on_one_pair_of_streams(kit: Kit, which: str) -> None:
    """Several ways to write, and the first of them again: a stream that has waited once must wait again for a later
    step."""
    reader, writer = streams(kit, which)
    fixture, tasks = filled(kit, NAMED)
    fixture.stream = writer
    for turn, what in enumerate((*AGAIN, AGAIN[0])):
        told = f"write {turn} ({what}), {which},"
        with kit.held(reader, told):
            busy = Busy(kit, reader, turn)
            slots = np.array(NAMED, np.int32) if turn % 2 else None
            fixture.state.add_reader(slots, kit.device.event(reader))
            written = WRITES[what](fixture, tasks)
            still_waits(told, written)
        arrive(written)
        busy.check()
        fixture.check(f"{told} behind a reader")


@guarantee(28, requires=("async_h2d", "can_hold_stream", "overlapped_update"), also=(1,))
@pytest.mark.parametrize("which", STREAMS)
def test_g28_a_write_waits_for_each_step_on_one_pair_of_streams(kit: Kit, which: str) -> None:
    """Steps and insertions by turns, as a worker with two streams makes them."""
    reader, writer = streams(kit, which)
    fixture, tasks = filled(kit, NAMED)
    ways = ("a value for every slot", "a request that leaves and one that enters", "a write to several memories")
    for turn, what in enumerate(ways):
        told = f"write {turn} ({what}), {which},"
        with kit.held(reader, told) as latch:
            fixture.stream = reader
            stepped = update_held(fixture, latch, NAMED)
            fixture.stream = writer
            written = WRITES[what](fixture, tasks)
            still_waits(told, written)
        for ticket in (stepped, written):
            arrive(ticket)
        fixture.check(f"{told} behind a step")
        reader.wait(kit.device.event(writer))  # the next step reads the written values


@guarantee(28, requires=("async_h2d", "can_hold_stream", "overlapped_update"), also=(1, 12))
@pytest.mark.parametrize("which", STREAMS)
def test_g28_drafts_wait_for_each_step_on_one_pair_of_streams(kit: Kit, which: str) -> None:
    """Three held steps, each of which verifies the drafts given after the step before; each time in other slots."""
    reader, writer = streams(kit, which)
    fixture, _ = filled(kit, NAMED)
    for turn in range(3):
        told = f"drafts {turn}, {which},"
        with kit.held(reader, told) as latch:
            fixture.stream = reader
            step = fixture.step(NAMED, speculative=True)
            stepped = step_held(kit, latch, partial(fixture.update_inputs, step))
            fixture.stream = writer
            written = fixture.propose({NAMED[turn]: [5 + turn, 6], NAMED[turn - 1]: [7]})
            still_waits(told, written)
        for ticket in (stepped, written):
            arrive(ticket)
        fixture.check(f"{told} behind a step")
        reader.wait(kit.device.event(writer))
        arrive(fixture.save(step))


OWNERS = ("first", "second", "companion")
"""Owners of the memories of one write, in its order; bare memory comes before and after them."""


def _write(kit: Kit, states: dict[str, SlotState], turn: int, first: str, writer: object) -> Ticket:
    """Write to all states and to bare memory at once, beginning with one of them."""
    writes, order = Writes(), [first, *[name for name in states if name != first]]
    bare = [View.contiguous(kit.device.allocate(64), 0, (1, 8), dtype_of("int64")) for _ in range(2)]
    writes.fill(bare[0], [0], turn)
    for name in order:
        writes.fill(states[name].view("next_tokens"), [LEFT, EMPTY], 500 + turn)
    writes.fill(bare[1], [0], turn)
    return kit.bound.write(writes=writes, stream=writer)  # type: ignore[arg-type]  # a stream of the device


@guarantee(28, requires=("async_h2d", "can_hold_stream"), also=(1,))
@pytest.mark.parametrize("read", OWNERS)
@pytest.mark.parametrize("which", STREAMS[1:])
def test_g28_a_write_to_several_waits_for_the_readers_of_each(kit: Kit, read: str, which: str) -> None:
    """One owner is read: the first, the second or the last of the write's. No step reads the rest."""
    reader, writer = streams(kit, which)
    target, bound = World(kit, SIZES, name="first"), kit.bound
    target.enter(new_tasks(target, NAMED))
    second = bound.state(SIZES, name="second", beside=("proposer",))
    states = {"first": target.state, "second": second, "companion": second.companions[0]}
    for turn, first in enumerate(OWNERS):
        told = f"a write to several, the {first} before others, while the {read} is read, {which},"
        with kit.held(reader, told):
            busy = Busy(kit, reader, turn)
            states[read].add_reader(np.array(NAMED, np.int32), kit.device.event(reader))
            written = _write(kit, states, turn, first, writer)
            still_waits(told, written)
        arrive(written)
        busy.check()
        target.model.cells["next_tokens"][[LEFT, EMPTY]] = 500 + turn
        target.check(told)
