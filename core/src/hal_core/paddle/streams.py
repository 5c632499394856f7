"""Streams, events and tickets of Paddle's CustomDevices, over the bindings that ``paddle.device`` itself uses.

``paddle.device.Event`` takes the current device, which is the framework's affair and not ours, so it is not used.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..device import Event
from ..errors import InvalidValue, TicketTimeout
from ..tickets import Mode, Ticket
from .places import paddle_core

POLL = 50e-6
"""Seconds between two looks at an event. Paddle's own wait holds the interpreter, and knows no deadline."""


class EventPool:
    """Events of one place. Paddle waits on the host when one is destroyed, so they are used again, never dropped.

    Only an event that has passed is recorded anew: what a wait that is still queued then means is the vendor's affair.
    """

    def __init__(self, place: Any) -> None:  # noqa: ANN401 (a Paddle CustomPlace)
        self._place, self._new = place, paddle_core().CustomDeviceEvent
        self.free: deque[Any] = deque()

    def record(self, stream: Any) -> PaddleEvent:  # noqa: ANN401 (a Paddle stream)
        """An event after everything that is on ``stream`` now."""
        reuse = bool(self.free) and self.free[0].query()
        event = self.free.popleft() if reuse else self._new(self._place)
        event.record(stream)
        return PaddleEvent(self, event)


class PaddleEvent:
    """A recorded event; what is in ``keep`` lives until it has passed and nobody holds it."""

    __slots__ = ("event", "keep", "passed", "pool")

    def __init__(self, pool: EventPool, event: Any) -> None:  # noqa: ANN401 (a Paddle event)
        self.pool, self.event = pool, event
        self.keep: object = None
        self.passed = False

    def done(self) -> bool:
        """True once everything before the event has been executed. Raises what the device met."""
        if not self.passed and self.event.query():
            self.passed = True
            self.keep = None
        return self.passed

    def wait(self, timeout: float | None = None) -> bool:
        """Block the host; True when done, False after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            if end is not None and time.monotonic() >= end:
                return False
            time.sleep(POLL)
        return True

    def __del__(self) -> None:
        self.pool.free.append(self.event)


class PaddleStream:
    """A stream of a CustomDevice: one of ours, or the one on which Paddle computes."""

    __slots__ = ("base", "handle", "pool")

    def __init__(self, pool: EventPool, base: Any) -> None:  # noqa: ANN401 (a Paddle stream)
        self.pool, self.base = pool, base
        self.handle = int(base.raw_stream)

    def record(self) -> Event:
        """An event after everything that is on the stream now."""
        return self.pool.record(self.base)

    def wait(self, event: Event) -> None:
        """Let later work on this stream wait for ``event``; the host does not wait."""
        if not isinstance(event, PaddleEvent):
            raise InvalidValue("the event is of another kind of device", cure="wait for it on the host")
        self.base.wait_event(event.event)

    def synchronize(self, timeout: float | None = None) -> None:
        """Block the host until the stream is empty."""
        if not self.record().wait(timeout):
            raise TicketTimeout(f"the stream is busy after {timeout} s", cure="wait again")

    def __repr__(self) -> str:
        return f"PaddleStream({self.handle:#x})"


@contextmanager
def current(kind: str, index: int, stream: PaddleStream) -> Iterator[None]:
    """Let Paddle put its work for this device on ``stream``."""
    core = paddle_core()
    before = core._get_current_custom_device_stream(kind, index)
    if int(before.raw_stream) == stream.handle:
        yield
        return
    core._set_current_custom_device_stream(kind, index, stream.base)
    try:
        yield
    finally:
        core._set_current_custom_device_stream(kind, index, before)


class PaddleTicket(Ticket):
    """Work before an event."""

    __slots__ = ("_error", "_event")
    mode: Mode = "async"

    def __init__(self, event: PaddleEvent) -> None:
        super().__init__()
        self._event = event
        self._error: BaseException | None = None

    def done(self) -> bool:
        try:
            return self._error is not None or self._event.done()
        except Exception as error:  # noqa: BLE001 (kept for wait() and the next hook: done() never raises)
            self._error = error
            return True

    def _block(self, timeout: float | None) -> bool:
        try:
            return self._error is not None or self._event.wait(timeout)
        except Exception as error:  # noqa: BLE001 (raised by wait(), which asks failure())
            self._error = error
            return True

    def failure(self) -> BaseException | None:
        return self._error
