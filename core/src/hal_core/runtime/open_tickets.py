"""Tickets of one device that a later call may have to tell of: errors nobody waited for, ends observers wait for."""

from __future__ import annotations

from threading import Lock
from typing import Any

from ..contract.capabilities import HOOKS
from ..tickets import DONE, Ticket
from .observers import Observers

_kinds: set[type] = set()
"""Classes that were seen to be tickets."""


class OpenTickets:
    """What calls have returned and is not over, as far as somebody wants to know of its end.

    ``pending``: tickets whose error nobody may wait for. ``watched``: those whose ends observers want to know, with the
    names of their hooks. Both are empty where there is nothing to do.
    """

    __slots__ = ("_observers", "_telling", "pending", "watched")

    def __init__(self, observers: Observers) -> None:
        self._observers = observers
        self._telling = Lock()
        self.pending: list[Ticket] = []
        self.watched: list[tuple[str, Ticket]] = []

    def track(self, hook: str, ticket: Any) -> None:  # noqa: ANN401 (what any call returns)
        """Remember what a call has returned, if it is a ticket that somebody wants to know of."""
        if type(ticket) not in _kinds:
            if not isinstance(ticket, Ticket):  # slow, asked of an abstract class
                return
            _kinds.add(type(ticket))
        if ticket is not DONE and ticket.watched:
            self.pending.append(ticket)
        if not self._observers.wants_ends or hook not in HOOKS:
            return
        if ticket is DONE:
            self._observers.end(hook, ticket)
        else:
            self.watched.append((hook, ticket))
            ticket.tell_end(self.tell_ends)

    def tell_ends(self, _: Ticket | None = None) -> None:
        """Tell observers of the tickets that have ended, each once; from any thread."""
        with self._telling:
            ended = [entry for entry in self.watched if entry[1].done()]
            self.watched = [entry for entry in self.watched if entry not in ended]
        for hook, ticket in ended:
            self._observers.end(hook, ticket)

    def unseen(self) -> list[BaseException]:
        """Forget tickets that are done; the errors among them that nobody has seen."""
        left = []
        unseen = []
        for ticket in self.pending:
            if not ticket.done():
                left.append(ticket)
            elif not ticket.observed and (failure := ticket.failure()) is not None:
                ticket.observed = True
                unseen.append(failure)
        self.pending = left
        return unseen


def tell(unseen: list[BaseException]) -> None:
    """Raise the first of the errors that nobody has seen, naming the others; nothing, where there is none."""
    if unseen:
        first, *others = dict.fromkeys(unseen)
        first.add_note("met by an earlier call, whose ticket nobody waited for")
        for other in others:
            first.add_note(f"another such call met: {other!r}")
        raise first
