"""The device of :class:`hal_paddle.CustomDevicePlugin`: asynchronous, on a place of a CustomDevice.

Paddle 3.0 to 3.3 behaves as follows on any CustomDevice (measured on the simulated one). A non-blocking ``copy_`` goes
to the *current* stream, does not keep its host source alive, and is safe for contiguous destinations only. Destroying
an event waits for it on the host. Pinned memory does not exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any

from hal_core import Capabilities, InvalidValue, Ticket
from hal_core.devices import AsyncStream, RecordedEvent, StreamDevice

from .device_copy import by_bytes, elements_of, gather, on_elements
from .paddle_memory import Bytes, PaddleMemory, Tensor, host_tensor
from .place import PaddlePlace
from .places import custom_place, paddle_core
from .plugin import PaddlePlugin
from .stream_primitives import PaddlePrimitives

if TYPE_CHECKING:
    from hal_core import ByteRange, Stream, View
    from hal_core.devices import HostBlock, Memory

_CURRENT = RLock()
"""Held while a stream is Paddle's current one, which is the process's, not a thread's."""


class CustomDevice(PaddlePlace, StreamDevice):
    """One place of a CustomDevice, or of the simulated accelerator under its name, whose streams can be held."""

    def __init__(self, plugin: type[PaddlePlugin], index: int, options: Mapping[str, object]) -> None:
        self.name, self.kind, substitute = plugin.shown(), plugin.kind, plugin.substituted()
        module = plugin.stand_ins.get(substitute, "")
        self._simulator: Any = import_module(module) if module else None
        if module:
            import_module(f"{module}.paddle_env").announce(plugin.kind)
        capabilities = Capabilities(
            async_h2d=True,
            async_d2h=True,
            fused_scatter=False,
            pinned_host=False,
            can_hold_stream=bool(substitute),
            collective=plugin.collective,
            fallbacks={} if plugin.collective else {"broadcast_tokens": "the plugin names no collective library"},
            substituted=substitute,
        )
        place = custom_place(self.name, plugin.kind, index, plugin.cure)
        self._core = paddle_core()
        super().__init__(index, PaddlePrimitives(place))
        self.open_place(place, options, capabilities)

    # -- streams ------------------------------------------------------------------------------------------------------

    @property
    def default_stream(self) -> AsyncStream:
        """The stream on which Paddle computes now."""
        base = self._core._get_current_custom_device_stream(self.kind, self.index)
        return self.wrap(int(base.raw_stream), lambda: base)

    def foreign_stream(self, stream: Any) -> AsyncStream:  # noqa: ANN401 (a Paddle stream)
        """Return a Paddle stream, or another opened device's object for one, as one of this device.

        :raises InvalidValue: for an object that is no stream of this device.
        """
        base = getattr(stream, "stream_base", getattr(stream, "raw", stream))
        if not hasattr(base, "raw_stream"):
            raise InvalidValue(
                f"{type(stream).__name__} is not a stream of this device",
                cure="give device.default_stream, device.stream() or a Paddle stream",
                argument="stream",
            )
        return self.wrap(int(base.raw_stream), lambda: base)

    @contextmanager
    def current(self, stream: Stream) -> Iterator[None]:
        """Make Paddle queue its work for this device on ``stream``; one thread of the process at a time."""
        core, own = self._core, self.own_stream(stream)
        with _CURRENT:
            before = core._get_current_custom_device_stream(self.kind, self.index)
            if int(before.raw_stream) == own.handle:
                yield
                return
            core._set_current_custom_device_stream(self.kind, self.index, own.raw)
            try:
                yield
            finally:
                core._set_current_custom_device_stream(self.kind, self.index, before)

    @contextmanager
    def hold_stream(self, stream: Stream) -> Iterator[None]:
        """Hold a stream, if the runtime below can. Some work is left on it, so that later events are not done."""
        if self._simulator is None:
            with super().hold_stream(stream):
                yield
            return
        own = self.own_stream(stream)
        with self._simulator.Stream.adopt(own.handle).held():
            marker = PaddleMemory.allocate(self, self.place, 16)
            with self.current(own):
                marker.bytes(8, 8).copy_(marker.bytes(0, 8), False)
            self.retired.keep((self.mark(own),), marker)
            yield

    # -- work ---------------------------------------------------------------------------------------------------------

    def before_write(self, memory: Memory, stream: Stream) -> None:
        """Make writes wait on their stream for copies out that still read the memory."""
        self.order_after_reads(stream, memory)

    def after_work(self, stream: Stream, keep: object) -> tuple[RecordedEvent, Ticket]:
        """Return an event, which keeps the memory alive until the device is done with it, and its ticket. The event
        must be kept."""
        event = self.mark(self.own_stream(stream))
        event.keep = keep
        return event, self.ticket_type(event)

    def read_now(self, source: Tensor, target: Bytes, stream: Stream) -> None:
        """Copy a contiguous tensor to the host, after the work on ``stream``, and wait only for it."""
        self.count("copies_out")
        self.count("host_waits")
        with self.current(stream):
            host_tensor(target).copy_(source, False)
        self.events.record(self.own_stream(stream)).wait()

    def enqueue_copies(
        self, block: HostBlock, memory: Memory, parts: Sequence[ByteRange], after: AsyncStream, stream: AsyncStream
    ) -> RecordedEvent:
        """Queue one copy for each part, into a block that Paddle does not keep alive."""
        assert isinstance(memory, PaddleMemory)
        before = self.events.record(after)
        stream.wait(before)
        at = 0
        with self.current(stream):
            for part in parts:
                if part.nbytes:
                    target = host_tensor(block.buffer[at : at + part.nbytes])
                    target.copy_(memory.bytes(part.offset, part.nbytes), False)
                    self.count("copies_out")
                at += part.nbytes
        event = self.mark(stream)
        event.keep = (memory, before)
        return event

    def copy_within(self, target: View, value: View, stream: Stream) -> Ticket:
        """Copy between two views in stream order; through the host only if no scatter of that width exists."""
        if not (on_elements(target) and on_elements(value)):
            target, value = by_bytes(target), by_bytes(value)
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
        self.retired.look()
        try:
            return self.writer.place(memory, elements_of(target, value), gathered, target.dtype.itemsize, stream)
        finally:  # the ring may refuse the rest
            self.retired.keep((self.mark(self.own_stream(stream)),), (value.memory, gathered))
