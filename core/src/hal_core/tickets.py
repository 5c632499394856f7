"""Tickets, the results of hook calls. A ticket is done when the hook's work is, and carries its error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import Lock
from typing import Literal

from .errors import TicketTimeout

Mode = Literal["async", "sync"]


class Ticket(ABC):
    """The pending result of one hook call. Any thread may wait for it, any number of times.

    ``mode`` is "sync" if the device work was done when the hook returned, else "async". ``observed`` becomes true when
    :meth:`wait` raises an error. If an error was not observed, the next hook call on the device and ``close()`` raise
    it.
    """

    __slots__ = ("_on_end", "observed")
    mode: Mode
    watched = True
    """False where the device itself raises a later failure at its next call (CUDA's sticky errors). Such a ticket need
    not be checked again."""
    order: object = None
    """The key of tickets that become done in the order of their calls, such as a stream's number. A later call queries
    only the oldest pending one of them. None: each call queries the ticket itself."""

    def __init__(self) -> None:
        self.observed = False

    def call_at_end(self, callback: Callable[[Ticket], None]) -> None:
        """Call ``callback`` with the ticket each time :meth:`wait` finds it ended. Used by observers."""
        self._on_end = callback

    @abstractmethod
    def done(self) -> bool:
        """True once the work is finished or has failed; never blocks, never raises."""

    @abstractmethod
    def _block(self, timeout: float | None) -> bool:
        """Wait for at most ``timeout`` seconds (None: without limit); True when done."""

    @abstractmethod
    def failure(self) -> BaseException | None:
        """Return the error of the work; None while it is pending or if it succeeded."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the work is done. Raise the work's error, or :class:`TicketTimeout`.

        ``timeout`` is in seconds. After a timeout the ticket stays pending and can be waited for again.
        """
        if not self._block(timeout):
            raise TicketTimeout(
                f"not done after {timeout} s", cure="wait again; the ticket stays pending", argument="ticket"
            )
        callback = getattr(self, "_on_end", None)
        if callback is not None:
            callback(self)
        error = self.failure()
        if error is not None:
            self.observed = True
            raise error


class DoneTicket(Ticket):
    """A ticket of work that was done when the hook returned."""

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
"""The shared ticket of all synchronous work that cannot fail later."""


class PromiseTicket(Ticket):
    """A ticket that another thread completes, for work that ends on the host (a record queued for sending)."""

    __slots__ = ("_done", "_error", "_once", "_pending", "mode")

    def __init__(self, mode: Mode) -> None:
        self.observed = False
        self.mode: Mode = mode
        self._error: BaseException | None = None
        self._done = False
        # Two bare locks: an Event takes ten times as long to make, and each step makes a ticket.
        self._once = Lock()  # taken by the first call of complete()
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
            self._pending.release()  # for the next waiting thread
        return self._done

    def failure(self) -> BaseException | None:
        return self._error
