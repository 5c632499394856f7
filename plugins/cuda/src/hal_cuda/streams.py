"""CUDA streams and events as the contract sees them."""

from __future__ import annotations

import time
from threading import get_ident
from typing import Any

from hal_core.device import Event
from hal_core.errors import InvalidValue, TicketTimeout
from hal_core.tickets import Mode, Ticket

from .driver import Driver

POLL = 50e-6
"""Seconds between two looks at an event while a wait has a deadline; the driver's own wait has none."""
PATIENT = 500e-6
"""The same for threads beside the one that puts work on streams, such as a sink's. The driver would wake all of them at
once, and they would want the interpreter just when the GPU waits for the next step: 0.1 to 0.2 ms of each gap."""


class EventPool:
    """Events without timing, made as needed and used again once nobody holds them."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.busy = get_ident()  # the thread that puts work on streams
        self.free: list[Any] = []
        flags = driver.api.CUevent_flags
        self._flags = int(flags.CU_EVENT_DISABLE_TIMING)
        self._record = driver.api.cuEventRecord
        self.made = 0

    def record(self, stream: int) -> CudaEvent:
        """An event after everything that is on ``stream`` (a handle) now."""
        driver = self.driver
        self.busy = get_ident()
        if self.free:
            handle = self.free.pop()
        else:
            handle = driver.ok(driver.api.cuEventCreate(self._flags), "cuEventCreate")
            self.made += 1
        driver.ok(driver.api.cuEventRecord(handle, stream), "cuEventRecord")
        return CudaEvent(self, handle, stream)

    def close(self) -> None:
        """Destroy the events that nobody holds."""
        while self.free:
            self.driver.api.cuEventDestroy(self.free.pop())


class CudaEvent:
    """A recorded event. Goes back to its pool when nobody holds it any more."""

    __slots__ = ("handle", "lane", "passed", "pool")

    def __init__(self, pool: EventPool, handle: Any, lane: int) -> None:  # noqa: ANN401 (a CUevent)
        self.pool, self.handle, self.lane = pool, handle, lane
        self.passed = False

    def done(self) -> bool:
        """True once everything before the event has been executed. Raises what the device met."""
        if not self.passed:
            driver = self.pool.driver
            (status,) = driver.api.cuEventQuery(self.handle)
            if status == driver.not_ready:
                return False
            driver.ok((status,), "cuEventQuery")
            self.passed = True
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Block the host; True when done, False after ``timeout`` seconds."""
        driver = self.pool.driver
        if timeout is None and self.pool.busy != get_ident():
            while not self.done():
                time.sleep(PATIENT)
            return True
        if timeout is None:
            driver.ok(driver.api.cuEventSynchronize(self.handle), "cuEventSynchronize")
            self.passed = True
            return True
        end = time.monotonic() + timeout
        while not self.done():
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(POLL, left))
        return True

    def __del__(self) -> None:
        self.pool.free.append(self.handle)


class CudaStream:
    """A stream by its handle: our own, or a framework's current one."""

    __slots__ = ("handle", "keep", "pool")

    def __init__(self, pool: EventPool, handle: int, keep: object = None) -> None:
        self.pool, self.handle, self.keep = pool, handle, keep

    def record(self) -> Event:
        """An event after everything that is on the stream now."""
        return self.pool.record(self.handle)

    def wait(self, event: Event) -> None:
        """Let later work on this stream wait for ``event``; the host does not wait."""
        if not isinstance(event, CudaEvent):
            raise InvalidValue("the event is of another device", cure="wait for it on the host", device="cuda")
        driver = self.pool.driver
        driver.ok(driver.api.cuStreamWaitEvent(self.handle, event.handle, 0), "cuStreamWaitEvent")

    def synchronize(self, timeout: float | None = None) -> None:
        """Block the host until the stream is empty."""
        if not self.record().wait(timeout):
            raise TicketTimeout(f"the stream is busy after {timeout} s", cure="wait again", device="cuda")

    def __repr__(self) -> str:
        return f"CudaStream({self.handle:#x})"


class CudaTicket(Ticket):
    """Work before an event. A failure of the device is raised by :meth:`wait`."""

    __slots__ = ("_error", "_event", "keep")
    mode: Mode = "async"
    watched = False  # an error of the device is sticky: its next call raises it

    def __init__(self, event: CudaEvent) -> None:
        self.observed = False
        self.keep: object = None  # what the device still reads or writes
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
