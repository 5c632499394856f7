"""Streams and events over a vendor's primitives."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from ..errors import InvalidValue, TicketTimeout
from ..streams import Event, TimedEvent
from .health import Health
from .primitives import RawEvent, RawStream, StreamPrimitives
from .retired_memory import Retired

_stream_keys = count(1)


class EventPool:
    """Pool of events, created on demand and reused once unreferenced."""

    def __init__(self, primitives: StreamPrimitives, health: Health, retired: Retired) -> None:
        self.primitives, self.health, self.retired = primitives, health, retired
        self.query, self.synchronize = primitives.event_query, primitives.event_synchronize
        self.error = primitives.event_error
        self._record, self._rerecords = primitives.event_record, primitives.rerecords
        self.free: deque[RawEvent] = deque()
        self.free_timed: deque[RawEvent] = deque()
        self.give_back: Callable[[RawEvent], None] = self.free.append
        self.give_back_timed: Callable[[RawEvent], None] = self.free_timed.append
        self.made = 0

    def reserve(self, count: int) -> None:
        """Make so many events before they are needed."""
        self.made += count
        self.free.extend([self.primitives.event_create() for _ in range(count)])

    def record(self, stream: AsyncStream) -> RecordedEvent:
        """Return an event after all work that is now on ``stream``."""
        free = self.free  # the newest is in the processor's caches; take() needs the one that has passed soonest
        event = RecordedEvent(self, free.pop(), stream.stream_key) if free and self._rerecords else self.take(stream)
        self._record(event.raw, stream.raw)
        return event

    def take(self, stream: AsyncStream) -> RecordedEvent:
        """Return an event that is not recorded yet, for a primitive that records it on ``stream``."""
        free = self.free
        if free and (self._rerecords or self.query(free[0])):
            return RecordedEvent(self, free.popleft(), stream.stream_key)
        self.made += 1
        return RecordedEvent(self, self.primitives.event_create(), stream.stream_key)

    def record_timed(self, stream: AsyncStream) -> ClockedEvent:
        """Return a timed event after all work that is now on ``stream``."""
        free = self.free_timed
        reused = bool(free) and (self._rerecords or self.query(free[0]))
        raw = free.popleft() if reused else self.primitives.event_create_timed()
        event = ClockedEvent(self, raw, stream.stream_key)
        self._record(raw, stream.raw)
        return event

    def close(self) -> None:
        """Destroy the unreferenced events; from now on each that becomes so."""
        self.give_back = self.give_back_timed = partial(_destroy, self.primitives, os.getpid())
        for free in (self.free, self.free_timed):
            while free:
                self.primitives.event_destroy(free.popleft())


def _destroy(primitives: StreamPrimitives, process: int, raw: RawEvent) -> None:
    if process == os.getpid():  # in a fork's child: events belong to the parent
        primitives.event_destroy(raw)


class RecordedEvent:
    """A recorded event (:class:`hal_core.streams.Event`). Returns to its pool when unreferenced.

    ``stream_key``: that of its stream, whose work is executed in order. ``keep``: kept alive until it has passed.
    """

    __slots__ = ("keep", "passed", "pool", "raw", "stream_key")

    def __init__(self, pool: EventPool, raw: RawEvent, stream_key: int) -> None:
        self.pool, self.raw, self.stream_key = pool, raw, stream_key
        self.passed = False
        self.keep: object = None

    def done(self) -> bool:
        """Return True once all work before the event has been executed. Raises the device's error if the query reports
        one."""
        if not self.passed and self.pool.query(self.raw):
            self.passed, self.keep = True, None
        return self.passed

    def wait(self, timeout: float | None = None) -> bool:
        """Block the host; True when done, False after ``timeout`` seconds."""
        if not self.passed and self.pool.synchronize(self.raw, timeout):
            self.passed, self.keep = True, None
        return self.passed

    def __del__(self) -> None:
        self.pool.give_back(self.raw)


class EndedEvent:
    """What a ticket keeps of an event that has passed, so that the event returns to its pool."""

    __slots__ = ("pool", "stream_key")
    passed, raw = True, None

    def __init__(self, event: RecordedEvent) -> None:
        self.pool, self.stream_key = event.pool, event.stream_key

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Return True at once."""
        return True


class ClockedEvent(RecordedEvent):
    """A recorded event with the device's time (:class:`hal_core.streams.TimedEvent`)."""

    __slots__ = ()

    def seconds_since(self, earlier: TimedEvent) -> float:
        """Return the device's seconds from ``earlier`` to this event.

        :raises InvalidValue: for an event of another device, and unless both have passed.
        """
        device = self.pool.health.device
        if not isinstance(earlier, ClockedEvent) or earlier.pool is not self.pool:
            what, cure = f"{type(earlier).__name__} is no timed event of this device", "give one of its timed_event()"
            raise InvalidValue(what, cure=cure, device=device, argument="earlier")
        if not (earlier.done() and self.done()):
            raise InvalidValue("one of the events has not passed", cure="wait for both", device=device)
        return self.pool.primitives.event_seconds(earlier.raw, self.raw)

    def __del__(self) -> None:
        self.pool.give_back_timed(self.raw)


class AsyncStream:
    """A stream (:class:`hal_core.streams.Stream`): hal's own, released when unreferenced, or a framework's.

    ``stream_key``: a number of this object alone; the runtime may reuse the handle of a destroyed stream.
    ``owned``: a device of hal made it, that of its ``pool``. ``copy_stream``: the one for copies out of this one's
    work; None for such a stream itself. If several streams shared it, a held one would delay the copies of all. It is
    made with its stream, in no hook: a driver may make a stream wait for work under way.
    """

    __slots__ = ("copy_stream", "handle", "owned", "pool", "raw", "stream_key")

    def __init__(self, pool: EventPool, raw: RawStream, *, owned: bool, copy_stream: AsyncStream | None = None) -> None:
        self.pool, self.raw, self.owned, self.copy_stream = pool, raw, owned, copy_stream
        self.handle, self.stream_key = pool.primitives.stream_handle(raw), next(_stream_keys)

    def record(self) -> Event:
        """Return an event after all work that is now on the stream."""
        return self.pool.record(self)

    def wait(self, event: Event) -> None:
        """Make later work on this stream wait for ``event``; the host does not wait.

        :raises InvalidValue: for an event of another kind of device.
        """
        primitives = self.pool.primitives
        if not isinstance(event, RecordedEvent) or type(event.pool.primitives) is not type(primitives):
            raise InvalidValue(
                "the event is of another kind of device", cure="wait for it on the host", device=self.pool.health.device
            )
        primitives.stream_wait(self.raw, event.raw)

    def synchronize(self, timeout: float | None = None) -> None:
        """Block the host until the stream is empty.

        :raises TicketTimeout: if it is still busy after ``timeout`` seconds.
        """
        pool = self.pool
        if not pool.record(self).wait(timeout):
            raise TicketTimeout(f"the stream is busy after {timeout} s", cure="wait again", device=pool.health.device)
        pool.health.check()

    def __repr__(self) -> str:
        return f"<{self.pool.health.device} stream {self.handle:#x}>"

    def __del__(self) -> None:
        if getattr(self, "owned", False):
            primitives: Any = self.pool.primitives
            raw = self.raw
            self.pool.retired.add((), lambda: primitives.stream_destroy(raw))
