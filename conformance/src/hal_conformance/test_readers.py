"""No write reaches a slot before the last step that reads it has passed (G28): all readers, writers, streams and
owners, once and again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hal_core.errors import TicketTimeout
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_core.memory.writes import Writes
from hal_core.slots.tasks import Task, TaskKind

from .fixtures.hook_cases import SIZES, filled, new_tasks
from .fixtures.prepared_calls import assert_alike
from .fixtures.sizes import sizes
from .fixtures.stream_cases import Busy, copied
from .fixtures.world import World
from .harness import backdoor
from .harness.asserts import assert_raises
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .harness.waiters import SHORT
from .kit import Kit, Latch

if TYPE_CHECKING:
    from hal_core.slots.state import SlotState
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket


LEFT, NAMED, EMPTY = 1, (0, 1, 2), 4
"""The slot that a request leaves and another enters, the slots that every step names, and one that no step names."""

Write = Callable[[World, list[Task]], "Ticket"]


def _leave(fixture: World, tasks: list[Task]) -> Ticket:
    return fixture.insert([Task(TaskKind.PREEMPTED, LEFT, tasks[LEFT].request)])


def _leave_and_enter(fixture: World, tasks: list[Task]) -> Ticket:
    return fixture.insert([Task(TaskKind.ABORTED, LEFT, tasks[LEFT].request), *new_tasks(fixture, [LEFT])])


def _grow(fixture: World, tasks: list[Task]) -> Ticket:
    return fixture.insert([Task(TaskKind.MORE_BLOCKS, LEFT, tasks[LEFT].request, blocks=[55], first_block=2)])


def _enter_elsewhere(fixture: World, tasks: list[Task]) -> Ticket:
    return fixture.insert(new_tasks(fixture, [EMPTY]))


def _set_slot(fixture: World, tasks: list[Task]) -> Ticket:
    fixture.model.set("next_tokens", LEFT, 777)
    view = fixture.state.view("next_tokens")[LEFT]
    return fixture.bound.async_set_value(target=view, value=777, stream=fixture.stream)


def _set_all(fixture: World, tasks: list[Task]) -> Ticket:
    view, cells = fixture.state.view("sampled_token_ids"), fixture.model.cells["sampled_token_ids"]
    cells[...] = 900 + np.arange(len(cells))[:, None]
    return fixture.bound.async_set_value(target=view, value=cells.copy(), stream=fixture.stream)


def _write_several(fixture: World, tasks: list[Task]) -> Ticket:
    device, writes = fixture.device, Writes()
    writes.fill(fixture.state.view("next_tokens"), [LEFT, EMPTY], 555)
    writes.fill(View.contiguous(device.allocate(64), 0, (1, 8), dtype_of("int64")), [0], 1)
    fixture.model.cells["next_tokens"][[LEFT, EMPTY]] = 555
    return fixture.bound.write(writes=writes, stream=fixture.stream)


def _set_from_device(fixture: World, tasks: list[Task]) -> Ticket:
    fixture.model.cells["min_p"][...] = fixture.model.cells["top_p"]
    value, view = fixture.state.view("top_p"), fixture.state.view("min_p")
    return fixture.bound.async_set_value(target=view, value=value, stream=fixture.stream)


def _set_strided(fixture: World, tasks: list[Task]) -> Ticket:
    view, cells = fixture.state.view("bad_words")[::-2], fixture.model.cells["bad_words"][::-2]
    cells[...] = 40 + np.arange(cells.size).reshape(cells.shape)
    return fixture.bound.async_set_value(target=view, value=cells.tolist(), stream=fixture.stream)


def _write_state(fixture: World, tasks: list[Task]) -> Ticket:
    writes, rows = Writes(), np.array([[31], [32]])
    writes.rows(fixture.state.view("next_tokens"), [EMPTY, LEFT], rows)
    fixture.model.cells["next_tokens"][[EMPTY, LEFT]] = rows
    return fixture.bound.write(writes=writes, stream=fixture.stream)


WRITES: dict[str, Write] = {
    "a request that leaves": _leave,
    "a request that leaves and one that enters": _leave_and_enter,
    "more blocks": _grow,
    "a request that enters a slot the step does not name": _enter_elsewhere,
    "a value for one slot": _set_slot,
    "a value for every slot": _set_all,
    "a value on the device": _set_from_device,
    "a write to several memories": _write_several,
}
"""Description to the call; ``update_inputs`` reads every slot, including one that no step names."""
FORMS: dict[str, Write] = {"a strided list": _set_strided, "a write to the state alone": _write_state}
"""More forms of the same calls, which are behind one step."""
STREAMS = ("from the default stream to another", "from another stream to the default one", "between two other ones")


def streams(kit: Kit, which: str) -> tuple[Stream, Stream]:
    """Return the streams of the reader and the writer."""
    device = kit.device
    reader = device.default_stream if which == STREAMS[0] else device.stream()
    return reader, device.default_stream if which == STREAMS[1] else device.stream()


WAITS = (
    "it waits for the device, so a write that overlaps a step cannot be tested, nor used. Either provide a kernel: "
    "override update_inputs() so that it queues its work on the stream and returns (the default of DeviceBase copies "
    "the state out and back). Or declare it: update_waits = True in the plugin's Support, which removes "
    "overlapped_update from its offers; tests that need it are then skipped"
)


def step_held(kit: Kit, latch: Latch, step: Callable[[], Ticket]) -> Ticket:
    """Call ``step``, an ``update_inputs`` on the held stream. If it waits for the device, one check reports it; other
    checks are skipped."""
    __tracebackhide__ = True
    if kit.update_waits:
        pytest.skip("update_inputs waits for the device, as reported by another check of G28")
    ticket = step()
    if latch.forced:
        kit.update_waits = True
        raise AssertionError(f"update_inputs did not return while its stream was held: {WAITS}")
    return ticket


def update_held(fixture: World, latch: Latch, order: tuple[int, ...]) -> Ticket:
    """Run a step of the fixture's state on the held stream."""
    __tracebackhide__ = True
    return step_held(fixture.kit, latch, lambda: fixture.update_inputs(fixture.step(order)))


def still_waits(what: str, ticket: Ticket) -> None:
    """Assert that the write waits behind the held step."""
    __tracebackhide__ = True
    assert not ticket.done(), f"{what} is done, though a step that reads the slots is held"
    assert_raises(TicketTimeout, lambda: ticket.wait(SHORT), f"{what}, behind a step that is held: its ticket")


@guarantee(28, requires=("async_h2d", "can_hold_stream"))
def test_g28_an_event_comes_after_what_its_stream_waits_for(kit: Kit) -> None:
    """By such an event the core orders writes after readers; hal has put no work on the stream since the wait."""
    device = kit.device
    held, stream, memory = device.stream(), device.stream(), device.allocate(64)
    arrive(
        kit.bound.async_set_value(target=View.contiguous(memory, 0, (64,), dtype_of("uint8")), value=1, stream=stream)
    )
    with kit.held(held, "the event of a stream that waits for another"):
        stream.wait(device.event(held))
        event = device.event(stream)
        passed = event.done()
    assert not passed, "an event has passed, though its stream waits for another stream that is held"
    assert event.wait(PATIENCE), f"the event has not passed {PATIENCE} s after the other stream was let go"


@guarantee(28, requires=("async_h2d", "can_hold_stream", "overlapped_update"))
@pytest.mark.parametrize("which", STREAMS)
@pytest.mark.parametrize("what", [*WRITES, *FORMS])
def test_g28_a_write_comes_after_a_step_on_another_stream(kit: Kit, what: str, which: str) -> None:
    reader, writer = streams(kit, which)
    fixture, tasks = filled(kit, NAMED)
    case = f"{what}, {which},"
    with kit.held(reader, case) as latch:
        fixture.stream = reader
        stepped = update_held(fixture, latch, NAMED)
        fixture.stream = writer
        written = (WRITES | FORMS)[what](fixture, tasks)
        still_waits(case, written)
    for ticket in (stepped, written):
        arrive(ticket)
    fixture.check(f"{case} behind a step")


@guarantee(28, requires=("async_h2d", "can_hold_stream", "overlapped_update"))
@pytest.mark.parametrize("last_first", [False, True], ids=["in-order", "last-first"])
@pytest.mark.parametrize("what", WRITES)
def test_g28_a_write_comes_after_every_step_not_only_first_or_last(kit: Kit, what: str, last_first: bool) -> None:
    """Three steps on two streams, the second of which waits for the first; they are released one by one."""
    device, held, writer = kit.device, [kit.device.stream(), kit.device.stream()], kit.device.stream()
    fixture, tasks = filled(kit, NAMED)
    case = f"{what} behind three steps on two streams"
    latches = [kit.held(stream, case) for stream in held]
    with latches[0], latches[1]:
        fixture.stream = held[0]
        steps = [update_held(fixture, latches[0], order) for order in ((0, 1), (1, 2))]
        held[1].wait(device.event(held[0]))
        fixture.stream = held[1]
        steps.append(update_held(fixture, latches[1], (2, 0, 1)))
        fixture.stream = writer
        written = WRITES[what](fixture, tasks)
        still_waits(case, written)
        latches[last_first].release()
        if not last_first:
            for step in steps[:2]:
                arrive(step)
        still_waits(f"{case}, of which {'the first two are' if last_first else 'the last is'} held,", written)
    for ticket in (*steps, written):
        arrive(ticket)
    fixture.check(case)


@guarantee(28, requires=("async_h2d", "async_d2h", "can_hold_stream"))
@pytest.mark.parametrize("which", STREAMS)
@pytest.mark.parametrize("what", WRITES)
def test_g28_what_a_reader_sees_is_not_written_over(kit: Kit, what: str, which: str) -> None:
    """A reader registered by the worker; it is a copy here, so ``update_inputs`` need not overlap."""
    reader, writer = streams(kit, which)
    if what == "a request that enters a slot the step does not name":
        return  # this reader names its slots
    fixture, tasks = filled(kit, NAMED)
    should, case = fixture.model.block.copy(), f"{what}, {which},"
    with kit.held(reader, case):
        busy = Busy(kit, reader, 3)
        seen = copied(kit, fixture.state.memory, reader)
        fixture.state.add_reader(np.array(NAMED, np.int32), kit.device.event(reader))
        fixture.stream = writer
        written = WRITES[what](fixture, tasks)
        still_waits(case, written)
        behind = backdoor.put(kit.device, kit.device.allocate(64), [(0, bytes(64))], writer)
        still_waits(f"work behind {case}", behind)
    for ticket in (seen, written, behind):
        arrive(ticket)
    assert_alike(seen.data[0], should, f"a reader saw {case} which came after it")
    fixture.check(f"{case} behind a reader")
    busy.check()


@guarantee(28, requires=("async_h2d", "async_d2h", "can_hold_stream"))
def test_g28_a_write_comes_after_each_of_several_readers(kit: Kit) -> None:
    """Independent readers on three streams, released in different orders."""
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        fixture, tasks = filled(kit, NAMED)
        should = fixture.model.block.copy()
        readers, fixture.stream = (
            [kit.device.default_stream, kit.device.stream(), kit.device.stream()],
            kit.device.stream(),
        )
        what = "a write behind three readers"
        latches = [kit.held(reader, what) for reader in readers]
        with latches[0], latches[1], latches[2]:
            seen = []
            for slots, reader in zip(((0, 1), (1,), (1, 2)), readers, strict=True):
                seen.append(copied(kit, fixture.state.memory, reader))
                fixture.state.add_reader(np.array(slots, np.int32), kit.device.event(reader))
            written = _leave_and_enter(fixture, tasks)
            for at, stream_case in enumerate(order):
                still_waits(f"{what}, of which {3 - at} are held", written)
                latches[stream_case].release()
                arrive(seen[stream_case])
        arrive(written)
        for copy in seen:
            assert_alike(copy.data[0], should, "a reader saw a write that came after it")
        fixture.check(what)


@guarantee(28, requires=("async_h2d", "can_hold_stream", "overlapped_update"))
def test_g28_a_step_holds_up_no_other_state_and_no_host(kit: Kit) -> None:
    """The step of one state is held. Another state is written at once, and so is the first once its step has passed."""
    held, writer = kit.device.stream(), kit.device.stream()
    fixture, tasks = filled(kit, NAMED)
    other = World(kit, SIZES, name="other")
    with kit.held(held, "a write to a state that no held step reads") as latch:
        fixture.stream = held
        stepped = update_held(fixture, latch, NAMED)
        other.stream = writer
        other.enter(new_tasks(other, [0, 3]))
        arrive(_set_all(other, []))
        other.check("a write to a state that no held step reads")
    arrive(stepped)
    with kit.held(held, "a write behind a step that has passed"):
        busy = Busy(kit, held, 1)
        fixture.stream = writer
        arrive(_leave_and_enter(fixture, tasks))
        fixture.check("a write behind a step that has passed")
    busy.check()


@guarantee(28, requires=("async_h2d", "can_hold_stream"), also=(1, 4))
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["one-slot-first", "every-slot-first"])
def test_g28_writes_on_two_streams_come_after_one_reader(kit: Kit, order: tuple[int, int]) -> None:
    """Two streams wait for one event while its stream is held: each must."""
    device, names = kit.device, ("a value for one slot", "a value for every slot")
    reader, writers = device.stream(), [device.stream(), device.stream()]
    fixture, tasks = filled(kit, NAMED)
    written = {}
    with kit.held(reader, "writes on two streams"):
        busy = Busy(kit, reader, 4)
        fixture.state.add_reader(np.array(NAMED, np.int32), device.event(reader))
        for at in order:
            fixture.stream = writers[at]
            written[names[at]] = WRITES[names[at]](fixture, tasks)
        for what, ticket in written.items():
            still_waits(f"{what}, on one of two streams behind a reader,", ticket)
    for ticket in written.values():
        arrive(ticket)
    fixture.check("writes on two streams behind one reader")
    busy.check()


@guarantee(28, requires=("async_h2d", "can_hold_stream"))
@pytest.mark.parametrize("what", ["a request that leaves and one that enters", "a value for one slot"])
def test_g28_a_write_comes_after_the_oldest_of_many_readers(kit: Kit, what: str) -> None:
    """All are pending when the write is called; then all but the oldest pass, some of which read the same slots."""
    device, many = kit.device, max(sizes(kit, "readers before a write"))  # which pass before it and the first reader do
    case = f"{what} behind the oldest of {many + 1} readers"
    held, writer = [device.stream(), device.stream()], device.stream()
    fixture, tasks = filled(kit, NAMED)
    latches = [kit.held(stream, case) for stream in held]
    with latches[0], latches[1]:
        busy = [Busy(kit, stream, 6) for stream in held]
        fixture.state.add_reader(np.array(NAMED, np.int32), device.event(held[0]))
        for number in range(many):
            slots = np.array([number % 3], np.int32) if number % 4 else None
            fixture.state.add_reader(slots, device.event(held[1]))
        fixture.stream = writer
        written = WRITES[what](fixture, tasks)
        latches[1].release()
        busy[1].check()
        still_waits(case, written)
    arrive(written)
    fixture.check(case)
    busy[0].check()


@guarantee(28, requires=("async_h2d", "can_hold_stream"))
def test_g28_a_companions_fields_are_written_after_its_own_readers(kit: Kit) -> None:
    """By every form of a value, each on a stream of its own; the target, which no step reads, is written meanwhile."""
    device, bound, reader = kit.device, kit.bound, kit.device.stream()
    state = bound.state(SIZES, name="target", companions=("proposer",))
    companion = state.companions[0]
    tokens, top = companion.view("next_tokens"), companion.view("top_p")
    values: dict[str, tuple[View, object]] = {
        "a scalar": (tokens, 5), "an array": (companion.view("seed"), np.arange(SIZES.num_slots)),
        "a list": (companion.view("top_k")[::2], [1, 2, 3]), "a value on the device": (companion.view("min_p"), top),
        "one element": (companion.view("temperature")[1:2], 0.5),
    }  # fmt: skip
    streams = {what: device.stream() for what in (*values, "a write to several", "a write to the target")}
    with kit.held(reader, "writes to a companion that is read"):
        busy = Busy(kit, reader, 5)
        companion.add_reader(np.array(NAMED, np.int32), device.event(reader))
        written = {}
        for what, (target, value) in values.items():
            written[what] = bound.async_set_value(target=target, value=value, stream=streams[what])
        writes = Writes()
        writes.fill(companion.view("step_idx"), [LEFT], 9)
        writes.fill(state.view("next_tokens"), [LEFT], 9)
        written["a write to several"] = bound.write(writes=writes, stream=streams["a write to several"])
        to_target = streams["a write to the target"]
        arrive(bound.async_set_value(target=state.view("seed"), value=3, stream=to_target))
        for what, ticket in written.items():
            still_waits(f"{what} of a companion that is read", ticket)
    for what, ticket in written.items():
        arrive(ticket, what)
    busy.check()


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
        case = f"write {turn} ({what}), {which},"
        with kit.held(reader, case):
            busy = Busy(kit, reader, turn)
            slots = np.array(NAMED, np.int32) if turn % 2 else None
            fixture.state.add_reader(slots, kit.device.event(reader))
            written = WRITES[what](fixture, tasks)
            still_waits(case, written)
        arrive(written)
        busy.check()
        fixture.check(f"{case} behind a reader")


@guarantee(28, requires=("async_h2d", "can_hold_stream", "overlapped_update"), also=(1,))
@pytest.mark.parametrize("which", STREAMS)
def test_g28_a_write_waits_for_each_step_on_one_pair_of_streams(kit: Kit, which: str) -> None:
    """Steps and insertions by turns, as a worker with two streams makes them."""
    reader, writer = streams(kit, which)
    fixture, tasks = filled(kit, NAMED)
    ways = ("a value for every slot", "a request that leaves and one that enters", "a write to several memories")
    for turn, what in enumerate(ways):
        case = f"write {turn} ({what}), {which},"
        with kit.held(reader, case) as latch:
            fixture.stream = reader
            stepped = update_held(fixture, latch, NAMED)
            fixture.stream = writer
            written = WRITES[what](fixture, tasks)
            still_waits(case, written)
        for ticket in (stepped, written):
            arrive(ticket)
        fixture.check(f"{case} behind a step")
        reader.wait(kit.device.event(writer))  # the next step reads the written values


@guarantee(28, requires=("async_h2d", "can_hold_stream", "overlapped_update"), also=(1, 12))
@pytest.mark.parametrize("which", STREAMS)
def test_g28_drafts_wait_for_each_step_on_one_pair_of_streams(kit: Kit, which: str) -> None:
    """Three held steps, each of which verifies the drafts given after the step before; each time in other slots."""
    reader, writer = streams(kit, which)
    fixture, _ = filled(kit, NAMED)
    for turn in range(3):
        what = f"drafts {turn}, {which},"
        with kit.held(reader, what) as latch:
            fixture.stream = reader
            step = fixture.step(NAMED, speculative=True)
            stepped = step_held(kit, latch, partial(fixture.update_inputs, step))
            fixture.stream = writer
            written = fixture.propose({NAMED[turn]: [5 + turn, 6], NAMED[turn - 1]: [7]})
            still_waits(what, written)
        for ticket in (stepped, written):
            arrive(ticket)
        fixture.check(f"{what} behind a step")
        reader.wait(kit.device.event(writer))
        arrive(fixture.save(step))


OWNERS = ("first", "second", "companion")
"""Owners of the memories of one write, in its order; bare memory comes before and after them."""


def _write_owners(kit: Kit, states: dict[str, SlotState], turn: int, first: str, writer: object) -> Ticket:
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
    second = bound.state(SIZES, name="second", companions=("proposer",))
    states = {"first": target.state, "second": second, "companion": second.companions[0]}
    for turn, first in enumerate(OWNERS):
        what = f"a write to several, the {first} before others, while the {read} is read, {which},"
        with kit.held(reader, what):
            busy = Busy(kit, reader, turn)
            states[read].add_reader(np.array(NAMED, np.int32), kit.device.event(reader))
            written = _write_owners(kit, states, turn, first, writer)
            still_waits(what, written)
        arrive(written)
        busy.check()
        target.model.cells["next_tokens"][[LEFT, EMPTY]] = 500 + turn
        target.check(what)
