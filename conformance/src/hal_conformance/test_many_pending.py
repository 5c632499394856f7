"""Hundreds of calls on one held stream, or on several: each pending, each right, in order (G1, G3, G4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, View

from .fixtures.prepared_calls import unlike
from .harness import backdoor
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .kit import Kit

if TYPE_CHECKING:
    from hal_core.memory.copies import CopyTicket
    from hal_core.tickets import Ticket

MANY = 300
"""Calls that fit into any launch queue; a call may wait for its stream while the queue is full (G3)."""
HELD = ("async_h2d", "async_d2h", "can_hold_stream")


def values(form: str, turn: int, view: View) -> tuple[View, Any, np.ndarray[Any, Any]]:
    """Return a target, a value and the elements of call ``turn`` over a row of 16 elements."""
    if form == "scalars":
        return view[turn % 16 : turn % 16 + 1], turn, np.array([turn])
    if form == "strided arrays":
        return view[::2], np.arange(turn, turn + 8), np.arange(turn, turn + 8)
    return view[:15], np.arange(turn, turn + 15), np.arange(turn, turn + 15)


@guarantee(3, requires=HELD, also=(1, 2, 4))
@pytest.mark.parametrize("form", ["scalars", "arrays", "strided arrays", "mixed"])
@pytest.mark.parametrize("default", [True, False], ids=["default", "own"])
def test_g03_hundreds_of_calls_are_pending_and_each_is_right(kit: Kit, form: str, default: bool) -> None:
    """To one place, each with a copy out of its bytes after it; tickets are waited for from the last to the
    first."""
    device = kit.device
    stream = device.default_stream if default else device.stream()
    memory, now = device.allocate(128), np.zeros(16, np.int64)
    backdoor.write(device, memory, 0, now.view(np.uint8), stream)
    view, tickets, copies, should = View.contiguous(memory, 0, (16,), dtype_of("int64")), [], [], []
    forms = ["scalars", "arrays", "strided arrays"] if form == "mixed" else [form]
    with kit.held(stream, f"{MANY} {form}"):
        for turn in range(1, MANY + 1):
            target, value, cells = values(forms[turn % len(forms)], turn, view)
            tickets.append(kit.bound.async_set_value(target=target, value=value, stream=stream))
            place = np.ndarray(target.shape, np.int64, now.data, target.offset, target.strides)
            place[...] = cells
            if turn % 10 == 0:
                copies.append(device.copy_out(memory, [ByteRange(0, 128)], stream))
                should.append(now.copy())
        done = sum(ticket.done() for ticket in tickets)
        assert not done, f"{done} of {MANY} {form} are done, but their stream is held"
    for ticket in reversed(tickets):
        arrive(ticket)
    compare(copies, should, form)


def compare(copies: list[CopyTicket], should: list[np.ndarray[Any, Any]], form: str) -> None:
    """Compare each copy with the bytes at its call."""
    __tracebackhide__ = True
    for at, (copy, cells) in enumerate(zip(copies, should, strict=True)):
        arrive(copy)
        wrong = unlike(copy.data[0], cells.view(np.uint8))
        assert not wrong, f"the copy after {10 * (at + 1)} of {MANY} {form} on a held stream: {wrong}"


@guarantee(1, requires=HELD, also=(3, 4))
def test_g01_hundreds_of_calls_on_several_streams_stay_apart(kit: Kit) -> None:
    """Four streams in turn, two of them held: calls on the free ones are done, those on the held ones are not."""
    device = kit.device
    streams = [device.default_stream, *(device.stream() for _ in range(3))]
    memory = device.allocate(8 * MANY)
    backdoor.write(device, memory, 0, np.zeros(8 * MANY, np.uint8), streams[0])
    view = View.contiguous(memory, 0, (MANY,), dtype_of("int64"))
    tickets: list[Ticket] = []
    with kit.held(streams[1]), kit.held(streams[2]):
        for turn in range(MANY):
            tickets.append(
                kit.bound.async_set_value(target=view[turn], value=turn + 1, stream=streams[turn % len(streams)])
            )
        for turn in range(MANY):
            if turn % len(streams) in (0, 3):
                arrive(tickets[turn], f"call {turn} on a free stream")
        early = [turn for turn, ticket in enumerate(tickets) if turn % len(streams) in (1, 2) and ticket.done()]
        assert not early, f"calls {early} are done, but their streams are held"
    for ticket in tickets:
        arrive(ticket)
    got = backdoor.read(device, memory, streams[0])[: 8 * MANY].view(np.int64)
    wrong = np.flatnonzero(got != np.arange(1, MANY + 1)).tolist()
    assert not wrong, f"calls {wrong} of {MANY} on four streams are not there"


@guarantee(1, requires=HELD, also=(2, 26))
def test_g01_an_event_outlives_its_stream(kit: Kit) -> None:
    """It belongs to work that is pending when the stream is dropped; other streams wait for it, one of them twice."""
    device, held, memory = kit.device, kit.device.stream(), kit.device.allocate(64)
    waiting, dropped = [device.stream(), device.stream()], device.stream()
    further = [device.stream() for _ in range(16)]
    backdoor.write(device, memory, 0, np.zeros(64, np.uint8), held)
    with kit.held(held, "an event of a stream that was dropped"):
        dropped.wait(device.event(held))
        write = backdoor.put(device, memory, [(0, bytes([7]) * 64)], dropped)
        event = device.event(dropped)
        del dropped
        device.allocate(1)  # a device looks for free memory when it allocates
        others = [device.event(stream) for stream in further]
        copies = []
        for stream in waiting:
            stream.wait(event)
            stream.wait(others[0])
            stream.wait(event)
            copies.append(device.copy_out(memory, [ByteRange(0, 64)], stream))
        assert not event.wait(0.02), "an event has passed, but its stream waits for a held one"
        done = [copy.done() for copy in copies]
        assert not any(done), f"copies behind an event of a dropped stream have done={done}"
    for ticket in (write, *copies):
        arrive(ticket)
    assert event.wait(backdoor.PATIENCE), "the event of a dropped stream has not passed, though its work is done"
    for copy in copies:
        assert (copy.data[0] == 7).all(), "a copy behind an event of a dropped stream came before its work"
