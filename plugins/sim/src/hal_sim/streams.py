"""Streams and events of the simulated accelerator."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Self

from hal_sim._native import native


def milliseconds(timeout: float | None) -> int:
    return -1 if timeout is None else max(0, round(timeout * 1000))


class Closing:
    """Base of objects that are closed at the end of a ``with`` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class Event(Closing):
    """A point on a stream, to wait for or to query. One that was never recorded counts as done. ``timed``: it notes the
    time at which it passes."""

    def __init__(self, *, timed: bool = False) -> None:
        self._native = native()
        handle = ctypes.c_void_p()
        self._native.check(self._native.event_create(ctypes.byref(handle)))
        self.handle: int = handle.value or 0
        if timed:
            self._native.check(self._native.event_timed(self.handle))

    def record(self, stream: Stream) -> Self:
        self._native.check(self._native.event_record(self.handle, stream.handle))
        return self

    def query(self) -> bool:
        done = ctypes.c_int()
        self._native.check(self._native.event_query(self.handle, ctypes.byref(done)))
        return bool(done.value)

    def seconds_since(self, earlier: Event) -> float:
        """Return the time from an earlier timed event to this one; both have passed."""
        seconds = ctypes.c_double()
        self._native.check(self._native.event_seconds(earlier.handle, self.handle, ctypes.byref(seconds)))
        return seconds.value

    def synchronize(self, timeout: float | None = None) -> None:
        """Make the host wait; None: as long as the option ``wait_limit_ms``."""
        self._native.check(self._native.event_wait(self.handle, milliseconds(timeout)))

    def close(self) -> None:
        if self.handle:
            self._native.check(self._native.event_destroy(self.handle))
            self.handle = 0


class Stream(Closing):
    """A queue of work with its own worker. ``handle`` is the raw stream that Paddle uses as well."""

    def __init__(self, device: int, handle: int, *, owned: bool) -> None:
        self._native = native()
        self.device, self.handle, self._owned = device, handle, owned

    @classmethod
    def create(cls, device: int) -> Stream:
        handle = ctypes.c_void_p()
        native().check(native().stream_create(device, ctypes.byref(handle)))
        return cls(device, handle.value or 0, owned=True)

    @classmethod
    def adopt(cls, raw_stream: int) -> Stream:
        """Return a stream created by other code, such as Paddle."""
        device, number = ctypes.c_int(), ctypes.c_int()
        native().check(native().stream_info(raw_stream, ctypes.byref(device), ctypes.byref(number)))
        return cls(device.value, raw_stream, owned=False)

    @property
    def number(self) -> int:
        """Its number in traces and reports."""
        device, number = ctypes.c_int(), ctypes.c_int()
        self._native.check(self._native.stream_info(self.handle, ctypes.byref(device), ctypes.byref(number)))
        return number.value

    @property
    def pending(self) -> int:
        """Operations that are not done, including the running one."""
        count = ctypes.c_long()
        self._native.check(self._native.stream_pending(self.handle, ctypes.byref(count)))
        return count.value

    def hold_stream(self) -> None:
        """Start no more work until ``release``: the latch of every test of asynchrony."""
        self._native.check(self._native.stream_hold(self.handle, 1))

    def release(self) -> None:
        self._native.check(self._native.stream_hold(self.handle, 0))

    @contextlib.contextmanager
    def held(self) -> Iterator[Self]:
        self.hold_stream()
        try:
            yield self
        finally:
            self.release()

    def query(self) -> bool:
        """Return True if all queued work has ended, not only begun."""
        done = ctypes.c_int()
        self._native.check(self._native.stream_query(self.handle, ctypes.byref(done)))
        return bool(done.value)

    def synchronize(self, timeout: float | None = None) -> None:
        self._native.check(self._native.stream_wait(self.handle, milliseconds(timeout)))

    def wait(self, event: Event) -> None:
        """Make later work on this stream wait for the event; the host does not wait."""
        self._native.check(self._native.stream_wait_event(self.handle, event.handle))

    def close(self) -> None:
        """Close the stream; its queued work still runs. Idempotent."""
        if self.handle and self._owned:
            self._native.check(self._native.stream_destroy(self.handle))
        self.handle = 0
