"""A fault of the runtime (G26): its ticket raises it, and from then on the device refuses every call by name."""

from __future__ import annotations

import gc
from abc import ABC
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest
from hal_core.devices.primitives import StreamPrimitives, poll
from hal_core.errors import DeviceClosed, HalError
from hal_core.memory.views import ByteRange

from .fixtures import hook_calls
from .fixtures.world import World, assert_rows
from .harness.asserts import assert_no_error, assert_raises, in_time
from .harness.backdoor import PATIENCE
from .harness.claims import note_unchecked
from .harness.guarantees import guarantee
from .harness.lies import lay_below
from .harness.sinks import KeepingSink
from .harness.waiters import Waiter, times_out_at_once
from .kit import Kit
from .liars import faults
from .test_device_faults import TELLS
from .test_faults import under

if TYPE_CHECKING:
    from hal_core.tickets import Ticket


class SickError(RuntimeError):
    """An error of the runtime."""


class RaisedError(HalError):
    """An error that the runtime itself raises, once work has failed."""


class Sick(ABC):  # noqa: B024 (an ABC for its layout, as Lie)
    """A mixin over primitives whose passed events report ``sickness``, once there is one; or whose calls raise it."""

    sickness: Exception | None = None
    met = 0

    def raised(self) -> None:
        """Raise the sickness of a runtime that raises it itself."""
        if isinstance(self.sickness, RaisedError):
            self.met += 1
            raise self.sickness

    def event_error(self, event: Any) -> Exception | None:  # noqa: ANN401 (the runtime's)
        """Return the error of the work before the event."""
        return self.sickness or super().event_error(event)  # type: ignore[misc]


def _raising(name: str) -> Any:  # noqa: ANN401 (a method)
    def call(self: Any, *arguments: Any) -> Any:  # noqa: ANN401 (the vendor's)
        result = getattr(super(Sick, self), name)(*arguments)
        self.raised()
        return result

    return call


for _name in ("event_query", "event_synchronize", "event_record", "submit", "submit_copy_out", "copy_in", "copy_out"):
    setattr(Sick, _name, _raising(_name))


CALLS: Mapping[str, Callable[[World], object]] = {
    **{name: act for name, act in hook_calls.CALLS.items() if name not in ("insert", "leave", "broadcast")},
    "insert_tasks": hook_calls.insert,
    "a state": lambda fixture: fixture.bound.state(hook_calls.SIZES, name="another"),
    "tensor": lambda fixture: fixture.state.tensor("seed"),
}
BEFORE = ("an array", "insert", "update_inputs", "submit", "copy_out")
"""The work that fails."""
UNSEEN: Mapping[str, Callable[[World], Ticket]] = {
    **{what: hook_calls.CALLS[what] for what in ("an array", "strided", "on the device", "insert", "update_inputs")},
    "copy_out": lambda fixture: fixture.bound.copy_out(
        memory=fixture.state.memory, parts=[ByteRange(0, 64)], stream=fixture.stream
    ),
}
"""The same, by calls whose tickets the bound device keeps for whoever does not wait."""


def fallen_sick(kit: Kit, what: str, act: Callable[[World], Ticket]) -> tuple[Kit, World, Ticket]:
    """Another device, and the call ``what``, whose work its runtime reports as failed after it has returned."""
    if what == "copy_out" and kit.missing(("async_d2h",)):
        pytest.skip("needs async_d2h")
    one = Kit(kit.subject, kit.effort)
    fixture, own = hook_calls.working(one), one.device
    lay_below(own, Sick)
    primitives: Any = own.primitives  # type: ignore[attr-defined]  # what `requires` asks for
    ticket = act(fixture)
    itself = raises_itself(one)
    primitives.sickness = RaisedError("error 716 in a kernel") if itself else SickError("error 716 in a kernel")
    if itself and not (poll(ticket.done, PATIENCE) and primitives.met):
        primitives.sickness = None
        not_feigned("raises_faults: that a fault is raised", "ask by event_query() whether work has ended")
    return one, fixture, ticket


def raises_itself(one: Kit) -> bool:
    """Return whether the plugin says that its runtime raises faults, or that none ends the device.

    Primitives that report faults by ``event_error()`` are of a runtime that raises none, whatever the plugin says.
    """
    own: Any = one.device
    kinds = [kind for kind in type(own.primitives).__mro__ if kind is not Sick and "event_error" in vars(kind)]
    reports = vars(kinds[0])["event_error"] is not StreamPrimitives.event_error
    return (own.raises_faults and not reports) or not own.primitives.spoils(SickError())


def not_feigned(claim: str, cure: str) -> None:
    """Note a claim about faults that the kit cannot feign, and skip the test."""
    note_unchecked(26, f"{claim} is the plugin's word", cure)
    pytest.skip(f"{claim} cannot be feigned")


@guarantee(26, requires="primitives", also=TELLS)
@pytest.mark.parametrize("what", BEFORE)
def test_g26_a_fault_of_the_runtime_is_raised_by_every_wait(kit: Kit, what: str) -> None:
    _, _, ticket = fallen_sick(kit, what, hook_calls.CALLS[what])
    for timeout in (PATIENCE, 0.0, None, PATIENCE):
        why = f"wait({timeout}) for {what}, whose work the runtime reports as failed"
        assert_raises_any(lambda: ticket.wait(timeout), "error 716", why)  # noqa: B023
        assert ticket.done(), f"{what} has failed, and its ticket is not done"
        assert "error 716" in f"{ticket.failure()!r}", f"{what} has failed, but failure() is {ticket.failure()!r}"
    waiters = [Waiter(ticket, PATIENCE) for _ in range(2)]
    for waiter in waiters:
        assert waiter.ended(PATIENCE), f"{waiter} for {what}, which has failed, does not end"
        assert "error 716" in f"{waiter.error!r}", f"{waiter} for {what}, which has failed, got {waiter.error!r}"


@guarantee(26, requires="primitives", also=TELLS)
@pytest.mark.parametrize("by", ["the next call", "closing"])
@pytest.mark.parametrize("what", UNSEEN)
def test_g26_a_fault_of_the_runtime_that_nobody_waits_for_is_raised(kit: Kit, what: str, by: str) -> None:
    one, fixture, ticket = fallen_sick(kit, what, UNSEEN[what])
    assert poll(ticket.done, PATIENCE), f"{what} has failed, and its ticket is not done after {PATIENCE} s"
    del ticket
    raised_unseen(one, fixture, f"{what}, which the runtime reports as failed, and nobody waited", by)


def raised_unseen(one: Kit, fixture: World, case: str, by: str) -> None:
    """Assert that ``by`` raises the error of failed work whose ticket was dropped."""
    __tracebackhide__ = True
    gc.collect()
    call = one.bound.close if by == "closing" else lambda: hook_calls.scalar(fixture)
    assert_raises_any(call, "error 716", f"{by} after {case}")
    if by != "closing" and not raises_itself(one):
        assert_raises_any(lambda: hook_calls.scalar(fixture), "error 716", f"a second call after {case}")
    assert_no_error(one.device.close, f"closing, after {by} has raised the error of {case}")


def timed_out(act: Callable[[World], Ticket]) -> Callable[[World], Ticket]:
    """Return the call with waits for its ticket that time out, as its stream is held."""

    def held(fixture: World) -> Ticket:
        with fixture.kit.held(fixture.stream):
            ticket = act(fixture)
            times_out_at_once("a call on a stream that is held", ticket)
        return ticket

    return held


@guarantee(26, requires=("primitives", "async_h2d", "async_d2h", "can_hold_stream"), also=TELLS)
@pytest.mark.parametrize("by", ["the next call", "closing"])
@pytest.mark.parametrize("what", UNSEEN)
def test_g26_a_fault_after_a_wait_that_timed_out_is_raised(kit: Kit, what: str, by: str) -> None:
    if what == "update_inputs" and kit.missing(("overlapped_update",)):
        pytest.skip("needs overlapped_update")
    one, fixture, ticket = fallen_sick(kit, what, timed_out(UNSEEN[what]))
    assert poll(ticket.done, PATIENCE), f"{what} has failed, and its ticket is not done after {PATIENCE} s"
    del ticket
    raised_unseen(one, fixture, f"{what}, which has failed after its waits timed out, and nobody waited again", by)


@guarantee(26, requires="primitives", also=TELLS)
@pytest.mark.parametrize("what", BEFORE)
def test_g26_a_broken_device_refuses_every_call_and_closes(kit: Kit, what: str) -> None:
    one, fixture, ticket = fallen_sick(kit, what, hook_calls.CALLS[what])
    if raises_itself(one):
        not_feigned("raises_faults or spoils: that a broken device refuses every call", "leave raises_faults off")
    assert_raises_any(lambda: ticket.wait(PATIENCE), "error 716", f"{what}, whose work the runtime reports as failed")
    for turn in range(2):
        for name, call in CALLS.items():
            why = f"{name} after a fault of the device, tried {turn + 1} times"
            error = assert_raises(DeviceClosed, lambda: call(fixture), why)  # noqa: B023
            assert "error 716" in str(error), f"{why}: {error} does not name the fault"
            assert error.cure, f"{why}: {error!r} names no cure"
    with in_time("closing a broken device", PATIENCE):
        assert_no_error(one.bound.close, "closing a device whose fault was raised")


def assert_raises_any(call: Callable[[], object], text: str, why: str) -> None:
    """Assert that a call raises an error with this text, of whatever class the runtime's errors have."""
    __tracebackhide__ = True
    try:
        call()
    except Exception as error:
        if text in f"{error!r}":
            return
        raise AssertionError(f"{why}: raised {error!r}, but should name {text!r}") from error
    raise AssertionError(f"{why}: raised nothing")


# -- between the launch of a step and its take ------------------------------------------------------------------------


@guarantee(26, also=TELLS)
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_g26_a_step_whose_copy_fails_is_raised_by_its_take_alone(kit: Kit, lost: int) -> None:
    """Three steps are launched before the first is taken, and the copy of one of them fails meanwhile."""
    with under(kit, faults.FailingCopies) as (laid, fuse):
        laid.device.late = True  # type: ignore[attr-defined]  # the fault's
        fixture, sink = hook_calls.working(laid), KeepingSink()
        tickets, rows = [], []
        for turn in range(3):
            fixture.poke({"sampled_token_ids": fixture.model.cells["sampled_token_ids"] * 0 + 40 + turn})
            step = fixture.step(range(hook_calls.ENTERED))
            fixture.update_inputs(step)
            rows.append(fixture.rows_of(step))
            fuse.at = 1 if turn == lost else 0
            tickets.append(fixture.save(step, sink))
        assert fuse.met == 1, f"{fuse.met} copies failed, should be 1"
        for turn, (ticket, should) in enumerate(zip(tickets, rows, strict=True)):
            if turn == lost:
                why = f"take() of step {turn}, whose copy failed"
                assert_raises(faults.CopyFailed, lambda: fixture.state.take(ticket), why)  # noqa: B023
            else:
                assert_rows(fixture.take(ticket), should)
        sent = []
        for turn, pending in enumerate(sink.pending):
            try:
                sent.append(pending.resolve())
                pending.complete(None)
            except faults.CopyFailed as error:
                assert turn == lost, f"step {turn} raised the error of step {lost}"
                pending.complete(error)
        assert len(sent) == 2, f"of three steps, one of which is lost, {len(sent)} were sent"
        assert_raises(faults.CopyFailed, lambda: tickets[lost].wait(PATIENCE), f"the ticket of step {lost}, lost")
        hook_calls.make(hook_calls.array, fixture, "a call after the error of a lost step was raised")
        fixture.check("three steps, the copy of one of which failed")
