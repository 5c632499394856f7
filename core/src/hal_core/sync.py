"""Streams and events of devices that execute each call before it returns."""

from __future__ import annotations

from .device import Event


class PassedEvent:
    """An event of a device that has executed everything it was given."""

    __slots__ = ()

    def done(self) -> bool:
        """Always true."""
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Nothing to wait for."""
        return True


PASSED = PassedEvent()


class SyncStream:
    """A stream whose work is done when the call that puts it there returns."""

    __slots__ = ("handle",)

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def record(self) -> Event:
        """An event that has passed."""
        return PASSED

    def wait(self, event: Event) -> None:
        """Wait for an event of another device on the host: this stream has no other way."""
        event.wait()

    def synchronize(self, timeout: float | None = None) -> None:
        """Nothing to wait for."""
