"""Liars in the staging ring under pressure: fences of spans, waits of a full ring, and the state after a refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from hal_core.contract.markers import hookimpl
from hal_core.devices.sync import PASSED
from hal_core.errors import OutOfMemory
from hal_core.memory.views import View
from hal_core.tickets import Ticket

from . import Lie, liar
from .proxies import RING, ProxyEvent

if TYPE_CHECKING:
    from hal_core.contract.counters import Counters
    from hal_core.contract.device import Device
    from hal_core.devices.staging import Span
    from hal_core.memory.values import Value
    from hal_core.streams import Event, Stream

LARGE = 64 << 10
"""Bytes from which a span is large."""


class Ringing(Lie):
    """Base of liars whose ring lies: ``ring`` is laid over the device's ring ``staging``."""

    ring: ClassVar[type[Ring]]

    @property
    def staging(self) -> Any:  # noqa: ANN401 (the device's ring)
        """The ring, made a liar on first use."""
        true: Any = self.__dict__["staging"] if "staging" in self.__dict__ else super().staging  # type: ignore[misc]
        if not isinstance(true, self.ring):
            true.__class__ = type(f"{type(self).__name__}Ring", (self.ring, type(true)), {})
            true.device = self
        return true


class Ring:
    """Base of lies about the ring: a mixin over its ``take`` and ``fence``."""

    device: Any

    def take(self, nbytes: int) -> Span:
        """Take from the honest ring."""
        return super().take(nbytes)  # type: ignore[misc,no-any-return]

    def fence(self, span: Span, event: Event) -> None:
        """Fence in the honest ring."""
        super().fence(span, event)  # type: ignore[misc]


class _Neighbours(Ring):
    last: Event = PASSED

    def fence(self, span: Span, event: Event) -> None:
        before, self.last = self.last, event
        super().fence(span, before)


@liar(2, "a span is fenced by the event of the span before it", requires=RING)
class NeighboursFence(Ringing):
    """An off-by-one in the table of events."""

    ring = _Neighbours


class _DefaultFence(Ring):
    def fence(self, span: Span, event: Event) -> None:
        super().fence(span, self.device.default_stream.record())


@liar(2, "spans are fenced by events of the default stream, whatever stream reads them", requires=RING)
class FenceOfTheDefaultStream(Ringing):
    """Right as long as there is only one stream."""

    ring = _DefaultFence


class _CountedFence(ProxyEvent):
    def __init__(self, true: Event, ring: _Depth) -> None:
        super().__init__(true)
        self.ring, self.number = ring, ring.number

    def done(self) -> bool:
        return self.ring.number - self.number >= 8 or super().done()

    def wait(self, timeout: float | None = None) -> bool:
        return self.ring.number - self.number >= 8 or super().wait(timeout)


class _Depth(Ring):
    number = 0

    def fence(self, span: Span, event: Event) -> None:
        self.number += 1
        super().fence(span, _CountedFence(event, self))


@liar(2, "a span is reused after eight other ones: depth is the guard", requires=RING, seen="vLLM 24527, 25279, 28706")
class DepthIsTheGuard(Ringing):
    """A limit of eight steps in flight, taken for granted."""

    ring = _Depth


class _ForgettableFence(ProxyEvent):
    forgotten = False

    def done(self) -> bool:
        return self.forgotten or super().done()

    def wait(self, timeout: float | None = None) -> bool:
        return self.forgotten or super().wait(timeout)


class _Wraps(Ring):
    end = 0

    def take(self, nbytes: int) -> Span:
        ring: Any = self
        room = ring.limit - ring.held
        if self.end + nbytes > ring.held and room < max(nbytes, ring.held):
            for fence in self.__dict__.pop("fences", ()):
                fence.forgotten = True
        span = super().take(nbytes)
        self.end = span.begin + -(-max(nbytes, 1) // 256) * 256
        return span

    def fence(self, span: Span, event: Event) -> None:
        fence = _ForgettableFence(event)
        self.__dict__.setdefault("fences", []).append(fence)
        super().fence(span, fence)


@liar(2, "at the end of the ring the next span begins at its start, without checking the spans there", requires=RING)
class WrapsWithoutLooking(Ringing):
    """A comparison of head and tail that ignores the wrap."""

    ring = _Wraps


class _Frees(Ring):
    def fence(self, span: Span, event: Event) -> None:
        super().fence(span, event)
        if span.nbytes >= LARGE and not event.done():
            span.buffer[...] = 0xDD


@liar(
    2,
    "the source of a large upload is freed when the call returns",
    requires=RING,
    seen="Paddle: sources not kept alive",
)
class LargeSourceFreed(Ringing):
    """A large block outside the pool, without a fence."""

    ring = _Frees


class _NewestFence(ProxyEvent):
    def __init__(self, true: Event, ring: _Newest) -> None:
        super().__init__(true)
        self.ring = ring

    def wait(self, timeout: float | None = None) -> bool:
        return self.ring.newest.wait(timeout)


class _Newest(Ring):
    newest: Event = PASSED

    def fence(self, span: Span, event: Event) -> None:
        self.newest = event
        super().fence(span, _NewestFence(event, self))


@liar(3, "a full ring waits for its newest entry, not for the oldest", requires=RING)
class NewestIsWaitedFor(Ringing):
    """A wait for work that was queued on another stream much later."""

    ring = _Newest


class _MillisecondFence(ProxyEvent):
    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(None if timeout is None else timeout / 1000)


class _Milliseconds(Ring):
    def fence(self, span: Span, event: Event) -> None:
        super().fence(span, _MillisecondFence(event))


@liar(3, "the deadline of a full ring is taken for milliseconds", requires=RING)
class DeadlineInMilliseconds(Ringing):
    """An error after a thousandth of the deadline."""

    ring = _Milliseconds


class _Jams(Ring):
    jammed: OutOfMemory | None = None

    def take(self, nbytes: int) -> Span:
        if self.jammed is not None:
            raise OutOfMemory(self.jammed.what, cure=self.jammed.cure, argument="ring")
        try:
            return super().take(nbytes)
        except OutOfMemory as error:
            self.jammed = error
            raise


@liar(3, "a ring that was full once refuses everything from then on", requires=RING)
class JammedAfterRefusal(Ringing):
    """An error state that is never left."""

    ring = _Jams


@liar(3, "waits for a full ring are not counted", requires=RING)
class RingWaitsUncounted(Lie):
    """Waits that are not counted."""

    def counters(self) -> Counters:
        """Return the counts without the waits."""
        true: Counters = super().counters()  # type: ignore[misc]
        return replace(true, ring_waits=0, host_waits=true.host_waits - true.ring_waits)


@liar(3, "a value goes in pieces, and those before the refused one are queued", requires=RING)
class PiecesHalfQueued(Lie):
    """Pieces that take spans one by one."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write contiguous targets in pieces of 4 KiB."""
        shape, _, run = target.collapsed()
        count = 4096 // target.dtype.itemsize
        whole = super().async_set_value  # type: ignore[misc]
        if shape or run <= 4096 or not isinstance(value, np.ndarray):
            return whole(device, target, value, stream)  # type: ignore[no-any-return]
        flat = value.reshape(-1)
        for at in range(0, target.size, count):
            some, begin = flat[at : at + count], target.offset + at * target.dtype.itemsize
            piece = View.contiguous(target.memory, begin, some.shape, target.dtype, target.owner)
            ticket = whole(device, piece, some, stream)
        return ticket  # type: ignore[no-any-return]


@liar(3, "a value above the ring waits until its stream is idle", requires=(*RING, "fused_scatter"))
class LargeValuesWaitForTheirStream(Lie):
    """Pieces that go through the ring in the stream's own order."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Wait, and raise after the deadline."""
        ring: Any = device.staging  # type: ignore[attr-defined]
        if isinstance(value, np.ndarray) and value.nbytes > ring.limit and not stream.record().wait(ring.deadline):
            raise OutOfMemory("the stream is busy", cure="let it go on", argument="ring")
        return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]
