"""Streams and events of Paddle's CustomDevices, over the bindings that ``paddle.device`` itself uses.

``paddle.device.Event`` uses the framework's current device, so it is not used here.
"""

from __future__ import annotations

from typing import Any

from hal_core.devices import StreamPrimitives

from .places import paddle_core

RawEvent = Any
RawStream = Any
"""An event, and a stream, of Paddle's bindings."""


class PaddlePrimitives(StreamPrimitives):
    """One place. Paddle's own wait for an event holds the GIL and has no deadline, so events are polled.

    Paddle waits on the host when an event is destroyed. The base therefore reuses events, and only those that have
    passed; the effect on a wait that is still queued is the vendor's responsibility. There is no locked memory.
    """

    def __init__(self, place: Any) -> None:  # noqa: ANN401 (a Paddle CustomPlace)
        core = paddle_core()
        self._place, self._new_event, self._new_stream = place, core.CustomDeviceEvent, core.CustomDeviceStream

    def stream_create(self) -> RawStream:
        return self._new_stream(self._place)

    def stream_handle(self, stream: RawStream) -> int:
        return int(stream.raw_stream)

    def stream_wait(self, stream: RawStream, event: RawEvent) -> None:
        stream.wait_event(event)

    def event_create(self) -> RawEvent:
        return self._new_event(self._place)

    def event_record(self, event: RawEvent, stream: RawStream) -> None:
        event.record(stream)

    def event_query(self, event: RawEvent) -> bool:
        return bool(event.query())

    def spoils(self, error: Exception) -> bool:
        """Return False: Paddle's errors do not distinguish a lost group, after which the device continues, from a
        fault."""
        return False
