"""Liars whose tickets know a fault of the runtime, and raise it too seldom, too late or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from hal_core.devices.tickets import AsyncTicket
from hal_core.errors import TicketTimeout

from . import Lie, Patch, liar
from .proxies import HELD

NEEDS = (*HELD, "primitives")


class Tickets(Lie):
    """Base: the tickets of writes and steps are of the class ``made``."""

    made: type[AsyncTicket]

    def laid(self) -> None:
        """Make such tickets from now on."""
        device: Any = self
        device.ticket_type = self.made


class _Once(AsyncTicket):
    __slots__ = ()

    def wait(self, timeout: float | None = None) -> None:
        if not self.observed:
            super().wait(timeout)


@liar(26, "a fault is raised by the first wait for its ticket, and by no later one", requires=NEEDS)
class FaultOfTheFirstWait(Tickets):
    """An error that is taken from the runtime when it is read."""

    made = _Once


class _Alone(AsyncTicket):
    __slots__ = ()
    watched = False


@liar(26, "a fault of work that nobody waits for is raised by nothing", requires=NEEDS)
class FaultOfNobody(Tickets):
    """Tickets of a runtime that raises its faults itself, over one that does not."""

    made = _Alone


class _NeverDone(AsyncTicket):
    __slots__ = ()

    def done(self) -> bool:
        return self._error is None and super().done()


@liar(26, "a ticket whose work failed is never done", requires=NEEDS)
class FailedIsPending(Tickets):
    """Done is success."""

    made = _NeverDone


class _SeenAfterATimeout(AsyncTicket):
    __slots__ = ()

    def wait(self, timeout: float | None = None) -> None:
        try:
            super().wait(timeout)
        except TicketTimeout:
            self.observed = True
            raise


@liar(26, "a ticket whose wait has timed out counts as seen: its later fault is raised by no call", requires=NEEDS)
class FaultAfterATimeout(Tickets):
    """Whoever has waited once is taken to wait again."""

    made = _SeenAfterATimeout


class _LookedAtOnce(AsyncTicket):
    __slots__ = ()

    def failure(self) -> BaseException | None:
        found = super().failure()
        self._looked = True
        return found


@liar(26, "a ticket that was looked at while its work was pending never fails", requires=NEEDS)
class FaultAfterALook(Tickets):
    """No error yet is kept as no error."""

    made = _LookedAtOnce


# -- calls whose tickets are not looked at again -----------------------------------------------------------------------


class Untracked(Patch):
    """Base: the tickets of one call are not kept for whoever does not wait."""

    seam = "tracking of a ticket"
    call: ClassVar[str]

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Keep the rest."""

        def track(tickets: Any, hook: str, ticket: Any) -> None:  # noqa: ANN401 (the core's)
            if hook != cls.call:
                true(tickets, hook, ticket)

        return track


@liar(26, "an error of drafts that nobody waits for is raised by nothing")
class UntrackedDrafts(Untracked):
    """It is no hook."""

    call = "set_drafts"


@liar(26, "an error of a write to several memories that nobody waits for is raised by nothing", requires=NEEDS)
class UntrackedWrites(Untracked):
    """Nor is this."""

    call = "write"
