"""The mode of a ticket is true, in both directions (G7): for every hook and primitive, held and not."""

from __future__ import annotations

import numpy as np
import pytest
from hal_core.errors import HalError
from hal_core.memory.copies import CopyTicket
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_core.tickets import Ticket

from .fixtures import hook_calls
from .fixtures.world import World
from .harness.asserts import assert_raises
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .kit import Kit

HELD = ("async_h2d", "async_d2h", "can_hold_stream")
COPIES = ("save_output", "copy_out")
WORKS = [name for name in hook_calls.CALLS if name != "broadcast"]  # which in a group of one does no work


def check_told(fixture: World, ticket: Ticket, what: str) -> None:
    """Assert that a ticket with mode "sync" is done, and that an independent stream sees its work."""
    __tracebackhide__ = True
    assert ticket.mode in ("async", "sync"), f"{what}: the ticket's mode is {ticket.mode!r}"
    if ticket.mode == "async":
        return
    if what == "broadcast":  # in a group of one it does no work, and so does not cover earlier work
        return
    if what != "save_output":  # its work on the device is the copy; it is done when its sink has the record
        assert ticket.done(), f'{what}: the ticket says "sync", but it is not done'
    mine, fixture.stream = fixture.stream, fixture.device.stream()
    try:
        fixture.check(f'{what}, whose ticket says "sync"')
    finally:
        fixture.stream = mine


@guarantee(7, also=(1, 3, 23))
@pytest.mark.parametrize("what", hook_calls.CALLS)
def test_g07_a_ticket_that_says_sync_is_done_and_its_work_is_there(kit: Kit, what: str) -> None:
    fixture = hook_calls.working(kit)
    for _ in range(2):
        hook_calls.submit(fixture)  # work that a careless device may still be executing
    ticket = hook_calls.CALLS[what](fixture)
    check_told(fixture, ticket, what)
    said = ticket.mode
    if not (kit.capabilities.async_d2h if what in COPIES else kit.capabilities.async_h2d):
        assert said == "sync" or what == "update_inputs", (
            f"{what}: the ticket says {said!r}, but the device claims no such"
        )
    arrive(ticket, what)
    assert ticket.done(), f"{what}: the ticket was waited for, but is not done"
    assert ticket.mode == said, f"{what}: the ticket said {said!r} first, then {ticket.mode!r}"
    fixture.check(what)


@guarantee(7, requires=HELD, also=(1, 3, 10, 23))
@pytest.mark.parametrize("what", WORKS)
def test_g07_behind_a_held_stream_every_call_returns_and_says_async(kit: Kit, what: str) -> None:
    if what == "update_inputs" and kit.missing(("overlapped_update",)):
        pytest.skip("needs overlapped_update")
    fixture = hook_calls.working(kit)
    with kit.held(fixture.stream):
        ticket = hook_calls.CALLS[what](fixture)
        check_told(fixture, ticket, f"{what} on a held stream")
        assert ticket.mode == "async", f"{what}: the ticket says {ticket.mode!r}, but its stream is held"
        assert not ticket.done(), f"{what}: the ticket is done, but its stream is held"
        error = assert_raises(HalError, lambda: ticket.wait(0), f"wait(0) for {what} on a held stream")
        assert isinstance(error, TimeoutError), f"{what}: wait(0) on a held stream raised {error!r}"
        assert not ticket.done(), f"{what}: the ticket is done after a wait that timed out"
        assert not isinstance(ticket, CopyTicket) or ticket.failure() is None, f"{what} failed: {ticket.failure()!r}"
    arrive(ticket, what)
    assert ticket.mode == "async", f"{what}: the ticket said 'async' first, then {ticket.mode!r}"
    fixture.check(what)


BACKLOG, LARGE, TRIES = 64, 1 << 22, 8
"""Copies of so many bytes are queued before a write; in one of so many tries its ticket must not be done at once."""


@guarantee(7, requires=("async_h2d", "not can_hold_stream"), also=(3,))
def test_g07_an_asynchronous_device_does_not_work_within_the_call(kit: Kit) -> None:
    """If a stream can be held, the test above shows it; a device may also be fast."""
    device, stream = kit.device, kit.device.default_stream
    block, small = device.allocate(2 * LARGE), device.allocate(64)
    dtype = dtype_of("int64")
    source, sink = (View.contiguous(block, at, (LARGE // 8,), dtype) for at in (0, LARGE))
    arrive(kit.bound.async_set_value(target=source, value=0, stream=stream))
    target = View.contiguous(small, 0, (8,), dtype)
    done = []
    for _ in range(TRIES):
        behind = [kit.bound.async_set_value(target=sink, value=source, stream=stream) for _ in range(BACKLOG)]
        ticket = kit.bound.async_set_value(target=target, value=np.arange(8), stream=stream)
        done.append(ticket.done())
        for one in (*behind, ticket):
            arrive(one)
        if not all(done):
            break
    assert not all(done), (
        f"async_h2d is claimed, but a write behind {BACKLOG} copies of {LARGE >> 20} MiB was done on return in all of"
        f" {TRIES} tries: the calls wait for the device"
    )
