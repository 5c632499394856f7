"""An asynchronous device that is reached through a Paddle CustomDevice: a fenced host ring, events, a copy stream.

What Paddle 3.0 to 3.3 does on any CustomDevice decides the shape of this file (measured on the simulated one): a
non-blocking ``copy_`` goes to the *current* stream, does not keep its host source alive, and is safe for contiguous
destinations only; destroying an event waits for it on the host; pinned memory does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidValue
from ..tickets import Ticket
from ..transfers import CopyTicket
from .between import elements_of, gather
from .copies import PaddleCopy, UnderWay
from .device import PaddleDevice
from .memory import Bytes, PaddleMemory, Tensor, host_tensor
from .places import paddle_core
from .streams import EventPool, PaddleEvent, PaddleStream, PaddleTicket, current

if TYPE_CHECKING:
    from ..capabilities import Capabilities
    from ..device import Stream
    from ..layout import ByteRange
    from ..views import Memory, View

Hold = Callable[[int], AbstractContextManager[Any]]
"""Keeps the stream with this handle from executing."""


class AsyncPaddleDevice(PaddleDevice):
    """One place of a CustomDevice. ``hold`` is given where streams can be held (the simulated accelerator)."""

    blocking = False

    def __init__(
        self,
        index: int,
        place: Any,  # noqa: ANN401 (a Paddle CustomPlace)
        options: Mapping[str, object],
        capabilities: Capabilities,
        hold: Hold | None = None,
    ) -> None:
        core = paddle_core()
        self.kind = str(place.get_device_type())
        self.events = EventPool(place)
        self.under_way = UnderWay()
        self._hold = hold
        self._wrapped: dict[int, PaddleStream] = {}
        self._new_base = core.CustomDeviceStream
        self._current_base = core._get_current_custom_device_stream
        super().__init__(index, place, options, capabilities)
        self.copies = self._new_stream()

    # -- streams ------------------------------------------------------------------------------------------------------

    def _new_stream(self) -> PaddleStream:
        return PaddleStream(self.events, self._new_base(self.place))

    def stream(self) -> Stream:
        """A new stream."""
        return self._new_stream()

    @property
    def default_stream(self) -> Stream:
        """The stream on which Paddle computes now."""
        base = self._current_base(self.kind, self.index)
        return self._wrapped.setdefault(int(base.raw_stream), PaddleStream(self.events, base))

    def own(self, stream: Any) -> PaddleStream:  # noqa: ANN401 (ours, or a Paddle stream)
        """The stream as one of ours."""
        if type(stream) is PaddleStream:
            return stream
        base = getattr(stream, "stream_base", stream)
        if not hasattr(base, "raw_stream"):
            raise InvalidValue(
                f"{type(stream).__name__} is no stream of this device",
                cure="give device.default_stream, device.stream() or a Paddle stream",
                argument="stream",
            )
        return PaddleStream(self.events, base)

    def current(self, stream: Stream) -> AbstractContextManager[None]:
        """Let Paddle put its work on ``stream``."""
        return current(self.kind, self.index, self.own(stream))

    @contextmanager
    def hold(self, stream: Stream) -> Iterator[None]:
        """Hold a stream, where the runtime below can. Something is left on it, so that later events are not done."""
        if self._hold is None:
            with super().hold(stream):
                yield
            return
        own = self.own(stream)
        with self._hold(own.handle):
            marker = PaddleMemory.allocate(self, self.place, 16)
            with self.current(own):
                marker.bytes(8, 8).copy_(marker.bytes(0, 8), False)
            self.under_way.add(marker, self.events.record(own.base), marker)
            yield

    # -- work ---------------------------------------------------------------------------------------------------------

    def before_write(self, memory: PaddleMemory, stream: Stream) -> None:
        """Writes wait on their stream for copies out that still read the memory."""
        self.under_way.order(memory, self.own(stream))

    def after_work(self, stream: Stream, keep: object) -> tuple[PaddleEvent, Ticket]:
        """An event, which keeps the memory alive until the device is done with it."""
        event = self.events.record(self.own(stream).base)
        event.keep = keep
        return event, PaddleTicket(event)

    def read_now(self, source: Tensor, target: Bytes, stream: Stream) -> None:
        """Copy a contiguous tensor to the host, after the work on ``stream``, and wait for it alone."""
        self.count("copies_out")
        self.count("host_waits")
        with self.current(stream):
            host_tensor(target).copy_(source, False)
        self.events.record(self.own(stream).base).wait()

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy on the copy stream, after an event on ``stream``, which does not wait."""
        self.check_open()
        assert isinstance(memory, PaddleMemory)
        found = [np.empty(part.nbytes, np.uint8) for part in parts]
        before = self.events.record(self.own(stream).base)
        self.copies.wait(before)
        with self.current(self.copies):
            for part, data in zip(parts, found, strict=True):
                if part.nbytes:
                    host_tensor(data).copy_(memory.bytes(part.offset, part.nbytes), False)
        self.count("copies_out", len(parts))
        event = self.events.record(self.copies.base)
        self.under_way.add(memory, event, (found, before))
        return PaddleCopy(event, found)

    def copy_within(self, target: View, value: View, stream: Stream) -> Ticket:
        """Copy between two views in stream order; by way of the host only where no scatter of that width exists."""
        scatter = self.scatters.get(target.dtype.itemsize)
        if scatter is None:
            return super().copy_within(target, value, stream)
        memory = target.memory
        assert isinstance(memory, PaddleMemory)
        with self.current(stream):
            gathered = gather(value, scatter.dtype)
        self.count("launches")
        self.count("submissions")
        self.count("allocations")
        event = self.events.record(self.own(stream).base)
        event.keep = (value.memory, gathered)
        return self.writer.place(memory, elements_of(target, value), gathered, target.dtype.itemsize, stream)

    def close(self) -> None:
        """Wait for the copies under way and the staging ring."""
        if not self._closed:
            self.under_way.close(self.staging.deadline)
        super().close()
