"""Streams, events and tickets as the contract sees them, over those of the accelerator."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hal_core.device import Event as HalEvent
from hal_core.errors import DeviceClosed, GroupLost, HalError, InvalidValue, TicketTimeout
from hal_core.tickets import Mode, Ticket

from hal_sim.streams import Event, Stream

if TYPE_CHECKING:
    from hal_sim.communicator import SimCommunicator


class Health:
    """What the accelerator met while it ran work that had been accepted.

    It tells of the first such fault, at one wait, and not of which operation's ticket it is. As with CUDA, a fault
    therefore counts for the whole device: every ticket looked at from then on fails, and so does every later call. A
    lost group is no fault of the device; the tickets of its broadcasts tell of it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.fault: HalError | None = None
        self.communicators: dict[tuple[int, ...], SimCommunicator] = {}

    def met(self, error: HalError) -> None:
        """Remember a fault, unless it is a group's."""
        if isinstance(error, GroupLost) and any(each.failure() for each in self.communicators.values()):
            return
        error.device = self.name
        self.fault = self.fault or error

    def look(self, event: Event) -> HalError | None:
        """The fault that the device has met by now; ``event`` is one that has passed."""
        try:
            event.synchronize(0)
        except HalError as error:
            self.met(error)
        return self.fault

    def check(self) -> None:
        """Raise when the device has met a fault."""
        if self.fault is not None:
            raise DeviceClosed(
                f"earlier work failed while it ran: {self.fault.what}",
                cure="mend what that work did (Accelerator.races() tells more), and open the device again",
                device=self.name,
            )


class EventPool:
    """Events of the accelerator, made as needed and used again once nobody holds them."""

    def __init__(self, health: Health) -> None:
        self.health = health
        self.free: list[Event] = []

    def record(self, stream: Stream) -> SimEvent:
        """An event after everything that is on ``stream`` now."""
        try:
            event = self.free.pop()
        except IndexError:
            event = Event()
        return SimEvent(self, event.record(stream))

    def close(self) -> None:
        """Destroy the events that nobody holds."""
        while self.free:
            self.free.pop().close()


class SimEvent:
    """A recorded event. It goes back to its pool when nobody holds it any more."""

    __slots__ = ("event", "passed", "pool")

    def __init__(self, pool: EventPool, event: Event) -> None:
        self.pool, self.event, self.passed = pool, event, False

    def done(self) -> bool:
        """True once everything before the event has been executed."""
        if not self.passed:
            self.passed = self.event.query()
        return self.passed

    def wait(self, timeout: float | None = None) -> bool:
        """Block the host; True when done, False after ``timeout`` seconds.

        Without a timeout it raises :class:`TicketTimeout` after the option ``wait_limit_ms``: a simulator never hangs.
        """
        if self.passed:
            return True
        try:
            self.event.synchronize(timeout)
        except TicketTimeout:
            if timeout is None:
                raise
            return False
        except HalError as error:  # what the device met: the work is over all the same
            self.pool.health.met(error)
        self.passed = True
        return True

    def __del__(self) -> None:
        self.pool.free.append(self.event)


class SimStream:
    """A stream of the accelerator: one of our own, destroyed when nobody holds it, or Paddle's current one."""

    __slots__ = ("_events", "_process", "stream")

    def __init__(self, events: EventPool, stream: Stream) -> None:
        self._events, self.stream, self._process = events, stream, os.getpid()

    @property
    def handle(self) -> int:
        """The raw stream, which Paddle knows as well."""
        return self.stream.handle

    def record(self) -> SimEvent:
        """An event after everything that is on the stream now."""
        return self._events.record(self.stream)

    def wait(self, event: HalEvent) -> None:
        """Let later work on this stream wait for ``event``; the host does not wait."""
        if not isinstance(event, SimEvent):
            raise InvalidValue(
                "the event is of another device", cure="wait for it on the host", device=self._events.health.name
            )
        self.stream.wait(event.event)

    def synchronize(self, timeout: float | None = None) -> None:
        """Block the host until the stream is empty."""
        if not self.record().wait(timeout):
            raise TicketTimeout(
                f"the stream is busy after {timeout} s", cure="wait again", device=self._events.health.name
            )
        self._events.health.check()

    def __del__(self) -> None:
        if self._process == os.getpid():  # a fork's child shares nothing but the number
            self.stream.close()

    def __repr__(self) -> str:
        return f"SimStream({self.handle:#x})"


class SimTicket(Ticket):
    """Work before an event."""

    __slots__ = ("_error", "_event", "_known")
    mode: Mode = "async"

    def __init__(self, event: SimEvent) -> None:
        super().__init__()
        self._event = event
        self._error: HalError | None = None
        self._known = False

    def done(self) -> bool:
        return self._event.done()

    def _block(self, timeout: float | None) -> bool:
        return self._event.wait(timeout)

    def failure(self) -> BaseException | None:
        if not self._known and self._event.done():
            self._error, self._known = self._find(), True
        return self._error

    def _find(self) -> HalError | None:
        """What the work met, now that it is over."""
        return self._event.pool.health.look(self._event.event)
