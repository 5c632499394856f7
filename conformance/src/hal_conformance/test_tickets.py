"""Tickets: pending, done, and waited for by several threads with all timeouts; for every hook and every copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING

import pytest
from hal_core.errors import DeviceClosed, InvalidValue, TicketTimeout
from hal_core.output.ticket import OutputTicket

from .fixtures.hook_cases import HOOK_CASES, SIZES, filled, hook_cases, overlaps
from .fixtures.stream_cases import copied
from .fixtures.world import World
from .harness import backdoor
from .harness.asserts import assert_no_error, assert_raises
from .harness.backdoor import PATIENCE, arrive, drain
from .harness.guarantees import guarantee
from .harness.sinks import KeepingSink
from .harness.waiters import AT_ONCE, SHORT, Waiter, come_true, stay_done, succeed, time_out, times_out_at_once
from .kit import Kit

if TYPE_CHECKING:
    from hal_core.slots.step import Step
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket

STREAMS = ("a stream of its own", "the default stream")
AGAIN = 80
"""Calls made after a ticket is done, so that an event reused too early is noticed."""


def stream_of(kit: Kit, which: str) -> Stream:
    """Return the stream with that name."""
    return kit.device.default_stream if "default" in which else kit.device.stream()


def prepared(kit: Kit, hooks: tuple[str, ...]) -> list[tuple[str, Callable[[Stream], Ticket]]]:
    """Return the calls to make while the stream is held, prepared before."""
    acts: list[tuple[str, Callable[[Stream], Ticket]]] = []
    for hook in hooks:
        for what, make in [*hook_cases(kit, hook)][-1:] if hook in HOOK_CASES and overlaps(kit, hook) else []:
            acts.append((what, make(kit).act))
    if kit.capabilities.async_d2h and "copy_out" in hooks:
        memory = kit.device.allocate(1 << 20)
        acts.append(("copy_out", lambda stream: copied(kit, memory, stream)))
    return acts


TICKETED = ("async_set_value", "insert_tasks", "update_inputs", "broadcast_tokens", "submit", "copy_out")
"""Calls whose tickets are those of their work."""


@guarantee(1, requires=("async_h2d", "can_hold_stream"), also=(3,))
@pytest.mark.parametrize("which", STREAMS)
def test_g01_the_host_sees_a_call_after_its_ticket_and_not_before(kit: Kit, which: str) -> None:
    """Each wait for a held stream times out by itself; then the tickets are done and stay so."""
    stream, acts = stream_of(kit, which), prepared(kit, TICKETED)
    with kit.held(stream):
        tickets = {f"{what}, on {which}": act(stream) for what, act in acts}
        settled = {what: ticket for what, ticket in tickets.items() if not isinstance(ticket, OutputTicket)}
        patient = time_out(tickets, kit.effort.hang)
    succeed(settled, {what: patient[what] for what in settled}, kit.effort.hang)
    with kit.held(stream):
        later = backdoor.put(kit.device, kit.device.allocate(64), [(0, bytes(64))], stream)
        assert not later.done(), "the ticket of a write is done, but its stream is held"
        stay_done(settled)


@guarantee(3, requires=("async_h2d", "can_hold_stream"))
@pytest.mark.parametrize("hook", [hook for hook in HOOK_CASES if hook != "save_output"])
def test_g03_a_ticket_is_of_its_work_and_of_no_other(kit: Kit, hook: str) -> None:
    """Tickets on two streams: each is done with its own work, independent of the other and of the order of queries."""
    if not overlaps(kit, hook):
        return
    for form, (_, make) in enumerate(hook_cases(kit, hook)):
        one, other = kit.device.stream(), kit.device.stream()
        mine, theirs = make(kit), make(kit)
        with kit.held(one):
            held = mine.act(one)
            free = theirs.act(other)
            arrive(free)
            assert free.done(), f"the ticket of {hook} was waited for, but is not done"
            assert not held.done(), f"the ticket of {hook} on a held stream is done with that of another stream"
            if not form:
                times_out_at_once(hook, held)
        arrive(held)
        stay_done({hook: held, f"{hook}, on another stream": free})


@guarantee(3, requires=("async_h2d", "can_hold_stream"))
@pytest.mark.parametrize("which", STREAMS)
def test_g03_a_ticket_that_nobody_asked_is_done_with_its_work(kit: Kit, which: str) -> None:
    """Its stream has continued and is held again, with much more work: the ticket belongs to the first work."""
    stream, device = stream_of(kit, which), kit.device
    memory = device.allocate(64)
    acts = prepared(kit, tuple(HOOK_CASES))
    acts = [(what, act) for what, act in acts if not what.startswith("save_output")]
    tickets = {what: act(stream) for what, act in acts}
    early = [backdoor.put(device, memory, [(0, bytes(64))], stream) for _ in range(AGAIN)]
    arrive(early[-1])
    drain(stream)
    with kit.held(stream):
        late = [backdoor.put(device, memory, [(0, bytes(64))], stream) for _ in range(AGAIN)]
        come_true(tickets, kit.effort.hang)
        stay_done(tickets | {f"write {at} before the stream was held": early[at] for at in (0, 1, AGAIN - 1)})
        done = [ticket.done() for ticket in late]
        assert not any(done), f"tickets of a held stream have done={done}"
    for ticket in late:
        arrive(ticket)


# -- save_output ------------------------------------------------------------------------------------------------------


def saved(kit: Kit, stream: Stream) -> tuple[World, Step, KeepingSink]:
    """Return a step that has run, on its stream."""
    fixture, _ = filled(kit)
    step = fixture.advance([5, 4, 3, 2, 1, 0])
    fixture.stream = stream
    return fixture, step, KeepingSink()


@guarantee(19, also=(23,))
@pytest.mark.parametrize("which", STREAMS)
def test_g19_an_outputs_ticket_is_pending_until_its_sink_has_completed_it(kit: Kit, which: str) -> None:
    """Whoever waits for it, also on a synchronous device."""
    stream = stream_of(kit, which)
    fixture, step, sink = saved(kit, stream)
    holding = kit.held(stream) if kit.can_hold else nullcontext()
    with ExitStack() as stack:
        stack.enter_context(holding)
        ticket = fixture.save(step, sink)
        tickets: Mapping[str, Ticket] = {f"save_output on {which}": ticket}
        if kit.can_hold and kit.capabilities.async_d2h:
            assert not ticket.ready(), "the copy of an output is ready, but its stream is held"
            for timeout in (AT_ONCE, SHORT):
                assert_raises(TicketTimeout, lambda: ticket.record(timeout), f"record({timeout}) of a held stream")  # noqa: B023
        patient = time_out(tickets, kit.effort.hang)
    assert_no_error(lambda: ticket.record(PATIENCE), "the record of an output whose stream was let go")
    assert ticket.ready(), "the copy of an output was waited for, but is not ready"
    for what in tickets:
        for waiter in patient[what]:
            assert not waiter.ended(), f"{what}: {waiter} ended with {waiter.error!r} before the sink had the record"
    sink.resolve_all()
    succeed(tickets, patient, kit.effort.hang)


@guarantee(19, also=(21,))
def test_g19_an_outputs_error_is_raised_only_by_its_waits(kit: Kit) -> None:
    fixture, _ = filled(kit)
    step = fixture.step(range(SIZES.num_slots), speculative=True)
    fixture.poke_cell("accept_num", 2, SIZES.max_accept + 3)
    fixture.run(step)
    sink = KeepingSink()
    ticket = fixture.save(step, sink)
    waiters = [Waiter(ticket, PATIENCE), Waiter(ticket), Waiter(ticket, PATIENCE)]
    sink.resolve_all()
    for waiter in waiters:
        assert waiter.ended(kit.effort.hang), f"{waiter} was not woken by a ticket that failed"
    for timeout in (AT_ONCE, PATIENCE, None):
        waiters.append(Waiter(ticket, timeout))
        assert waiters[-1].ended(kit.effort.hang), f"{waiters[-1]} for a ticket that has failed does not end"
    for waiter in waiters:
        assert isinstance(waiter.error, InvalidValue), f"{waiter} of a failed ticket ended with {waiter.error!r}"
        assert ticket.done(), "a ticket that failed is not done"
    assert_no_error(
        lambda: fixture.bound.insert_tasks(state=fixture.state, tasks=[], stream=fixture.stream), "the next call"
    )


@guarantee(19)
@pytest.mark.parametrize("by", ["the next call", "close()"])
def test_g19_an_outputs_unobserved_error_is_raised_once_by_the_next_call(kit: Kit, by: str) -> None:
    apart = Kit(kit.subject, kit.effort)
    try:
        fixture, _ = filled(apart)
        step = fixture.step(range(SIZES.num_slots), speculative=True)
        fixture.poke_cell("accept_num", 2, SIZES.max_accept + 3)
        fixture.run(step)
        sink = KeepingSink()
        fixture.save(step, sink)
        sink.resolve_all()
        view = fixture.state.view("seed")

        def write() -> None:
            fixture.bound.async_set_value(target=view, value=4, stream=fixture.stream).wait(PATIENCE)

        call = fixture.bound.close if by == "close()" else write
        assert_raises(InvalidValue, call, f"{by} after an output whose error was never waited for")
        if by == "close()":
            assert_raises(DeviceClosed, write, "a call on a device whose close() raised an error of an earlier call")
            return
        fixture.check("a call that raised an earlier one's error, and had no effect")
        assert_no_error(write, "the same call once more")
        fixture.model.cells["seed"][...] = 4
        fixture.check("the same call once more")
    finally:
        apart.renew()
