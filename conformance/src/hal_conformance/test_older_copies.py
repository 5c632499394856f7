"""Writes that come after an older copy out of their memory, by every way to write (G22), on another stream than it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hal_core.errors import TicketTimeout
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, View
from hal_core.memory.writes import Writes

from .fixtures.hook_cases import HOOK_CASES, filled, hook_cases, overlaps
from .fixtures.prepared_calls import assert_alike, assert_copied
from .fixtures.stream_cases import copied
from .harness import backdoor
from .harness.asserts import assert_raises
from .harness.backdoor import arrive, drain
from .harness.bits import noise
from .harness.guarantees import guarantee
from .harness.sinks import KeepingSink
from .harness.waiters import A_WHILE, SHORT, all_wait
from .kit import Kit

if TYPE_CHECKING:
    from hal_core.memory.copies import CopyTicket
    from hal_core.memory.views import Memory
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket


MEMORIES, WORDS, INT64 = 3, 32, dtype_of("int64")


def write_one(kit: Kit, memories: Sequence[Memory], at: int, stream: Stream) -> Ticket:
    """Set a value in one of the memories."""
    return kit.bound.async_set_value(target=View.contiguous(memories[at], 0, (WORDS,), INT64), value=7, stream=stream)


def write_all(kit: Kit, memories: Sequence[Memory], at: int, stream: Stream) -> Ticket:
    """Write to all of the memories at once."""
    writes = Writes()
    for memory in memories:
        writes.set(View.contiguous(memory, 0, (WORDS,), INT64), 7)
    return kit.bound.write(writes=writes, stream=stream)


@guarantee(22, requires=("async_h2d", "async_d2h", "can_hold_stream"), also=(23, 28))
@pytest.mark.parametrize(("write", "at"), [(write_one, 0), *((write_all, at) for at in range(MEMORIES))])
def test_g22_a_write_comes_after_an_older_copy_of_any_of_its_memories(
    kit: Kit, write: Callable[[Kit, Sequence[Memory], int, Stream], Ticket], at: int
) -> None:
    """One memory is read by a copy that is held, and then by one that arrives; the others by none."""
    device = kit.device
    memories = [device.allocate(8 * WORDS) for _ in range(MEMORIES)]
    held, free, writer = device.stream(), device.stream(), device.stream()
    should = noise(at, 8 * WORDS)
    for memory in memories:
        backdoor.write(device, memory, 0, should, held)
    what = f"a write behind an older copy of memory {at}"
    with kit.held(held, what):
        older, newer = copied(kit, memories[at], held), copied(kit, memories[at], free)
        arrive(newer)
        written = write(kit, memories, at, writer)
        assert_raises(TicketTimeout, lambda: written.wait(A_WHILE), f"{what}, which is held: its ticket")
    for ticket in (older, written):
        arrive(ticket, what)
    for when, copy in (("older", older), ("newer", newer)):
        assert_alike(copy.data[0][: 8 * WORDS], should, f"the {when} copy of memory {at}, made before a write")
    got = backdoor.read(device, memories[at], writer)[: 8 * WORDS].view(np.int64)
    assert (got == 7).all(), f"{what} wrote {got.tolist()}"


@guarantee(22, requires=("async_h2d", "async_d2h", "can_hold_stream"), also=(1, 2, 4, 23, 28))
def test_g22_every_form_of_a_call_comes_after_an_older_copy(kit: Kit) -> None:
    """Each on a stream of its own. A write that did not wait would be in the copy, which is made after all of them."""
    device, held = kit.device, kit.device.stream()
    hooks = [hook for hook in HOOK_CASES if overlaps(kit, hook)]
    made = {what: make(kit) for hook in hooks for what, make in hook_cases(kit, hook)}
    for call in made.values():
        for memory, data in ((call.memory, call.before), *call.sources):
            backdoor.write(device, memory, 0, data, device.default_stream)
    streams = {what: device.stream() for what in made}
    with kit.held(held, "calls behind older copies of what they write"):
        copies = {what: copied(kit, call.memory, held) for what, call in made.items()}
        tickets = {what: call.act(streams[what]) for what, call in made.items()}
        all_wait(tickets, "a copy on a held stream of what they write")
    for what, call in made.items():
        assert_copied(copies[what], call.before, f"the copy made before {what}, on a held stream")
        call.complete(tickets[what])
        wrong = call.wrong(backdoor.read(device, call.memory, streams[what])[: len(call.before)])
        assert not wrong, f"{what} behind an older copy: {wrong}"


RANGES: dict[str, tuple[list[tuple[int, int]], int]] = {
    "its only range": ([(64, 64)], 64),
    "the last bytes of its range": ([(64, 64)], 120),
    "the first of three ranges": ([(0, 64), (128, 64), (512, 64)], 0),
    "the second of three ranges": ([(0, 64), (128, 64), (512, 64)], 128),
    "the last of three ranges": ([(0, 64), (128, 64), (512, 64)], 568),
    "the last of three ranges, backwards": ([(512, 64), (128, 64), (0, 64)], 56),
    "the first of three ranges, backwards": ([(512, 64), (128, 64), (0, 64)], 560),
    "a range after an empty one": ([(960, 0), (256, 64)], 256),
    "a range before an empty one": ([(256, 64), (0, 0)], 312),
    "one of two hundred ranges": ([(8 * (at % 120), 8) for at in range(200)], 8 * 79),
}
"""The kind of write, to the ranges of the copy and the offset of the eight bytes written."""


@guarantee(22, requires=("async_h2d", "async_d2h", "can_hold_stream"), also=(1, 23))
def test_g22_a_write_comes_after_a_copy_of_any_of_its_ranges(kit: Kit) -> None:
    """Only a part of the copy is written to, by one element on a stream of its own."""
    device, held, should = kit.device, kit.device.stream(), noise(11, 1024)
    memories = {what: device.allocate(1024) for what in RANGES}
    streams = {what: device.stream() for what in RANGES}
    for memory in memories.values():
        backdoor.write(device, memory, 0, should, held)
    with kit.held(held, "writes to ranges that a copy reads"):
        copies, tickets = {}, {}
        for what, (ranges, at) in RANGES.items():
            copies[what] = device.copy_out(memories[what], [ByteRange(*part) for part in ranges], held)
            target = View.contiguous(memories[what], at, (1,), INT64)
            tickets[what] = kit.bound.async_set_value(target=target, value=7, stream=streams[what])
        all_wait(tickets, "a copy on a held stream that reads there")
    for what, (ranges, _) in RANGES.items():
        arrive(copies[what])
        for (offset, nbytes), data in zip(ranges, copies[what].data, strict=True):
            assert_alike(
                data,
                should[offset : offset + nbytes],
                f"the copy made before a write to {what}, bytes {offset} to {offset + nbytes}",
            )
        arrive(tickets[what])


def write_several(kit: Kit, target: Any, stream: Stream) -> Ticket:  # noqa: ANN401 (a framework's tensor)
    """Write to a tensor and to other memory at once."""
    writes = Writes()
    writes.set(kit.device.resolve(target), -1)
    writes.set(View.contiguous(kit.device.allocate(64), 0, (8,), INT64), 1)
    return kit.bound.write(writes=writes, stream=stream)


def setting(part: slice, value: object) -> Callable[[Kit, Any, Stream], Ticket]:
    """Return a call that sets a part of a tensor to a value."""
    return lambda kit, target, stream: kit.bound.async_set_value(target=target[part], value=value, stream=stream)


TENSORS: dict[str, tuple[Callable[[Kit, Any, Stream], Ticket], slice]] = {
    "a fill": (setting(slice(None), -1), slice(None)),
    "an array": (setting(slice(None), np.full(64, -1, np.int64)), slice(None)),
    "an array of 8 elements": (setting(slice(8, 16), np.full(8, -1, np.int64)), slice(8, 16)),
    "a write to several": (write_several, slice(None)),
}
"""Ways to write -1 to a part of a tensor."""


@guarantee(22, requires=("async_h2d", "async_d2h", "can_hold_stream", "tensors"), also=(23,))
def test_g22_a_tensor_is_written_after_an_older_copy_of_it(kit: Kit) -> None:
    """Its memory is found twice, for the copy and for the write: two objects, and the same addresses."""
    device, support, should = kit.device, kit.subject.support, np.arange(64, dtype=np.int64)
    held, copies, tickets = device.stream(), {}, {}
    tensors: dict[str, Any] = {what: support.tensor(device, should) for what in TENSORS}
    for tensor in tensors.values():
        support.values_of(device, tensor)
    streams = {what: device.stream() for what in TENSORS}
    with kit.held(held, "writes to tensors behind older copies of them"):
        for what, (write, _) in TENSORS.items():
            view = device.resolve(tensors[what])
            low, end = view.bounds()
            copies[what] = device.copy_out(view.memory, [ByteRange(low, end - low)], held)
            tickets[what] = write(kit, tensors[what], streams[what])
        all_wait(tickets, "a copy of their tensors on a held stream")
    for what, (_, part) in TENSORS.items():
        for ticket in (copies[what], tickets[what]):
            arrive(ticket, what)
        got, after = copies[what].data[0].view(np.int64)[:64].tolist(), should.copy()
        assert got == should.tolist(), f"{what} of a tensor came before an older copy of it, which has {got}"
        after[part] = -1
        assert support.values_of(device, tensors[what]).tolist() == after.tolist(), f"{what} of a tensor"


@guarantee(23, requires=("async_h2d", "async_d2h", "can_hold_stream"), also=(1, 22))
@pytest.mark.parametrize("what", ["a copy", "an output"])
def test_g23_every_stream_that_asks_waits_for_a_pending_read(kit: Kit, what: str) -> None:
    """The worker's own writes and those of hooks, on five streams in turn, behind one read that is held."""
    device, bound, held = kit.device, kit.bound, kit.device.stream()
    fixture, _ = filled(kit)
    memory, view = fixture.state.memory, fixture.state.view("top_p")
    step = fixture.advance([4, 0, 2, 5, 1, 3])
    asking = [device.stream(), device.default_stream, device.stream()]
    writing, sink, before = [device.stream(), device.stream()], KeepingSink(), fixture.model.block.copy()
    fixture.stream = held
    with kit.held(held, f"streams that are ordered after {what}"):
        read = fixture.save(step, sink) if what == "an output" else copied(kit, memory, held)
        bound.order_after_reads(memory=memory, stream=asking[0])
        tickets = [bound.async_set_value(target=view[2:], value=0.5, stream=writing[0])]
        bound.order_after_reads(memory=memory, stream=asking[1])
        device.order_after_reads(asking[2])
        tickets.append(bound.async_set_value(target=view[:1], value=view[1:2], stream=writing[1]))
        for at, stream in enumerate(asking):
            why = f"synchronize of stream {at} of three that are ordered after {what} on a held stream"
            assert_raises(TicketTimeout, partial(stream.synchronize, SHORT), why)
        for at, ticket in enumerate(tickets):
            assert_raises(TicketTimeout, partial(ticket.wait, SHORT), f"write {at} of two behind {what}: its ticket")
    for stream in asking:
        drain(stream)
    for ticket in tickets:
        arrive(ticket)
    if what == "a copy":
        arrive(read)
        assert_alike(cast("CopyTicket", read).data[0][: len(before)], before, "a copy before two writes")
    else:
        sink.resolve_all()
        arrive(read)
