"""What a device says of its asynchrony (G7), and calls that return while a stream is held (G3)."""

from __future__ import annotations

import logging
from functools import partial
from time import monotonic

import numpy as np
import pytest
from hal_core.errors import CapabilityMissing, HalError
from hal_core.memory.copies import CopyTicket
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_core.runtime.bound import bind
from hal_core.tickets import Ticket

from .fixtures import hook_calls
from .fixtures.block import Block
from .fixtures.prepared_calls import VALUES
from .fixtures.world import World
from .harness import backdoor
from .harness.asserts import assert_raises, assert_says
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .harness.waiters import A_WHILE, EARLY
from .kit import Draw, Kit, examples, held_stream
from .test_async_set_value import choose_stream, draw_write
from .test_vendor_mistakes import another

HELD = ("async_h2d", "async_d2h", "can_hold_stream")
COPIES = ("save_output", "copy_out")
WORKS = [name for name in hook_calls.CALLS if name != "broadcast"]  # which in a group of one does no work


def check_mode(fixture: World, ticket: Ticket, what: str) -> None:
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
    check_mode(fixture, ticket, what)
    mode = ticket.mode
    if not (kit.capabilities.async_d2h if what in COPIES else kit.capabilities.async_h2d):
        assert mode == "sync" or what == "update_inputs", (
            f"{what}: the ticket says {mode!r}, but the device claims no such"
        )
    arrive(ticket, what)
    assert ticket.done(), f"{what}: the ticket was waited for, but is not done"
    assert ticket.mode == mode, f"{what}: the ticket said {mode!r} first, then {ticket.mode!r}"
    fixture.check(what)


@guarantee(7, requires=HELD, also=(1, 3, 10, 23))
@pytest.mark.parametrize("what", WORKS)
def test_g07_behind_a_held_stream_every_call_returns_and_says_async(kit: Kit, what: str) -> None:
    if what == "update_inputs" and kit.missing(("overlapped_update",)):
        pytest.skip("needs overlapped_update")
    fixture = hook_calls.working(kit)
    with kit.held(fixture.stream):
        ticket = hook_calls.CALLS[what](fixture)
        check_mode(fixture, ticket, f"{what} on a held stream")
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
"""Copies of so many bytes are queued before a write; in one of so many tries they must not be done when it returns."""


@guarantee(7, requires=("async_h2d", "not can_hold_stream"), also=(3,))
@pytest.mark.parametrize("count", [8, 1 << 13])
def test_g07_an_asynchronous_device_does_not_work_within_the_call(kit: Kit, count: int) -> None:
    """If a stream can be held, the test above shows it; a device may also be fast."""
    device, stream = kit.device, kit.device.default_stream
    block, small = device.allocate(2 * LARGE), device.allocate(8 * count)
    dtype = dtype_of("int64")
    source, sink = (View.contiguous(block, at, (LARGE // 8,), dtype) for at in (0, LARGE))
    arrive(kit.bound.async_set_value(target=source, value=0, stream=stream))
    target = View.contiguous(small, 0, (count,), dtype)
    done = []
    for _ in range(TRIES):
        behind = [kit.bound.async_set_value(target=sink, value=source, stream=stream) for _ in range(BACKLOG)]
        ticket = kit.bound.async_set_value(target=target, value=np.arange(count), stream=stream)
        done.append(behind[-1].done())
        for one in (*behind, ticket):
            arrive(one)
        if not all(done):
            break
    assert not all(done), (
        f"async_h2d is claimed, but {BACKLOG} copies of {LARGE >> 20} MiB were done when a write of {8 * count} bytes"
        f" behind them returned, in all of {TRIES} tries: the calls wait for the device"
    )


@guarantee(3, requires=("async_h2d", "can_hold_stream"))
@examples()
def test_g03_the_call_returns_while_the_stream_is_held(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    target, value, items = draw_write(draw, block)
    choose_stream(kit, draw, block)
    other = kit.device.stream()
    with kit.held(block.stream):
        ticket = block.set(target, value)
        if target.size:
            assert not ticket.done(), f"the ticket of {value!r} is done, but its stream was held"
            assert ticket.mode == "async", f"the ticket says {ticket.mode!r}, but its work was not done on return"
        block.compare(backdoor.read(kit.device, block.memory, other), "async_set_value on a held stream")
    arrive(ticket)
    block.expect(target, items)
    block.check("the stream was released")


@guarantee(3, requires=("async_h2d", "can_hold_stream"))
def test_g03_a_ticket_is_not_done_before_its_work_is(kit: Kit) -> None:
    block = Block(kit)
    target = block.view((8,), dtype_of("int64"))
    with kit.held(block.stream):
        tickets = [block.set(target[i : i + 1], i) for i in range(8)]
        done = [ticket.done() for ticket in tickets]
        error = assert_raises(HalError, lambda: tickets[0].wait(0.01), "waiting for a held ticket")
    assert not any(done), f"tickets answer done={done} while their stream is held"
    assert isinstance(error, TimeoutError), f"waiting for a held ticket raises {error!r}, but should time out"
    for ticket in tickets:
        arrive(ticket)
    block.expect(target, range(8))
    block.check("every ticket was waited for")


@guarantee(3, requires=("async_h2d", "can_hold_stream", "staging"))
def test_g03_a_full_ring_refuses_after_its_deadline_without_half_work(kit: Kit) -> None:
    bound = kit.open()
    ring = bound.device.staging  # type: ignore[attr-defined]  # the seam that `requires` asks for
    ring.deadline, ring.limit = A_WHILE, 1 << 20
    memory = bound.device.allocate(1 << 16)
    stream = bound.device.default_stream
    target = View.contiguous(memory, 0, (1 << 13,), dtype_of("int64"))
    written = 0
    with held_stream(bound.device, stream, kit.effort.hang):
        while written < 1000:
            began = monotonic()
            try:
                bound.async_set_value(target=target, value=list(range(written, written + target.size)), stream=stream)
            except HalError as error:
                took = monotonic() - began
                assert_says(error, device=bound.name, hook="async_set_value")
                assert took >= EARLY * A_WHILE, f"a full ring refused after {took:.3f} s; its deadline is {A_WHILE} s"
                break
            written += 1
        waits = bound.counters().ring_waits
    assert 0 < written < 1000, f"{written} writes of 64 KiB were taken by a ring of 1 MiB whose stream is held"
    assert waits > 0, "the ring was full, but ring_waits counts no wait"
    got = backdoor.read(bound.device, memory, stream).view("int64")
    assert got[0] == written - 1, f"the target holds write {got[0]}, but should hold the last that was taken"
    assert (got == got[0] + np.arange(target.size)).all(), "the refused write was half done"
    bound.close()


@guarantee(7, requires="not async_h2d")
@examples()
def test_g07_a_synchronous_write_is_there_on_return_and_says_so(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    target, value, items = draw_write(draw, block)
    choose_stream(kit, draw, block)
    ticket = block.set(target, value)
    assert ticket.mode == "sync", f"the ticket says {ticket.mode!r}, but the device has no async_h2d"
    assert ticket.done(), "the ticket is not done on return, but the device has no async_h2d"
    block.expect(target, items)
    if (there := getattr(block.memory, "host_bytes", None)) is not None:
        # seen without a call, in which the device could catch up
        block.compare(np.frombuffer(there, np.uint8), "async_set_value, before any other call")
    got = backdoor.read(kit.device, block.memory, kit.device.stream())
    block.compare(got, "async_set_value, not waited for")


@guarantee(7, requires="not async_h2d")
def test_g07_a_fallback_is_counted_logged_once_and_refusable(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        bound = bind(kit.subject.open(), kit.subject.policy)
        memory = bound.device.allocate(64)
        target = View.contiguous(memory, 0, (8,), dtype_of("int64"))
        before = bound.counters().fallbacks
        for _ in range(3):
            arrive(bound.async_set_value(target=target, value=1, stream=bound.default_stream))
        counted = bound.counters().fallbacks - before
    reason = bound.capabilities.fallbacks.get("async_set_value", "")
    logged = [record.getMessage() for record in caplog.records if reason and reason in record.getMessage()]
    bound.close()
    assert reason, "the device has no async_h2d, but capabilities.fallbacks gives no reason"
    assert len(logged) == 1, (
        f"the reason {reason!r} was logged {len(logged)} times for one opened device, not once: {logged}"
    )
    assert counted == 3, f"3 writes by a fallback were counted as {counted}"
    error = assert_raises(
        CapabilityMissing,
        lambda: bound.capabilities.check({"async_set_value": "async"}, bound.name),
        'require={"async_set_value": "async"}',
    )
    assert reason in str(error), f"the refusal {str(error)!r} does not give the device's reason {reason!r}"


@guarantee(7, requires="not async_h2d", also=(1, 2))
@pytest.mark.parametrize("default", [True, False], ids=["default", "own"])
def test_g07_every_form_of_a_value_is_there_on_return_and_counted(
    kit: Kit, default: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One record in the log for each of two opened devices, however many forms follow; a refused value counts none."""
    reason = kit.capabilities.fallbacks.get("async_set_value", "")
    with caplog.at_level(logging.DEBUG), another(kit) as one, another(kit) as two:
        for kit_of in (one, two):
            device, forms = kit_of.device, VALUES if kit_of is one else dict([*VALUES.items()][:3])
            stream = device.default_stream if default else device.stream()
            for what, form in forms.items():
                call, before = form.call(kit_of), kit_of.bound.counters().fallbacks
                for memory, data in ((call.memory, call.before), *call.sources):
                    backdoor.write(device, memory, 0, data, stream)
                ticket = call.act(stream)
                assert ticket.mode == "sync", f"{what}: the ticket says {ticket.mode!r}, but there is no async_h2d"
                assert ticket.done(), f"{what}: the ticket is not done on return"
                wrong = call.wrong(backdoor.read(device, call.memory, device.stream())[: len(call.before)])
                assert not wrong, f"{what}, not waited for: {wrong}"
                counted = kit_of.bound.counters().fallbacks - before
                assert counted == 1, f"{what}, one write by a fallback, was counted as {counted}"
            before = kit_of.bound.counters().fallbacks
            target = View.contiguous(device.allocate(64), 0, (8,), dtype_of("int64"))
            for value in (1.5, [1, 2]):
                refused = partial(kit_of.bound.async_set_value, target=target, value=value, stream=stream)
                assert_raises(HalError, refused, f"{value!r} for eight int64")
            counted = kit_of.bound.counters().fallbacks - before
            assert not counted, f"two values that were refused were counted as {counted} fallbacks"
        logged = sum(reason in record.getMessage() for record in caplog.records)
    assert logged == 2, f"two opened devices, and the reason {reason!r} was logged {logged} times"


@guarantee(7, requires="async_h2d")
@examples(0.5)
def test_g07_a_device_with_async_h2d_never_falls_back(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    target, value, items = draw_write(draw, block)
    before = kit.bound.counters()
    ticket = block.set(target, value)
    arrive(ticket)
    spent = kit.bound.counters() - before
    if target.size:
        assert ticket.mode == "async", f"the ticket says {ticket.mode!r}, but the device claims async_h2d"
    assert spent.fallbacks == 0, f"{spent.fallbacks} calls fell back, but the device claims async_h2d"
    assert "async_set_value" not in kit.capabilities.fallbacks, "async_h2d is claimed, yet a fallback is named"
    block.expect(target, items)
    block.check("async_set_value")
