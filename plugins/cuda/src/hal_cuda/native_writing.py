"""Writing of values on the native path: by the same methods as in :mod:`hal_cuda.writing`, each in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hal_core import View
from hal_core.devices import RecordedEvent

from .launching import Kernel
from .structs import THREADS
from .writing import SMALL_HEAD, Bytes, Writer

if TYPE_CHECKING:
    from hal_core import Ticket
    from hal_core.devices import AsyncStream, AsyncTicket, Value

    from .base import OnGpu
    from .native import Native


class NativeWriter(Writer):
    """Writes values for one device. The event after the work is recorded in the same call, which also refuses a
    captured stream."""

    def __init__(self, device: OnGpu, native: Native) -> None:
        super().__init__(device)
        self._run, self._put, self._fill_word = native.calls.run, native.calls.put, native.calls.fill
        self._free = device.events.free

    def set_value(self, target: View, value: Value, stream: AsyncStream) -> Ticket:
        """Write a converted value into a view. A single element into contiguous bytes, most often a scalar into one
        element, is written out here, as each Python call would cost a twentieth of it."""
        device = self._device
        if device.reads.under_way:
            device.reads.order(target.memory, stream)
        if isinstance(value, np.generic):
            shape, steps, run = target._collapsed or target.collapsed()
            if not shape:
                events, free, counts = device.events, self._free, self._counts
                event = RecordedEvent(events, free.popleft(), stream.stream_key) if free else events.take(stream)
                if self._fill_word(value, target.memory.address + target.offset, run, stream.raw, event.raw):
                    counts["launches"] += 1
                    counts["submissions"] += 1
                    device.last[event.stream_key] = event
                    return device.ticket_type(event)
            if len(shape) <= 2:
                return self._fill(target, value, shape, steps, run, stream)
        return self._any_value(target, value, stream)

    def small(self, address: int, data: memoryview, stream: AsyncStream) -> AsyncTicket:
        """Do the same; also for a broadcast's header."""
        device, kernel = self._device, self._device.kernels.small
        buffer, nbytes = kernel.buffer, data.nbytes
        SMALL_HEAD.pack_into(buffer, 0, address, nbytes)
        buffer[SMALL_HEAD.size : SMALL_HEAD.size + nbytes] = data
        events, free = device.events, self._free
        event = RecordedEvent(events, free.popleft(), stream.stream_key) if free else events.take(stream)
        self._run(0, 0, 0, 0, 0, stream.raw, kernel.function, 1, 1, THREADS, kernel.at, event.raw)
        return self._done(event)

    def _launch(self, kernel: Kernel, blocks: int, stream: AsyncStream) -> AsyncTicket:
        event = self._device.events.take(stream)
        self._run(0, 0, 0, 0, 0, stream.raw, kernel.function, blocks, 1, THREADS, kernel.at, event.raw)
        return self._done(event)

    def _upload(self, address: int, data: Bytes, stream: AsyncStream) -> RecordedEvent:
        device = self._device
        device.check_stream(stream)  # before a span is taken
        span, event = device.take(data.nbytes), device.events.take(stream)
        try:
            self._put(data, span.address, span.nbytes, address, stream.raw, event.raw)
        except BaseException:
            device.staging.fence(span, device.mark(stream))  # the copy may be in flight
            raise
        device.staging.fence(span, event)
        device.last[stream.stream_key] = event
        device.primitives.count("uploads")
        return event

    def _done(self, event: RecordedEvent) -> AsyncTicket:
        counts, device = self._counts, self._device
        counts["launches"] += 1
        counts["submissions"] += 1
        device.last[event.stream_key] = event
        return device.ticket_type(event)
