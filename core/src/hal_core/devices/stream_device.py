"""The base of asynchronous devices, which needs only streams, events and host memory."""

from __future__ import annotations

import os
import sys
import weakref
from abc import ABCMeta, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar

from ..errors import HalError, InvalidValue
from .base import DeviceBase, others_stream
from .blocks import HostBlock, HostBlocks, Lease
from .events import AsyncStream, EventPool, RecordedEvent
from .health import Health
from .primitives import RawStream, StreamPrimitives
from .retired_memory import Retired
from .tickets import AsyncCopy, AsyncTicket, QuietCopy, QuietTicket, ReadsInFlight

if TYPE_CHECKING:
    from ..memory.copies import CopyTicket
    from ..memory.views import ByteRange, Memory
    from ..slots.state import SlotState
    from ..streams import Stream, TimedEvent
    from .staging import StagingRing

SPARES = 4
"""Streams made with the device for copies out of the work of a framework's streams: a hook that meets such a stream
first must make none, as a driver may wait for work under way then."""
EVENTS, OUTPUTS = 64, 4
"""Events made with the device; blocks of host memory made with a state, for outputs under way at once."""
P = ParamSpec("P")
D = TypeVar("D", bound="StreamDevice")
T = TypeVar("T")


def primitive(call: Callable[Concatenate[D, P], T]) -> Callable[Concatenate[D, P], T]:
    """Decorate a call so that a closed or faulty device refuses it and its errors name the device."""

    @wraps(call)
    def checked(device: D, /, *arguments: P.args, **named: P.kwargs) -> T:
        device.check_open()
        try:
            return call(device, *arguments, **named)
        except HalError as error:
            device.health.note_reported(error)
            raise error.located(device=device.located) from error.__cause__

    return checked


_open: weakref.WeakSet[StreamDevice] = weakref.WeakSet()


class _Opening(ABCMeta):
    """Notes that a device is open once its constructor has returned, which may belong to a subclass."""

    def __call__(cls, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 (a class's own)
        device = super().__call__(*arguments, **named)
        device.opened = True
        device.make_ready()
        return device


class StreamDevice(DeviceBase, metaclass=_Opening):
    """Streams, events, tickets, copies out beside each stream, counting and closing, over a vendor's primitives.

    For devices with their own way to move bytes: a subclass writes ``allocate``, ``submit`` and :meth:`enqueue_copies`,
    and sets ``staging``. A device with addresses derives from :class:`hal_core.devices.asynchronous.AsyncDevice`, which
    implements these.

    ``last``: by ``stream_key``, the last event of the device's queued work.
    """

    staging: StagingRing
    """Fenced staging memory; the conformance kit makes it small and its deadline short (G3)."""
    raises_faults: ClassVar[bool] = False
    """True if the runtime itself raises an earlier failure at its next call, so that tickets need not be watched."""
    opened = False
    """Set when the device has been constructed: if it is dropped after that without a close, it releases its memory."""
    fault_cure: ClassVar[str] = "fix the failed work, and open the device again"

    def __init__(self, index: int, primitives: StreamPrimitives) -> None:
        super().__init__(index)
        self.located = f"{self.name}:{index}"
        self.health, self.retired = Health(self.located, self.fault_cure), Retired()
        primitives.counts, primitives.health = self._counts, self.health
        self.events = self.stream_pool = EventPool(primitives, self.health, self.retired)
        self.blocks, self.reads = HostBlocks(primitives), ReadsInFlight()
        self.last: dict[int, RecordedEvent] = {}
        self.ticket_type: type[AsyncTicket] = QuietTicket if self.raises_faults else AsyncTicket
        self.copy_type: type[AsyncCopy] = QuietCopy if self.raises_faults else AsyncCopy
        self._wrapped: dict[int, AsyncStream] = {}
        self._main: AsyncStream | None = None
        self.upload_stream = self._new_stream()  # for uploads that run beside all other work and are waited for
        self._spares = [self._new_stream() for _ in range(SPARES)]
        _open.add(self)
        give_back_dropped()

    def __del__(self) -> None:
        if self.opened and not self._closed and not self.health.forked and not sys.is_finalizing():
            _dropped.append(self)
            give_back_dropped()

    @property
    def deadline(self) -> float | None:  # type: ignore[override]  # that of its ring
        """Seconds that a call waits for the device at most; option ``deadline`` of the device."""
        return self.staging.deadline

    def make_ready(self) -> None:
        """Make what the first hooks need: a driver may let it wait for work that is under way then."""
        if type(self).default_stream is StreamDevice.default_stream:
            self._main = self.stream()
        self.events.reserve(EVENTS)

    def register_state(self, state: SlotState) -> None:
        """Make host memory for the first outputs of the state."""
        for topk in (False, True):
            self.blocks.reserve(state.output_range(topk=topk).nbytes, OUTPUTS)

    # -- streams ------------------------------------------------------------------------------------------------------

    def _new_stream(self, copy_stream: AsyncStream | None = None) -> AsyncStream:
        return AsyncStream(self.events, self.events.primitives.stream_create(), owned=True, copy_stream=copy_stream)

    def stream(self) -> AsyncStream:
        """Create a stream, with the one beside it, released when unreferenced."""
        return self._new_stream(self._new_stream())

    @property
    def default_stream(self) -> Stream:
        """hal's own stream. A device on which a framework computes returns that framework's current stream."""
        if self._main is None:
            self._main = self.stream()
        return self._main

    def own_stream(self, stream: object) -> AsyncStream:
        """Return the stream as one of this device: its own, or a usable foreign one.

        Raises :class:`InvalidValue` for a stream that another opened device made.
        """
        if type(stream) is AsyncStream:
            if stream.pool is self.events:
                return stream
            if stream.owned:
                raise others_stream()
        return self.foreign_stream(stream)

    def foreign_stream(self, stream: object) -> AsyncStream:
        """Return a foreign stream (a framework's), by :meth:`wrap`. By default there are none.

        Raises :class:`InvalidValue` for an object without a stream, or a stream of another device.
        """
        raise InvalidValue(
            f"{type(stream).__name__} is not a stream of this device", cure="use device.stream()", argument="stream"
        )

    def wrap(self, handle: int, find: Callable[[], RawStream]) -> AsyncStream:
        """Return a stream that foreign code created and owns; the same object for the same handle, found and checked
        once."""
        found = self._wrapped.get(handle)
        if found is None:
            copy_stream = self._spares.pop() if self._spares else self._new_stream()
            found = self._wrapped[handle] = AsyncStream(self.events, find(), owned=False, copy_stream=copy_stream)
        return found

    # -- work ---------------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise :class:`hal_core.errors.DeviceClosed` after :meth:`close`, after a fault, and in a fork's child."""
        if self._closed or self.health.unusable:
            super().check_open()
            self.health.check()

    def mark(self, stream: AsyncStream) -> RecordedEvent:
        """Record the event after the work just queued on ``stream``; memory dropped later waits for it."""
        event = self.last[stream.stream_key] = self.events.record(stream)
        return event

    def ticket(self, stream: AsyncStream) -> AsyncTicket:
        """Return the ticket of the work just queued on ``stream``; for the device's own kernels."""
        event = self.last[stream.stream_key] = self.events.record(stream)
        return self.ticket_type(event)

    def timed_event(self, stream: Stream) -> TimedEvent | None:
        """Return a timed event after all work that is now on ``stream``; None without ``timed_events``."""
        self.check_open()
        return self.events.record_timed(self.own_stream(stream)) if self.capabilities.timed_events else None

    def order_after_reads(self, stream: Stream, memory: Memory | None = None) -> None:
        """Make ``stream`` wait for copies out that still read ``memory`` (None: any), before kernels write there."""
        if self.reads.under_way:
            self.reads.order(memory, self.own_stream(stream))

    @abstractmethod
    def enqueue_copies(
        self, block: HostBlock, memory: Memory, parts: Sequence[ByteRange], after: AsyncStream, stream: AsyncStream
    ) -> RecordedEvent:
        """Queue copies of ``parts``, consecutive in ``block``, on ``stream``, after the work that is now on ``after``.

        Count them, and return the event after them, also recorded in :attr:`last`. If this raises, no copy to the block
        may remain queued, or :attr:`last` must have an event after it.
        """

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy on a stream beside ``stream``, after an event on it; neither it nor any other stream waits."""
        self.check_open()
        self.retired.look()
        places, at = [], 0
        for part in parts:
            places.append((at, part.nbytes))
            at += part.nbytes
        after = self.own_stream(stream)
        copies = after.copy_stream or after
        try:
            lease = Lease(self.blocks, self.blocks.take(at))
            try:
                event = lease.event = self.enqueue_copies(lease.block, memory, parts, after, copies)
            except BaseException:
                event = lease.event = self.mark(copies)  # some of them may be in flight
                raise
            finally:
                if parts and lease.event is not None:
                    self.reads.add(memory, parts, lease.event)
        except HalError as error:
            self.health.note_reported(error)
            raise error.located(device=self.located) from error.__cause__
        return self.copy_type(event, lease, places)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for queued work, at most for the ring's deadline, then release everything.

        Groups are left after that, as a running collective involves all ranks. If a group was lost, this neither waits
        nor releases memory, as work that never ends may still use it. The same holds if work does not end in time, or
        its events only fail; a fault that the runtime raises here, and no caller has seen, is raised in the end.
        Idempotent. A subclass releases its own resources in :meth:`release`.
        """
        if self._closed:
            return
        self._closed = True
        if self.health.forked:  # everything belongs to the parent
            return
        lost = any(getattr(communicator, "lost", "") for communicator in self._communicators.values())
        settled, unseen = False, None
        try:
            if not lost:
                settled, unseen = self._settled()
        finally:  # also after an interrupted wait: the group's other ranks must not wait for this one
            super().close()
            self.release(settled=settled)
        if unseen is not None:
            raise unseen.located(device=self.located) from unseen.__cause__

    def _settled(self) -> tuple[bool, HalError | None]:
        """Wait for the last work on each stream. Return False if it does not end, or its events no longer work, and the
        error that they raise, unless tickets report it or a caller has seen it."""
        try:
            return all(event.wait(self.staging.deadline) for event in self.last.values()), None
        except HalError as error:
            return False, error if self.raises_faults and not self.health.reported else None

    def release(self, *, settled: bool) -> None:
        """Release memory, events and streams. ``settled``: all work is done; otherwise memory that work may use is
        leaked."""
        if settled:
            self.last.clear()
            self.staging.close()
            self.blocks.close(self.staging.deadline)
            self._main = None
            del self.upload_stream
            self._wrapped.clear()
            self._spares.clear()
            self.retired.close(self.staging.deadline)
            self.events.close()


_dropped: deque[StreamDevice] = deque()
"""Unreferenced devices that were not closed and have work in flight."""


def give_back_dropped() -> None:
    """Close those whose work is done, without waiting; the rest are checked when a device is opened or dropped."""
    for _ in range(len(_dropped)):
        try:
            device = _dropped.popleft()
        except IndexError:  # a finalizer called this meanwhile, and took the rest
            return
        try:
            over = all(event.done() for event in device.last.values())
        except HalError:  # It is faulty, and keeps its resources until its process ends.
            continue
        if over and not device._communicators:
            device.close()
        else:
            _dropped.append(device)


def _refuse_after_fork() -> None:
    _dropped.clear()
    for device in list(_open):
        device.health.forked = device.health.unusable = True


os.register_at_fork(after_in_child=_refuse_after_fork)
