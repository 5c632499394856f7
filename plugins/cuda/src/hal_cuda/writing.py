"""Writes of values on the native path: value and target choose the method, each method is one native call."""

from __future__ import annotations

from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import OutOfMemory, Ticket, View
from hal_core.devices import AsyncDevice, RecordedEvent

from .device_copy import load_copy
from .launching import Kernel
from .structs import SMALL_BYTES, THREADS

if TYPE_CHECKING:
    from hal_core.devices import AsyncStream, AsyncTicket, Value

    from .base import OnNative

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Ints = tuple[int, ...]
MOST = 1 << 30
"""Bytes that one launch copies within the device; its kernel counts in 32 bits."""
SMALL_HEAD = Struct("<QI4x")
"""The header before the data in ``SMALL``."""


class Writer:
    """Writes values for one device. The event after the work is recorded in the same call, which also refuses a
    captured stream."""

    def __init__(self, device: OnNative) -> None:
        self._device, self._counts = device, device._counts
        self._run, self._put, self._fill_word = (
            device.native.calls.run,
            device.native.calls.put,
            device.native.calls.fill,
        )
        self._free = device.events.free

    def set_value(self, target: View, value: Value, stream: AsyncStream) -> Ticket:
        """Write a converted value into a view. A single element into contiguous bytes, most often a scalar into one
        element, is handled in this function, as each Python call would cost a twentieth of it."""
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
        elif type(value) is View:
            return self._copy(target, value, stream)
        elif not target.collapsed()[0]:
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            address = target.memory.address + target.offset
            large = data.nbytes > device.staging.limit
            return self._large(address, data, stream) if large else self._contiguous(address, data, stream)
        return AsyncDevice.submit_value(device, target, value, stream)  # type: ignore[arg-type]  # as a plan

    def _fill(self, target: View, value: np.generic, shape: Ints, steps: Ints, run: int, stream: AsyncStream) -> Ticket:
        """Fill in one launch without staging: the element is part of the parameters.

        (``cuStreamWriteValue`` would do so too, but it refuses memory of a pool: hal's own, and that of some
        frameworks.)
        """
        pattern = value.tobytes()
        cycle = int.from_bytes(pattern * (8 // len(pattern)), "little")
        kernel = self._device.kernels.fill
        n0, n1 = (1, 1, *shape)[-2:]
        step0, step1 = (0, 0, *steps)[-2:]
        kernel.pack(target.memory.address + target.offset, cycle, run, n0, n1, step0, step1)
        runs = n0 * n1
        blocks = -(-runs // THREADS) if run <= 16 else runs
        return self._launch(kernel, min(blocks, 4096), stream)

    def _contiguous(self, address: int, data: Bytes, stream: AsyncStream) -> Ticket:
        """Write contiguous bytes that fit the ring: in the parameters if small, else by one upload."""
        if data.nbytes <= SMALL_BYTES:
            return self.small(address, data.data, stream)
        return self._device.ticket_type(self._upload(address, data, stream))

    def _large(self, address: int, data: Bytes, stream: AsyncStream) -> Ticket:
        """Write a value that does not fit the ring: through device memory, from which a kernel copies it in stream
        order. Above ``value_limit``, or without such memory, write it directly to its target in pieces, once the stream
        is idle."""
        device = self._device
        room = None
        if data.nbytes <= device.value_limit:
            with suppress(OutOfMemory):
                room = device.allocate(data.nbytes)
        if room is None:
            device.wait_for_queued_work(data.nbytes, stream)
            return device.ticket_type(device.upload_pieces(address, data, stream))
        stream.wait(device.upload_pieces(room.address, data, device.upload_stream))
        for at in range(0, data.nbytes, MOST):
            kernel, nbytes = device.kernels.copy_out, min(MOST, data.nbytes - at)
            kernel.pack(address + at, room.address + at, nbytes)
            ticket = self._launch(kernel, -(-nbytes // (THREADS * 16)), stream)
        return ticket

    def small(self, address: int, data: memoryview, stream: AsyncStream) -> AsyncTicket:
        """Write at most ``SMALL_BYTES`` as part of the launch's parameters; also used for a broadcast's header."""
        device, kernel = self._device, self._device.kernels.small
        buffer, nbytes = kernel.buffer, data.nbytes
        SMALL_HEAD.pack_into(buffer, 0, address, nbytes)
        buffer[SMALL_HEAD.size : SMALL_HEAD.size + nbytes] = data
        events, free = device.events, self._free
        event = RecordedEvent(events, free.popleft(), stream.stream_key) if free else events.take(stream)
        self._run(0, 0, 0, 0, 0, stream.raw, kernel.function, 1, 1, THREADS, kernel.at, event.raw)
        return self._done(event)

    def _copy(self, target: View, source: View, stream: AsyncStream) -> Ticket:
        """Copy between two views of this device, in stream order."""
        for blocks in load_copy(self._device, target, source):
            ticket = self._launch(self._device.kernels.copy_strided, blocks, stream)
        return ticket

    def _launch(self, kernel: Kernel, blocks: int, stream: AsyncStream) -> AsyncTicket:
        event = self._device.events.take(stream)
        self._run(0, 0, 0, 0, 0, stream.raw, kernel.function, blocks, 1, THREADS, kernel.at, event.raw)
        return self._done(event)

    def _upload(self, address: int, data: Bytes, stream: AsyncStream) -> RecordedEvent:
        device = self._device
        device.check_stream(stream)  # before a span is taken
        event, span = device.events.take(stream), device.take(data.nbytes)
        try:
            self._put(data, span.address, span.nbytes, address, stream.raw, event.raw)
        except BaseException:
            device.fence(span, stream)  # the copy may be in flight
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
