"""The base of devices that execute each call before it returns, with their streams and events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import TicketTimeout
from ..timeouts import TIMEOUTS
from .base import DeviceBase

if TYPE_CHECKING:
    from ..streams import Event, Stream


class PassedEvent:
    """An event of a device that has executed all its work."""

    __slots__ = ()

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Return True at once."""
        return True


PASSED = PassedEvent()


class SyncStream:
    """A stream whose work is done when the call that queues it returns."""

    owned = True
    __slots__ = ("handle", "pool")

    def __init__(self, handle: int, pool: object = None) -> None:
        self.handle, self.pool = handle, pool

    def record(self) -> Event:
        """Return an event that has passed."""
        return PASSED

    def wait(self, event: Event) -> None:
        """Wait on the host for an event of another device, as this stream has no other way.

        :raises TicketTimeout: if it has not passed when a call may not wait any longer.
        """
        if not event.wait(TIMEOUTS.ring):
            what = f"an event of another device has not passed after {TIMEOUTS.ring:g} s"
            raise TicketTimeout(what, cure="find out what holds it")

    def synchronize(self, timeout: float | None = None) -> None:
        """Return at once."""


class SyncDevice(DeviceBase):
    """The base of devices without asynchrony. Their streams differ only in their handles."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.stream_pool = object()
        self._stream = SyncStream(0, self.stream_pool)
        self._streams = 0

    @property
    def default_stream(self) -> Stream:
        """The stream on which the framework computes."""
        return self._stream

    def stream(self) -> Stream:
        """Create a stream."""
        self._streams += 1
        return SyncStream(self._streams, self.stream_pool)
