"""Liars about copies out and tickets: the data of a done ticket, its lifetime, and the effect of waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.contract.markers import hookimpl
from hal_core.memory.copies import Bytes, CopyTicket, HostCopy
from hal_core.memory.views import ByteRange
from hal_core.runtime.policy import Policy
from hal_core.tickets import DONE, Ticket

from . import Lie, liar
from .proxies import HELD_COPIES, Proxy, given

if TYPE_CHECKING:
    from hal_core.contract.device import Device, Hooks
    from hal_core.memory.plan import WritePlan
    from hal_core.memory.values import Value
    from hal_core.memory.views import Memory, View
    from hal_core.output.sinks import Sink
    from hal_core.slots.state import SlotState
    from hal_core.slots.step import Step
    from hal_core.streams import Stream

PIECE = 256 << 10
"""Bytes of a copy that are copied at once."""


class Fronts(Lie):
    """Base of liars whose tickets of copies lie; with ``writes``, those of writes too."""

    proxy: type[Proxy]
    writes = False

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Return a proxy over the ticket."""
        copied = super().copy_out(memory, parts, stream)  # type: ignore[misc]
        return self.proxy(copied, [part.nbytes for part in parts])

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Do the same if writes lie too."""
        return self._fronted(super().submit(plan, stream))  # type: ignore[misc]

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Do the same if writes lie too."""
        return self._fronted(super().async_set_value(device, target, value, stream))  # type: ignore[misc]

    def _fronted(self, ticket: Ticket) -> Ticket:
        return self.proxy(ticket) if self.writes and ticket is not DONE else ticket


class _Done(Proxy):
    __slots__ = ()

    def done(self) -> bool:
        return True

    def _block(self, timeout: float | None) -> bool:
        return True


@liar(1, "a copy out says done while the stream it follows is held", requires=HELD_COPIES, seen="FastDeploy 7221")
class CopyDoneEarly(Fronts):
    """A query of the copy engine, which has no work yet."""

    proxy = _Done


class _Quiet(Proxy):
    __slots__ = ()

    def _block(self, timeout: float | None) -> bool:
        super()._block(timeout)
        return True


@liar(1, "the wait for a copy returns after its time-out as if the copy were there", requires=HELD_COPIES)
class TimeoutReturnsQuietly(Fronts):
    """An unchecked result of the driver's wait."""

    proxy = _Quiet


class _Milliseconds(Proxy):
    __slots__ = ()

    def _block(self, timeout: float | None) -> bool:
        return super()._block(None if timeout is None else timeout / 1000)


@liar(1, "time-outs of tickets are taken for milliseconds", requires=HELD_COPIES)
class TimeoutsInMilliseconds(Fronts):
    """A driver call whose timeout is in milliseconds."""

    proxy, writes = _Milliseconds, True


class _ZeroIsNone(Proxy):
    __slots__ = ()

    def _block(self, timeout: float | None) -> bool:
        return super()._block(timeout or None)


@liar(1, "wait(0) waits for ever", requires=HELD_COPIES)
class ZeroMeansForEver(Fronts):
    """``if timeout:`` instead of ``if timeout is not None:``."""

    proxy, writes = _ZeroIsNone, True


class _OneWaiter(Proxy):
    __slots__ = ("waiting",)

    def __init__(self, inner: Ticket, nbytes: Sequence[int] = ()) -> None:
        super().__init__(inner, nbytes)
        self.waiting = threading.Lock()

    def _block(self, timeout: float | None) -> bool:
        if not self.waiting.acquire(blocking=False):
            return True
        try:
            return super()._block(timeout)
        finally:
            self.waiting.release()


@liar(1, "a thread that waits while another does is told done at once", requires=HELD_COPIES)
class SecondWaiterIsToldDone(Fronts):
    """A wait that returns at once if another thread is waiting."""

    proxy, writes = _OneWaiter, True


class _Shared(Proxy):
    __slots__ = ("buffers", "moved")

    def __init__(self, inner: Ticket, nbytes: Sequence[int], buffers: list[Bytes]) -> None:
        super().__init__(inner, nbytes)
        self.buffers, self.moved = buffers, False

    @property
    def data(self) -> Sequence[Bytes]:
        if not self.moved:
            self.moved = True
            for buffer, part in zip(self.buffers, super().data, strict=True):
                buffer[...] = part
        return self.buffers


@liar(22, "the arrays of a copy are those of the fourth copy before it")
class FourBuffersInTurn(Lie):
    """Four buffers, as at most two steps should be in flight."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Use the buffers in turn, separately for each size."""
        sizes = tuple(part.nbytes for part in parts)
        copied = super().copy_out(memory, parts, stream)  # type: ignore[misc]
        pools = self.__dict__.setdefault("pools", {})
        pool = pools.setdefault(sizes, [])
        if len(pool) < 4:
            pool.append([np.zeros(size, np.uint8) for size in sizes])
        else:
            pool.append(pool.pop(0))
        return _Shared(copied, sizes, pool[-1])


@liar(22, "a copy out is a view of the memory it should have been copied from", requires="not async_d2h")
class CopyIsAView(Lie):
    """No copy, as the memory is on the host anyway."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Return slices of the memory."""
        whole: Any = getattr(memory, "host_bytes", None)
        if whole is None:
            return super().copy_out(memory, parts, stream)  # type: ignore[misc,no-any-return]
        return HostCopy([np.frombuffer(whole, np.uint8)[part.offset : part.end] for part in parts])


class _InPieces(Proxy):
    __slots__ = ("heads", "rest", "tails")

    def __init__(self, inner: Ticket, parts: Sequence[ByteRange], rest: Callable[[], CopyTicket]) -> None:
        super().__init__(inner, [min(part.nbytes, PIECE) for part in parts])
        self.rest = rest
        self.tails: list[Bytes] | None = None

    @property
    def data(self) -> Sequence[Bytes]:
        if self.tails is None:
            copied = self.rest()
            copied.wait()
            self.tails = [np.concatenate(pair) for pair in zip(super().data, copied.data, strict=True)]
        return self.tails


@liar(1, "a large copy out is made piece by piece, and all but the first when somebody looks")
class LargeCopiesInPieces(Lie):
    """A bounce buffer of 256 KiB; the rest is fetched later."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy the first pieces now."""
        copy = super().copy_out  # type: ignore[misc]
        if max((part.nbytes for part in parts), default=0) <= PIECE:
            return copy(memory, parts, stream)  # type: ignore[no-any-return]
        heads = [ByteRange(part.offset, min(part.nbytes, PIECE)) for part in parts]
        tails = [ByteRange(head.end, part.end - head.end) for part, head in zip(parts, heads, strict=True)]
        return _InPieces(copy(memory, heads, stream), parts, lambda: copy(memory, tails, stream))


@liar(1, "the ranges of a copy come in the order of memory, not in that of the call")
class PartsInMemoryOrder(Lie):
    """Parts sorted so that neighbours can be copied at once."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Sort the parts."""
        return super().copy_out(memory, sorted(parts, key=lambda part: part.offset), stream)  # type: ignore[misc,no-any-return]


def _raise_once(ticket: Ticket, timeout: float | None = None) -> None:
    if not ticket.observed:
        Ticket.wait(ticket, timeout)


@liar(21, "the error for values out of bounds is raised only by the first wait")
class FailureToldOnce(Policy):
    """An error that is removed from the ticket when it is raised."""

    def save_output(
        self,
        device: Device,
        hooks: Hooks,
        state: SlotState,
        step: Step,
        sink: Sink,
        stream: Stream,
    ) -> Ticket:
        """Replace the ticket's wait."""
        honest = super().save_output(device, hooks, state, step, sink, stream)
        ticket: Ticket = given(honest, "wait", _raise_once)
        return ticket
