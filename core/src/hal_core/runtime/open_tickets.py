"""Pending tickets of one device: errors that were never waited for, and ends that observers wait for."""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Any

from ..contract.capabilities import HOOKS
from ..tickets import Ticket
from .observers import Observers

_kinds: set[type] = set()
"""Classes already checked to be tickets."""


class OpenTickets:
    """Pending tickets whose errors or completion must still be reported.

    ``pending``: tickets whose errors may never be waited for, by their ``order``, or by themselves. ``for_observers``:
    tickets whose ends observers want, with the names of their hooks. Both are usually empty.
    """

    __slots__ = ("_observers", "_reporting", "for_observers", "pending")

    def __init__(self, observers: Observers) -> None:
        self._observers = observers
        self._reporting = Lock()
        self.pending: dict[object, deque[Ticket]] = {}
        self.for_observers: list[tuple[str, Ticket]] = []

    def track(self, hook: str, ticket: Any) -> None:  # noqa: ANN401 (what any call returns)
        """Track the result of a call if it is a ticket that may not be done and whose end must be reported."""
        if type(ticket) not in _kinds:
            if not isinstance(ticket, Ticket):  # slow for an abstract class
                return
            _kinds.add(type(ticket))
        if ticket.watched:
            self.pending.setdefault(ticket if ticket.order is None else ticket.order, deque()).append(ticket)
        if self._observers.wants_ends and hook in HOOKS:
            self.for_observers.append((hook, ticket))
            ticket.call_at_end(self.report_ends)

    def report_ends(self, _: Ticket | None = None) -> None:
        """Report ended tickets to observers, each once; from any thread."""
        with self._reporting:
            ended = [entry for entry in self.for_observers if entry[1].done()]
            for entry in ended:
                self.for_observers.remove(entry)
        for hook, ticket in ended:
            self._observers.end(hook, ticket)

    def unseen(self) -> list[BaseException]:
        """Forget tickets that are done, and return the errors that were never raised by a wait.

        Of each order only the oldest pending ticket is queried, so a call is as fast behind a long queue as behind a
        short one."""
        unseen = []
        for order, tickets in [*self.pending.items()]:
            while tickets and tickets[0].done():
                ticket = tickets.popleft()
                if not ticket.observed and (failure := ticket.failure()) is not None:
                    ticket.observed = True
                    unseen.append(failure)
            if not tickets:
                del self.pending[order]
        return unseen


def raise_unseen(unseen: list[BaseException]) -> None:
    """Raise the first of the unobserved errors, with the rest as notes; return if there are no errors."""
    if unseen:
        first, *others = dict.fromkeys(unseen)
        first.add_note("raised by an earlier call whose ticket was never waited for")
        for other in others:
            first.add_note(f"another such call raised: {other!r}")
        raise first
