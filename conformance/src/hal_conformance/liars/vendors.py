"""Liars that vendors of real runtimes wrote without knowing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.contract.markers import hookimpl
from hal_core.devices.base import plan_value
from hal_core.errors import InvalidValue
from hal_core.memory.plan import WRITE, WritePlan
from hal_core.memory.views import ByteRange

from . import Lie, Patch, liar

if TYPE_CHECKING:
    from hal_core.contract.device import Device
    from hal_core.memory.views import View
    from hal_core.slots.state import SlotState
    from hal_core.slots.tasks import TaskBatch
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket

HELD = ("async_h2d", "can_hold_stream")
EVENTS = ("can_hold_stream", "async_d2h")


@liar(1, "events of another opened device are refused", requires=EVENTS)
class RefusesOthersEvents(Patch):
    """Each opened device has a context of its own."""

    seam = "wait of a stream"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Refuse what another device made."""

        def wait(stream: Any, event: Any) -> None:  # noqa: ANN401 (the base's)
            if getattr(event, "pool", None) is not stream.pool:
                raise InvalidValue("the event is of another context", cure="use one device", argument="event")
            true(stream, event)

        return wait


@liar(1, "events of another opened device are not waited for", requires=EVENTS)
class IgnoresOthersEvents(Patch):
    """A handle unknown in this context is taken to have passed."""

    seam = "wait of a stream"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Wait for our own alone."""
        return lambda stream, event: true(stream, event) if event.pool is stream.pool else None


class ReadsAtTheCall(Lie):
    """Base: what lies beside a target is read when the call is made, and written back with it. No value bypasses it."""

    def submit_value(self, target: View, value: Any, stream: Stream) -> Ticket:  # noqa: ANN401 (host values)
        """By a plan, always."""
        return self.submit(plan_value(target, value), stream)

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Write what covers the plan's runs, as it is now, with the plan laid over it."""
        device: Any = self
        if plan.records is not None or plan.empty or plan.memory.nbytes > 1 << 16:
            return super().submit(plan, stream)  # type: ignore[misc,no-any-return]
        copied = device.copy_out(plan.memory, [ByteRange(0, plan.memory.nbytes)], device.stream())
        copied.wait()
        now = np.array(copied.data[0], np.uint8)
        return super().submit(self.covering(plan, now), stream)  # type: ignore[misc,no-any-return]

    def covering(self, plan: WritePlan, now: np.ndarray[Any, Any]) -> WritePlan:
        """The plan of the writes."""
        from hal_core.memory.plan import apply_to_host

        spans = self.spans(plan)
        apply_to_host(plan, now)
        rows, at = np.zeros(len(spans), WRITE), 0
        for row, (low, high) in zip(rows, spans, strict=True):
            row["dst"], row["source"], row["nbytes"] = low, at, high - low
            at += high - low
        return WritePlan(plan.memory, rows, [b"".join(now[low:high].tobytes() for low, high in spans)])

    def spans(self, plan: WritePlan) -> list[tuple[int, int]]:
        """The byte ranges that are written, apart and in order."""
        raise NotImplementedError


@liar(5, "narrow writes read their words at the call and write them back later", requires=HELD)
class WordsReadAtTheCall(ReadsAtTheCall):
    """No store of a byte: the word around it is read by the host."""

    def spans(self, plan: WritePlan) -> list[tuple[int, int]]:
        """The words of 8 bytes that are touched."""
        words: set[int] = set()
        for row in plan.writes.tolist():
            words.update(range(row[0] // 8, (row[0] + row[2] - 1) // 8 + 1))
        return [(8 * word, min(8 * word + 8, plan.memory.nbytes)) for word in sorted(words)]


@liar(5, "a strided write takes what lies between its elements along", requires=HELD)
class GapsReadAtTheCall(ReadsAtTheCall):
    """One copy from the first byte to the last."""

    def spans(self, plan: WritePlan) -> list[tuple[int, int]]:
        """All from the first to the last."""
        ends = plan.writes["dst"] + plan.writes["nbytes"]
        return [(int(plan.writes["dst"].min()), int(ends.max()))]


class OtherHostMemory(Lie):
    """Base: ``allocate_host`` of the primitives gives something else."""

    @property
    def primitives(self) -> Any:  # noqa: ANN401 (the object in front of the vendor's)
        """The primitives, with another ``allocate_host``."""
        return _Before(self.__dict__["primitives"], self.given)

    @primitives.setter
    def primitives(self, found: object) -> None:
        self.__dict__["primitives"] = found

    @staticmethod
    def given(address: int, nbytes: int) -> int | None:
        """The substitute of a block."""
        raise NotImplementedError


class _Before:
    """Primitives, but for ``allocate_host`` and ``free_host``."""

    def __init__(self, true: Any, given: Callable[[int, int], int | None]) -> None:  # noqa: ANN401 (the vendor's)
        self._true, self._given = true, given

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (the vendor's)
        return getattr(self._true, name)

    def allocate_host(self, nbytes: int) -> int | None:
        """Something else than the runtime's block, which is lost."""
        return self._given(self._true.allocate_host(nbytes), nbytes)

    def free_host(self, address: int) -> None:
        """Free no block: some blocks are not the runtime's."""


@liar(7, "pinned_host is claimed, and the runtime gives no locked memory", requires=("pinned_host", "primitives"))
class PinnedInName(OtherHostMemory):
    """The capability was copied from another plugin."""

    @staticmethod
    def given(address: int, nbytes: int) -> int | None:
        """None."""
        return None


@liar(7, "locked memory is aligned to 16 bytes", requires=("pinned_host", "primitives"))
class PinnedByMalloc(OtherHostMemory):
    """A C library's block, locked afterwards."""

    @staticmethod
    def given(address: int, nbytes: int) -> int | None:
        """Not where a page or a line begins."""
        return address + 16


PAGEABLE: list[np.ndarray[Any, Any]] = []
"""Blocks that liars gave; they live as long as the process."""


def pageable(nbytes: int) -> int:
    """Return the address of aligned host memory that no runtime has locked."""
    PAGEABLE.append(block := np.empty(nbytes + 4096, np.uint8))
    return -(-block.ctypes.data // 4096) * 4096


@liar(7, "pinned_host is claimed, and the memory is aligned and pageable", requires=("pinned_host", "is_locked"))
class PinnedByAlignment(OtherHostMemory):
    """posix_memalign is all that allocate_host() does."""

    @staticmethod
    def given(address: int, nbytes: int) -> int | None:
        """A block of a C library's."""
        return pageable(nbytes)


@liar(7, "where locked memory is short, large blocks are pageable", requires=("pinned_host", "is_locked"))
class PinnedIfSmall(OtherHostMemory):
    """A silent way out of the runtime's limit."""

    @staticmethod
    def given(address: int, nbytes: int) -> int | None:
        """The runtime's for small blocks alone."""
        return address if nbytes < 1 << 16 else pageable(nbytes)


@liar(
    10, "copies between two views are not counted", requires=("probe_counts", "native_objects")
)  # where such copies are launches
class CopiesWithinUncounted(Lie):
    """A launch of the vendor's own kernel, past the base's count."""

    def copy_within(self, target: View, value: View, stream: Stream) -> Ticket:
        """Take the counts back."""
        device: Any = self
        before = dict(device._counts)
        ticket = super().copy_within(target, value, stream)  # type: ignore[misc]
        device._counts.update({name: before.get(name, 0) for name in ("launches", "submissions")})
        return ticket  # type: ignore[no-any-return]


@liar(10, "a strided value counts one submission more than it makes", requires="probe_counts")
class StridedCountedTwice(Lie):
    """The vendor counts, and so does the base."""

    def submit_value(self, target: View, value: Any, stream: Stream) -> Ticket:  # noqa: ANN401 (host values)
        """Count again."""
        device: Any = self
        if target.collapsed()[0]:
            device.count("launches")
            device.count("submissions")
        return super().submit_value(target, value, stream)  # type: ignore[misc,no-any-return]


class KeptFields(Lie):
    """Base: an insertion leaves fields of the former request in its slots."""

    kept: tuple[str, ...] = ()

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Restore the former bytes."""
        me: Any = self
        whole = [ByteRange(view.offset, view.memory.nbytes - view.offset) for view in map(state.view, self.kept)]
        copied = me.copy_out(state.memory, whole, stream)
        copied.wait()
        ticket = super().insert_tasks(device, state, tasks, stream)  # type: ignore[misc]
        for name, data in zip(self.kept, copied.data, strict=True):
            view = state.view(name)
            values = np.ndarray(view.shape, view.dtype.storage, np.array(data), 0, view.strides)
            ticket = me.submit(plan_value(view, np.ascontiguousarray(values)), stream)
        return ticket  # type: ignore[no-any-return]


@liar(11, "a stop reason survives its slot")
class StopReasonSurvives(KeptFields):
    """The insertion kernel's list of fields has not this one."""

    kept = ("stop_reason",)


@liar(11, "the count of accepted tokens survives its slot")
class AcceptNumSurvives(KeptFields):
    """The same of another field."""

    kept = ("accept_num",)


@liar(26, "each plan leaves an event of the driver", requires="native_objects")
class LeaksEvents(Lie):
    """Recorded for a purpose that is gone."""

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Record one, and forget it."""
        device: Any = self
        ticket = super().submit(plan, stream)  # type: ignore[misc]
        event = device.primitives.event_create()
        device.primitives.event_record(event, device.own(stream).raw)
        return ticket  # type: ignore[no-any-return]


@liar(26, "each copy within the device leaves its temporary", requires="native_objects")
class LeaksTemporaries(Lie):
    """Leaked memory between source and target."""

    def copy_within(self, target: View, value: View, stream: Stream) -> Ticket:
        """Allocate, and forget it."""
        device: Any = self
        device.primitives.allocate(64)
        return super().copy_within(target, value, stream)  # type: ignore[misc,no-any-return]
