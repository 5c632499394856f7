"""Liars of the fifth and sixth set, by hands that had seen no test: those that no test of that time found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from hal_core import DONE, hookimpl
from hal_core.devices.cpu.device import host_view
from hal_core.devices.retired_memory import Free, Retired
from hal_core.devices.staging import Segment, StagingRing
from hal_core.devices.tickets import AsyncCopy, Bytes
from hal_core.errors import OutOfMemory
from hal_core.runtime.policy import Policy

from . import Lie, Patch, liar
from .proxies import HELD, RING

BELOW = (*HELD, "primitives")
COPIES = ("async_d2h", "can_hold_stream", "primitives")
READERS = (*HELD, "async_update")


class RetiredByOneStream(Retired):
    """Dropped memory that waits for the work of one stream."""

    main = 0

    def add(self, events: Iterable[Any], free: Free) -> None:
        """Leave out the events of other streams."""
        super().add([event for event in events if event.stream_key == self.main], free)


@liar(2, "memory of a dropped value is freed once the default stream's work is done", requires=BELOW)
class FreesByTheDefaultStream(Lie):
    """Another stream may still read it."""

    def laid(self) -> None:
        """Look at the events of one stream."""
        device: Any = self
        device.retired.__class__ = RetiredByOneStream
        device.retired.main = device.own(device.default_stream).stream_key


@liar(3, "a value above the limit waits for the default stream", requires=(*RING, "primitives"))
class LimitAsksDefaultStream(Lie):
    """A held stream beside it takes any amount."""

    def require_moving(self, nbytes: int, stream: object) -> None:
        """Ask the wrong stream."""
        device: Any = self
        super().require_moving(nbytes, device.own(device.default_stream))  # type: ignore[misc]


class GivesUp(StagingRing):
    """A ring that forgets its fences when it has met its deadline."""

    def _await(self, segment: Segment) -> None:
        try:
            super()._await(segment)
        except OutOfMemory:
            segment.entries.clear()  # "the device has stopped"
            raise


@liar(3, "when a full ring meets its deadline, its fences are dropped", requires=(*RING, "primitives"))
class DropsFencesAtTheDeadline(Lie):
    """The next write takes spans that are still to be read."""

    def laid(self) -> None:
        """Give the device that ring."""
        device: Any = self
        device.staging.__class__ = GivesUp


@liar(5, "only a stride of 0 counts as overlapping", requires=("tensors", "not async_h2d"))
class WindowsAreWritten(Lie):
    """A tensor of sliding windows is written."""

    def resolve(self, target: Any) -> Any:  # noqa: ANN401
        """Take a view's elements for apart."""
        view: Any = super().resolve(target)  # type: ignore[misc]
        if all(step for step, count in zip(view.strides, view.shape, strict=True) if count > 1):
            view._apart = True
        return view


@liar(5, "a cache of NumPy views is keyed by offset and shape, not by strides", requires="not async_h2d")
class CachesViewsWithoutStrides(Lie):
    """A strided part of a field gets the places of a plain one."""

    def laid(self) -> None:
        """Begin without known views."""
        self.known: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    @hookimpl
    def async_set_value(self, device: Any, target: Any, value: Any, stream: Any) -> Any:  # noqa: ANN401
        """Write through a known view."""
        if target.owner is not None:
            views = self.known.setdefault(target.memory, {})
            target.host = views.setdefault((target.offset, target.shape, target.dtype), host_view(target))
        return super().async_set_value(device, target, value, stream)  # type: ignore[misc]


@liar(7, "a synchronous device postpones arrays for strided targets to its next call", requires="not async_h2d")
class PostponesStridedArrays(Lie):
    """Every call of the device catches up; what reads the memory itself does not see the value."""

    def laid(self) -> None:
        """Begin without postponed writes."""
        self.later: list[tuple[Any, Any]] = []

    def _do_later(self) -> None:
        later, self.later = self.later, []
        for target, value in later:
            host_view(target)[...] = value

    @hookimpl
    def async_set_value(self, device: Any, target: Any, value: Any, stream: Any) -> Any:  # noqa: ANN401
        """Copy the array, for later."""
        self._do_later()
        if type(value) is np.ndarray and target.collapsed()[0]:
            device._counts["fallbacks"] += 1
            self.later.append((target, value.copy()))
            return DONE
        return super().async_set_value(device, target, value, stream)  # type: ignore[misc]

    def submit_all(self, plans: Any, stream: Any) -> Any:  # noqa: ANN401
        """Catch up first."""
        self._do_later()
        return super().submit_all(plans, stream)  # type: ignore[misc]

    def copy_out(self, memory: Any, parts: Any, stream: Any) -> Any:  # noqa: ANN401
        """Catch up first."""
        self._do_later()
        return super().copy_out(memory, parts, stream)  # type: ignore[misc]

    def update_inputs(self, state: Any, step: Any, stream: Any) -> Any:  # noqa: ANN401
        """Catch up first."""
        self._do_later()
        return super().update_inputs(state, step, stream)  # type: ignore[misc]

    def close(self) -> None:
        """Catch up first."""
        self._do_later()
        super().close()  # type: ignore[misc]


class CopyWithoutLease(AsyncCopy):
    """A copy whose arrays do not keep its host block from being used again."""

    __slots__ = ()

    def ahead(self) -> Sequence[Bytes]:
        """Return arrays over the block that do not keep it."""
        if self._data is None:
            buffer = self._lease.block.buffer
            self._data = [buffer[begin : begin + nbytes] for begin, nbytes in self._places]
        return self._data


@liar(12, "the host block of a copy is used again once its ticket is dropped", requires=("async_d2h", "primitives"))
class MirrorIsUsedAgain(Lie):
    """The output of a later step, which was not taken, is then in the mirror."""

    def laid(self) -> None:
        """Make such copies."""
        device: Any = self
        device.copy_type = CopyWithoutLease


@liar(14, "an output is checked against its broadcast where its copy begins with the header")
class LogprobsAreUnchecked(Patch):
    """A copy with log-probabilities begins before it."""

    seam = "check of an output's broadcast"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Give a check to the other copies."""

        def of(state: Any, group: Any, part: Any) -> Any:  # noqa: ANN401
            return true(state, group, part) if part.offset == state.broadcast_range().offset else None

        return of


@liar(21, "that a request got a token outside the vocabulary is remembered for one more record")
class FailureIsForgotten(Patch):
    """The record after that has its tokens again."""

    seam = "build of a record"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Forget the failures before this record."""

        def build(columns: Any, snapshot: Any) -> Any:  # noqa: ANN401
            earlier = [*snapshot.failed]
            built = true(columns, snapshot)
            for slot in earlier:
                snapshot.failed.pop(slot, None)
            return built

        return build


@liar(23, "with log-probabilities the stream waits for the copy out", requires=COPIES)
class LogprobsStallStream(Lie):
    """So that the next step does not write over them; later work that does not touch them waits too."""

    @hookimpl
    def save_output(self, device: Any, state: Any, step: Any, sink: Any, stream: Any) -> Any:  # noqa: ANN401
        """Make the stream wait."""
        ticket = super().save_output(device=device, state=state, step=step, sink=sink, stream=stream)  # type: ignore[misc]
        if step.logprobs is not None:
            own = device.own(stream)
            own.wait(own.beside.record())
        return ticket


@liar(28, "a stream that has once waited for another is taken as ordered after it", requires=READERS)
class JoinedOnce(Patch):
    """It does not wait for the steps that come there later."""

    seam = "guard of slots"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Wait once for each pair of streams."""

        def wait(self: Any, slots: Any, stream: Any) -> None:  # noqa: ANN401
            joined = self.__dict__.setdefault("joined", set())
            for event, read in self._readers:
                if (slots is None or read is None or np.isin(slots, read).any()) and not event.done():
                    pair = getattr(event, "stream_key", id(event)), getattr(stream, "stream_key", id(stream))
                    if pair not in joined:
                        joined.add(pair)
                        stream.wait(event)

        return wait


@liar(28, "a write to several memories waits for the steps that read the first of them", requires=READERS)
class FirstOwnerWaits(Policy):
    """The other memories are written beside their readers."""

    def write(self, device: Any, writes: Any, stream: Any) -> Any:  # noqa: ANN401
        """Show the first owner."""
        owners = writes.owners
        writes.owners = dict([*owners.items()][:1])
        try:
            return super().write(device, writes, stream)
        finally:
            writes.owners = owners
