"""Tickets: what every hook returns. A ticket is done when the hook's work is, and carries what went wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import Lock
from typing import Literal

from .errors import TicketTimeout

Mode = Literal["async", "sync"]


class Ticket(ABC):
    """The promise of one hook call. It may be waited for from any thread, any number of times.

    ``mode`` is "sync" where the work on the device was done when the hook returned, else "async".
    ``observed`` turns true when an error was raised by :meth:`wait`; an error that nobody observed is raised by
    the next hook call on the device and by ``close()``.
    """

    __slots__ = ("_on_end", "observed")
    mode: Mode
    watched = True
    """False where the device itself raises a later failure at its next call (CUDA's sticky errors), so that nobody need
    look at the ticket again."""

    def __init__(self) -> None:
        self.observed = False

    def tell_end(self, told: Callable[[Ticket], None]) -> None:
        """Have whoever finds the ticket ended by :meth:`wait` call ``told`` with it, each time: for observers."""
        self._on_end = told

    @abstractmethod
    def done(self) -> bool:
        """True once the work is finished or has failed; never blocks, never raises."""

    @abstractmethod
    def _block(self, timeout: float | None) -> bool:
        """Wait for at most ``timeout`` seconds (None: for ever); True when done."""

    @abstractmethod
    def failure(self) -> BaseException | None:
        """The error the work ended with; None while it is pending or when it went well."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the work is done; raise what went wrong later, or :class:`TicketTimeout`.

        ``timeout`` is in seconds. After a timeout the ticket stays pending and can be waited for again.
        """
        if not self._block(timeout):
            raise TicketTimeout(
                f"not done after {timeout} s", cure="wait again; the ticket stays pending", argument="ticket"
            )
        told = getattr(self, "_on_end", None)
        if told is not None:
            told(self)
        error = self.failure()
        if error is not None:
            self.observed = True
            raise error


class DoneTicket(Ticket):
    """Work that was finished when the hook returned."""

    __slots__ = ()
    mode: Mode = "sync"

    def done(self) -> bool:
        return True

    def _block(self, timeout: float | None) -> bool:
        return True

    def failure(self) -> BaseException | None:
        return None

    def wait(self, timeout: float | None = None) -> None:
        return None


DONE = DoneTicket()
"""The one ticket of all synchronous work that cannot fail later."""


class PromiseTicket(Ticket):
    """A ticket that another thread completes, for work that ends on the host (a record queued for sending)."""

    __slots__ = ("_done", "_error", "_once", "_pending", "mode")

    def __init__(self, mode: Mode) -> None:
        self.observed = False
        self.mode: Mode = mode
        self._error: BaseException | None = None
        self._done = False
        # Two bare locks: an Event takes ten times as long to make, and each step makes a ticket.
        self._once = Lock()  # taken by the first who completes it
        self._pending = Lock()  # held until then
        self._pending.acquire()

    def complete(self, error: BaseException | None = None) -> None:
        """Finish the ticket, with the error if the work failed. Only the first call counts."""
        if self._once.acquire(blocking=False):
            self._error = error
            self._done = True
            self._pending.release()

    def done(self) -> bool:
        return self._done

    def _block(self, timeout: float | None) -> bool:
        if not self._done and self._pending.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            self._pending.release()  # for the next who waits
        return self._done

    def failure(self) -> BaseException | None:
        return self._error
