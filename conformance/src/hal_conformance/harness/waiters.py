"""Threads that wait for a ticket, each with its own timeout, and their results."""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING

from hal_core.devices.primitives import poll
from hal_core.errors import TicketTimeout

from .asserts import assert_raises
from .backdoor import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hal_core.tickets import Ticket

AT_ONCE = 0.0
SHORT = 0.02
"""Seconds of a wait that must time out, as its work is held."""
A_WHILE = 0.3
"""Seconds of a wait that must not end earlier: long enough to distinguish from milliseconds."""
NO_TICKS = 0.0195
"""Seconds of a wait that are no whole number of milliseconds, nor of a clock's ticks of 10."""
FOR_LONG: tuple[tuple[float | None, ...], ...] = ((PATIENCE,), (), (None,), (3e6,))
"""Arguments of waits that last as long as the work does; the last is more milliseconds than 31 bits count."""
EARLY = 0.9
"""A wait may end at this part of its time, as clocks differ."""


class Waiter:
    """One thread in ``ticket.wait``: ``error`` is its exception, ``seconds`` its duration."""

    def __init__(self, ticket: Ticket, *timeout: float | None) -> None:
        self.ticket, self.timeout = ticket, timeout
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = monotonic()
        try:
            self.ticket.wait(*self.timeout)
        except BaseException as error:  # noqa: BLE001 (judged by the test)
            self.error = error
        self.seconds = monotonic() - began

    def ended(self, within: float = 0.0) -> bool:
        """Return True when the wait is over."""
        self._thread.join(within)
        return not self._thread.is_alive()

    def __repr__(self) -> str:
        return f"wait({', '.join(map(str, self.timeout))}) in a thread"


def time_out(tickets: Mapping[str, Ticket], hang: float) -> dict[str, list[Waiter]]:
    """Assert that waits of pending tickets time out, each after its own seconds; return those still waiting.

    No ticket may complete meanwhile. Several threads wait for each ticket, some for long.
    """
    __tracebackhide__ = True
    for what, ticket in tickets.items():
        times_out_at_once(what, ticket)
    hasty = {what: [Waiter(ticket, A_WHILE)] for what, ticket in tickets.items()}  # its end is that of no later one
    patient = {what: [Waiter(ticket, *timeout) for timeout in FOR_LONG] for what, ticket in tickets.items()}
    for what, ticket in tickets.items():
        hasty[what] += [Waiter(ticket, A_WHILE), Waiter(ticket, A_WHILE), Waiter(ticket, NO_TICKS)]
    for what, waiters in hasty.items():
        for waiter in waiters:
            assert waiter.ended(hang), f"{what}: {waiter} has not ended after {hang} s"
            assert isinstance(waiter.error, TicketTimeout), (
                f"{what}: {waiter} of a pending ticket ended with {waiter.error!r}, but should raise TicketTimeout"
            )
            least = EARLY * (waiter.timeout[0] or 0.0)
            assert waiter.seconds >= least, f"{what}: {waiter} gave up after {waiter.seconds:.4f} s"
    for what, ticket in tickets.items():
        for waiter in patient[what]:
            assert not waiter.ended(), f"{what}: {waiter} of a pending ticket ended with {waiter.error!r}"
        times_out_at_once(what, ticket)
    return patient


def times_out_at_once(what: str, ticket: Ticket) -> None:
    """Assert that the ticket is pending, however often it is checked."""
    __tracebackhide__ = True
    for timeout in (AT_ONCE, 1e-6, SHORT, AT_ONCE):
        assert not ticket.done(), f"{what}: the ticket is done, but its work is held"
        error = assert_raises(TicketTimeout, lambda: ticket.wait(timeout), f"{what}: wait({timeout})")  # noqa: B023
        assert error.cure, f"{what}: {error!r} names no cure"
        failure = ticket.failure()
        assert failure is None, f"{what}: a pending ticket has failed with {failure!r}"


def all_wait(tickets: Mapping[str, Ticket], behind: str) -> None:
    """Assert that no ticket is done, nor within a while the first of them."""
    __tracebackhide__ = True
    first = next(iter(tickets))
    assert_raises(TicketTimeout, lambda: tickets[first].wait(A_WHILE), f"{first} behind {behind}: its ticket")
    early = [what for what, ticket in tickets.items() if ticket.done()]
    assert not early, f"{early} are done, but are behind {behind}"


def succeed(tickets: Mapping[str, Ticket], patient: Mapping[str, list[Waiter]], hang: float) -> None:
    """Assert that the released work ends every wait, and that done tickets stay done."""
    __tracebackhide__ = True
    for what, waiters in patient.items():
        for waiter in waiters:
            assert waiter.ended(hang), f"{what}: {waiter} was not woken within {hang} s after the end of the work"
            assert waiter.error is None, f"{what}: {waiter} ended with {waiter.error!r}, but the work succeeded"
    stay_done(tickets)


def come_true(tickets: Mapping[str, Ticket], seconds: float) -> None:
    """Assert that tickets of ended work are done without a wait; those of copies beside the stream a moment later."""
    __tracebackhide__ = True
    for what, ticket in tickets.items():
        assert poll(ticket.done, seconds), f"{what}: the ticket is not done after {seconds} s, though its work is"


def stay_done(tickets: Mapping[str, Ticket]) -> None:
    """Assert that done tickets stay done, and that no wait for them times out."""
    __tracebackhide__ = True
    for what, ticket in tickets.items():
        for timeout in (AT_ONCE, SHORT, PATIENCE, None):
            assert ticket.done(), f"{what}: the ticket is not done, though its work is"
            try:
                ticket.wait(timeout)
            except TicketTimeout as error:
                raise AssertionError(f"{what}: wait({timeout}) of a ticket that is done raises {error!r}") from error
