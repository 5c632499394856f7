"""Threads that wait for a ticket, each for a time of its own, and what became of each."""

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
"""Seconds of a wait that must end with a time-out, as what it waits for is held."""
A_WHILE = 0.3
"""The same where it must not end before: long enough to be told from milliseconds."""
FOR_LONG: tuple[tuple[float | None, ...], ...] = ((PATIENCE,), (), (None,))
"""Arguments of waits that last as long as the work does."""
EARLY = 0.9
"""A wait may end at this part of its time; clocks differ."""


class Waiter:
    """One thread in ``ticket.wait``: ``error`` is what it raised, ``seconds`` how long it took."""

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
        except BaseException as error:  # noqa: BLE001 (told, and judged by the test)
            self.error = error
        self.seconds = monotonic() - began

    def ended(self, within: float = 0.0) -> bool:
        """True when the wait is over."""
        self._thread.join(within)
        return not self._thread.is_alive()

    def __repr__(self) -> str:
        return f"wait({', '.join(map(str, self.timeout))}) in a thread"


def time_out(tickets: Mapping[str, Ticket], hang: float) -> dict[str, list[Waiter]]:
    """Waits of pending tickets time out, each after its seconds and each by itself; returns those that wait on.

    Nothing may complete the tickets meanwhile. Several threads wait for each ticket, some for long.
    """
    __tracebackhide__ = True
    for told, ticket in tickets.items():
        times_out_at_once(told, ticket)
    patient = {told: [Waiter(ticket, *timeout) for timeout in FOR_LONG] for told, ticket in tickets.items()}
    request_row = {told: [Waiter(ticket, A_WHILE), Waiter(ticket, A_WHILE)] for told, ticket in tickets.items()}
    for told, waiters in request_row.items():
        for waiter in waiters:
            assert waiter.ended(hang), f"{told}: {waiter} has not ended after {hang} s"
            assert isinstance(waiter.error, TicketTimeout), (
                f"{told}: {waiter} of a pending ticket ended with {waiter.error!r}, but should raise TicketTimeout"
            )
            assert waiter.seconds >= EARLY * A_WHILE, f"{told}: {waiter} gave up after {waiter.seconds:.4f} s"
    for told, ticket in tickets.items():
        for waiter in patient[told]:
            assert not waiter.ended(), f"{told}: {waiter} of a pending ticket ended with {waiter.error!r}"
        times_out_at_once(told, ticket)
    return patient


def times_out_at_once(told: str, ticket: Ticket) -> None:
    """The ticket is pending, and says so however often it is asked."""
    __tracebackhide__ = True
    for timeout in (AT_ONCE, 1e-6, SHORT, AT_ONCE):
        assert not ticket.done(), f"{told}: the ticket is done, but its work is held"
        error = assert_raises(TicketTimeout, lambda: ticket.wait(timeout), f"{told}: wait({timeout})")  # noqa: B023
        assert error.cure, f"{told}: {error!r} names no cure"
        failure = ticket.failure()
        assert failure is None, f"{told}: a pending ticket has failed with {failure!r}"


def succeed(tickets: Mapping[str, Ticket], patient: Mapping[str, list[Waiter]], hang: float) -> None:
    """The work was let go: whoever waits is served, and tickets that are done stay so."""
    __tracebackhide__ = True
    for told, waiters in patient.items():
        for waiter in waiters:
            assert waiter.ended(hang), f"{told}: {waiter} was not woken within {hang} s of the end of the work"
            assert waiter.error is None, f"{told}: {waiter} ended with {waiter.error!r}, but the work went well"
    stay_done(tickets)


def come_true(tickets: Mapping[str, Ticket], seconds: float) -> None:
    """Tickets whose work is over say so without a wait; those of copies beside the stream a moment later."""
    __tracebackhide__ = True
    for told, ticket in tickets.items():
        assert poll(ticket.done, seconds), f"{told}: the ticket is not done after {seconds} s, though its work is"


def stay_done(tickets: Mapping[str, Ticket]) -> None:
    """Tickets that are done say so however often they are asked, and no wait for them times out."""
    __tracebackhide__ = True
    for told, ticket in tickets.items():
        for timeout in (AT_ONCE, SHORT, PATIENCE, None):
            assert ticket.done(), f"{told}: the ticket is not done, though its work is"
            try:
                ticket.wait(timeout)
            except TicketTimeout as error:
                raise AssertionError(f"{told}: wait({timeout}) of a ticket that is done raises {error!r}") from error
