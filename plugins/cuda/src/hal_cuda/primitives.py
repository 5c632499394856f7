"""The CUDA driver as primitives of :class:`hal_core.devices.asynchronous.AsyncDevice`.

Hooks free unused memory, and may not wait (G3), so memory comes from :class:`hal_cuda.memory.GpuMemory`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import get_ident
from typing import Any

from hal_core import TIMEOUTS
from hal_core.devices import Launch, PlanLaunch, Primitives

from .context import Context
from .driver import captured
from .launching import Kernels
from .memory import memory_of
from .queues import Queues
from .structs import THREADS

LEGACY = 1
"""``CU_STREAM_LEGACY``: CUDA's default stream."""
IMPLICIT = "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"
"""The driver's status for its default stream while a blocking stream is being captured."""
IN_PLACE = 16 << 10
"""Bytes: the kernel reads a block up to this size from pinned memory itself, without an upload."""


class CudaPrimitives(Primitives):
    """Primitives over one context. Streams are driver handles."""

    rerecords = True

    def __init__(self, context: Context) -> None:
        self.driver = driver = context.driver
        self._context = context
        self._event_flags = int(driver.api.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._working = get_ident()  # the thread that submits work
        self._poll, self._poll_background, self._slice = TIMEOUTS.poll, TIMEOUTS.poll_background, TIMEOUTS.look
        self._queues = Queues(self.event_create, self._record, self.event_query)
        self._streams: list[int] = []  # currently unused
        self._memory = memory_of(context)
        self._memory.join(self, context)
        self.kernels = Kernels(driver, self._memory.modules)
        self._kernel = self.kernels.write
        self._closed = False

    def room(self, stream: int) -> None:
        """Wait while so much is in flight on a stream that the driver itself might wait, which has no deadline (G3)."""
        while (event := self._queues.full(stream)) is not None:
            self.driver.full(stream, event)

    def captures(self, stream: int) -> bool:
        """Return whether the stream is being captured into a graph."""
        status, state = self.driver.on.cuStreamIsCapturing(stream)
        if status == self.driver.success:
            return bool(int(state))
        if getattr(status, "name", "") != IMPLICIT:
            self.driver.ok((status,), "cuStreamIsCapturing")
        return True

    def check_capture(self, stream: int) -> None:
        """Raise :class:`InvalidValue` for a stream that is being captured, before the call would invalidate the
        capture."""
        if self.captures(stream):
            raise captured(stream)

    # -- streams ------------------------------------------------------------------------------------------------

    def stream_create(self) -> int:
        """Return a stream that does not wait for CUDA's default stream: a returned, empty one, or a new one."""
        with self.driver.during_captures():
            for at, stream in enumerate(self._streams):
                if self.driver.api.cuStreamQuery(stream)[0] == self.driver.success:
                    return self._streams.pop(at)
        flags = int(self.driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(self.driver.ok(self.driver.on.cuStreamCreate(flags), "cuStreamCreate"))

    def stream_destroy(self, stream: int) -> None:
        """Keep the stream for :meth:`stream_create`; a stream that is not empty is not destroyed under its work."""
        if not self._closed:
            self._streams.append(stream)

    def stream_handle(self, stream: int) -> int:
        return stream

    def stream_wait(self, stream: int, event: Any) -> None:  # noqa: ANN401 (a CUevent)
        self.check_capture(stream)
        self.driver.ok(self.driver.on.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent")

    # -- events: CUevents, without timing unless asked ------------------------------------------------------------

    def event_create(self) -> Any:  # noqa: ANN401
        return self.driver.ok(self.driver.on.cuEventCreate(self._event_flags), "cuEventCreate")

    def event_create_timed(self) -> Any:  # noqa: ANN401
        return self.driver.ok(self.driver.on.cuEventCreate(0), "cuEventCreate")

    def event_seconds(self, earlier: Any, event: Any) -> float:  # noqa: ANN401
        with self.driver.during_captures():
            found = self.driver.api.cuEventElapsedTime(earlier, event)
        return float(self.driver.ok(found, "cuEventElapsedTime")) / 1e3

    def event_destroy(self, event: Any) -> None:  # noqa: ANN401
        if not self._closed:  # its context may be gone, and each event with it
            self.driver.api.cuEventDestroy(event)

    def event_record(self, event: Any, stream: int) -> None:  # noqa: ANN401
        self._working = get_ident()
        self._queues.add(stream)
        self._record(event, stream)

    def _record(self, event: Any, stream: int) -> None:  # noqa: ANN401
        self.driver.ok(self.driver.on.cuEventRecord(event, stream), "cuEventRecord")

    def event_query(self, event: Any) -> bool:  # noqa: ANN401
        driver = self.driver
        with driver.during_captures():
            (status,) = driver.api.cuEventQuery(event)
        if status == driver.not_ready:
            return False
        driver.ok((status,), "cuEventQuery")
        return True

    def event_synchronize(self, event: Any, timeout: float | None) -> bool:  # noqa: ANN401
        """Query until the event has passed, as the driver's own wait has no deadline and ignores signals.

        The thread that submits work queries without a pause, other threads at intervals. (If all of them woke at once,
        they would take the GIL when the GPU waits for the next step: 0.1 to 0.2 ms of each gap.)
        """
        patience = self._poll if timeout is not None else self._poll_background
        if self._working == get_ident():
            patience = 0.0
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = self._slice if end is None else min(self._slice, end - time.monotonic())
            if self._passes(event, left, patience):
                return True
            if end is not None and time.monotonic() >= end:
                return False

    def _passes(self, event: Any, seconds: float, patience: float) -> bool:  # noqa: ANN401
        """Return whether an event passes within so many seconds, in which other threads run."""
        end = time.monotonic() + seconds
        while not self.event_query(event):
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(patience, left))
        return True

    def spoils(self, error: Exception) -> bool:
        """Return True for a sticky error; any other concerns one call only."""
        return bool(self.driver.broken)

    # -- memory -------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        return self._memory.allocate(nbytes, self.driver)

    def free(self, address: int) -> None:
        self._memory.free(address, self.driver)

    def wait_for_default_stream(self, timeout: float) -> bool:
        """Wait for CUDA's default stream, but not for non-blocking streams; False after ``timeout`` seconds."""
        event = self.event_create()
        with self.driver.during_captures():
            self._record(event, LEGACY)
        passed = self.event_synchronize(event, timeout)
        self.event_destroy(event)
        return passed

    def allocate_host(self, nbytes: int) -> int:
        return self._memory.allocate_host(nbytes, self.driver)

    def free_host(self, address: int) -> None:
        self._memory.free_host(address, self.driver)

    def close(self) -> None:
        """Release everything; no work is in flight. Memory still referenced is released with its last reference."""
        self._closed = True
        api = self.driver.api
        with self._context.entered():
            self._queues.close(api.cuEventDestroy)
            for stream in self._streams:
                api.cuStreamDestroy(stream)
        self._memory.leave(self, self.driver)
        self._context.close()

    # -- work ---------------------------------------------------------------------------------------------------

    def copy_in(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.driver.ok(self.driver.on.cuMemcpyHtoDAsync(target, source, nbytes, stream), "cuMemcpyHtoDAsync")

    def copy_out(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.driver.ok(self.driver.on.cuMemcpyDtoHAsync(target, source, nbytes, stream), "cuMemcpyDtoHAsync")
        self._queues.add(stream, 1)  # one call may make many launches

    def launch(self, launch: Launch, block: int, stream: int) -> None:
        self._kernel.launch(self.fill_plan(launch, block), THREADS, stream)

    def launch_graphs(self, graphs: Sequence[int], stream: int) -> None:
        """Launch instantiated graphs, one after the other."""
        self.check_capture(stream)
        self.room(stream)
        for graph in graphs:
            self.driver.ok(self.driver.on.cuGraphLaunch(graph, stream), "cuGraphLaunch")
            self._queues.add(stream, 1)

    def fill_plan(self, launch: Launch, block: int) -> int:
        """Set the parameters of a plan's launch; return its number of blocks of threads."""
        assert isinstance(launch, PlanLaunch)
        packed = launch.packed
        self._kernel.pack(
            launch.address,
            block,
            launch.scatter_map,
            packed.writes,
            packed.records,
            launch.fields,
            packed.record_bytes,
            packed.slots_at,
            packed.records_at,
            packed.payload_at,
        )
        return packed.writes + packed.records

    def submit_copy_out(
        self,
        target: int,
        parts: Sequence[tuple[int, int]],
        after: int,
        stream: int,
        before: Any,  # noqa: ANN401 (a CUevent)
        event: Any,  # noqa: ANN401 (a CUevent)
    ) -> None:
        self.room(stream)  # the caller has asked for ``after`` alone
        super().submit_copy_out(target, parts, after, stream, before, event)


class NativePrimitives(CudaPrimitives):
    """The same by native calls, which keep the GIL. Events are whole numbers."""

    def __init__(self, context: Context) -> None:
        assert context.driver.native is not None
        self._calls = calls = context.driver.native.calls
        super().__init__(context)
        self._uploads, self._arrival = self.stream_create(), self.event_create()
        put = self.__dict__  # functions in place of methods: the base calls them with the same arguments
        put["event_record"], put["event_query"], put["captures"] = calls.record, calls.query, calls.capturing

    def close(self) -> None:
        """Do the same, and destroy the events that count calls in flight."""
        with self._context.entered():
            self._calls.forget()
            self.driver.api.cuEventDestroy(self._arrival)
        self._streams.append(self._uploads)
        super().close()

    def stream_wait(self, stream: int, event: int) -> None:
        self.check_capture(stream)
        self._calls.wait(stream, event)

    def event_create(self) -> int:
        return int(super().event_create())

    def event_create_timed(self) -> int:
        return int(super().event_create_timed())

    def room(self, stream: int) -> None:
        self._calls.room(stream)

    def event_synchronize(self, event: int, timeout: float | None) -> bool:
        self._working = self._calls.working()
        return super().event_synchronize(event, timeout)

    def _passes(self, event: int, seconds: float, patience: float) -> bool:
        if patience:
            return super()._passes(event, seconds, patience)
        passed: bool = self._calls.passes(event, max(0, int(seconds * 1e6)))
        return passed

    def launch_graphs(self, graphs: Sequence[int], stream: int) -> None:
        self._calls.graphs(stream, *graphs)

    def copy_in(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._calls.run(target, source, nbytes, stream, 0, stream, 0, 0, 0, 0, 0, 0)

    def submit(self, source: int, target: int, nbytes: int, launch: Launch | None, stream: int, event: int) -> None:
        run, kernel = self._calls.run, self._kernel
        if launch is None:
            run(target, source, nbytes, stream, 0, stream, 0, 0, 0, 0, 0, event)
            self.count("uploads")
            return
        in_place = nbytes <= IN_PLACE
        blocks = self.fill_plan(launch, source if in_place else target)
        uploaded = (0, 0, 0, 0, 0) if in_place else (target, source, nbytes, self._uploads, self._arrival)
        run(*uploaded, stream, kernel.function, blocks, 1, THREADS, kernel.at, event)
        if not in_place:
            self.count("uploads")
        self.count("launches")

    def submit_copy_out(
        self, target: int, parts: Sequence[tuple[int, int]], after: int, stream: int, before: int, event: int
    ) -> None:
        self._calls.copy_out(target, after, stream, before, event, tuple([number for part in parts for number in part]))
        self.counts["copies_out"] += sum([nbytes > 0 for _, nbytes in parts])
