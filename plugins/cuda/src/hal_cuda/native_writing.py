"""How values reach the GPU on the native path: by the same ways as in :mod:`hal_cuda.writing`, each in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .launching import Kernel
from .structs import THREADS
from .writing import Bytes, Writer

if TYPE_CHECKING:
    from hal_core.devices import AsyncStream, AsyncTicket, RecordedEvent

    from .base import OnGpu
    from .native import Native


class NativeWriter(Writer):
    """Writes values for one device. The event behind the work is recorded in the same call."""

    def __init__(self, device: OnGpu, native: Native) -> None:
        super().__init__(device)
        self._run, self._put, self._memset32 = native.calls.run, native.calls.put, native.calls.memset32

    def _launch(self, kernel: Kernel, blocks: int, stream: AsyncStream) -> AsyncTicket:
        event = self._device.events.take(stream)
        self._run(0, 0, 0, 0, 0, stream.raw, kernel.function, blocks, 1, THREADS, kernel.at, event.raw)
        return self._done(event)

    def _memset(self, address: int, word: int, words: int, stream: AsyncStream) -> AsyncTicket:
        event = self._device.events.take(stream)
        self._memset32(address, word, words, stream.raw, event.raw)
        return self._done(event)

    def _upload(self, address: int, data: Bytes, stream: AsyncStream) -> RecordedEvent:
        device = self._device
        span, event = device.take(data.nbytes), device.events.take(stream)
        try:
            self._put(data, span.address, span.nbytes, address, stream.raw, event.raw)
        except BaseException:
            device.staging.fence(span, device.mark(stream))  # the copy may be under way
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
