"""Streams and events: the order in which a device works."""

from __future__ import annotations

from typing import Protocol


class Event(Protocol):
    """A point in a stream's order."""

    def done(self) -> bool:
        """True once everything before the event has been executed."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block the host for at most ``timeout`` seconds; True when done."""


class TimedEvent(Event, Protocol):
    """An event that notes the device's time when it passes."""

    def seconds_since(self, earlier: TimedEvent) -> float:
        """Return the seconds that passed on the device from ``earlier``, an event of the same device, to this one.

        Raises :class:`hal_core.errors.InvalidValue` unless both have passed.
        """


class Stream(Protocol):
    """A queue of device work, executed in order. ``handle`` is the device's own number for it."""

    @property
    def handle(self) -> int: ...

    def record(self) -> Event:
        """Return an event after all work that is now on the stream."""

    def wait(self, event: Event) -> None:
        """Make work that is put on the stream from now on wait for ``event``; the host does not wait."""

    def synchronize(self, timeout: float | None = None) -> None:
        """Block the host until the stream is empty. Raise :class:`hal_core.errors.TicketTimeout` after ``timeout``
        seconds."""
