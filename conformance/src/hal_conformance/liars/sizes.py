"""Liars at the sizes of production: many slots, long rows, large values, far offsets, many requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from hal_core.contract.markers import hookimpl
from hal_core.memory.plan import WRITE, Records, WritePlan
from hal_core.memory.views import ByteRange, View
from hal_core.slots.geometry import DYNAMIC
from hal_core.slots.layout import REQUEST_ROW
from hal_core.slots.tasks import TaskKind
from hal_core.tickets import Ticket

from . import Lie, liar
from .proxies import HELD, moved, put

if TYPE_CHECKING:
    from hal_core.contract.counters import Counters
    from hal_core.contract.device import Device
    from hal_core.memory.copies import CopyTicket
    from hal_core.memory.values import Value
    from hal_core.memory.views import Memory
    from hal_core.slots.admission import AdmittedRequest
    from hal_core.slots.state import SlotState
    from hal_core.slots.tasks import TaskBatch
    from hal_core.streams import Stream

LARGE = 1 << 20
"""Bytes from which a value is large."""


class Spoils(Lie):
    """Base of liars that corrupt a plan, or the arguments of ``async_set_value``."""

    def records(self, records: Records) -> Records:
        """Return the records to write instead."""
        return records

    def target(self, target: View) -> View:
        """Return the target to write instead, with as many elements."""
        return target

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Submit the plan with corrupted records."""
        if plan.records is not None:
            plan = WritePlan(plan.memory, plan.writes, plan.pieces, self.records(plan.records))
        return super().submit(plan, stream)  # type: ignore[misc,no-any-return]

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write to the corrupted target."""
        other = self.target(target)
        if other is not target and isinstance(value, np.ndarray):
            value = value.reshape(other.shape)
        return super().async_set_value(device, other, value, stream)  # type: ignore[misc,no-any-return]


@liar(9, "slot numbers of a batch are bytes")
class SlotsInEightBits(Spoils):
    """Slot 256 is slot 0."""

    def records(self, records: Records) -> Records:
        """Truncate the numbers."""
        return replace(records, slots=records.slots & np.int32(0xFF))


@liar(9, "slot numbers are int16, and a negative one is taken for padding")
class SlotsInSixteenBits(Spoils):
    """Requests in slots from 32768 on that never arrive."""

    def records(self, records: Records) -> Records:
        """Leave out numbers that are negative as int16; the first stays, as a batch has one."""
        kept = records.slots.astype(np.int16) >= 0
        kept[0] = True
        return replace(records, slots=records.slots[kept], data=records.data[kept])


@liar(9, "a kernel of 64 threads takes 64 requests of a batch, whatever the batch")
class SixtyFourAtOnce(Spoils):
    """No loop over the rest."""

    def records(self, records: Records) -> Records:
        """Return the first 64."""
        return replace(records, slots=records.slots[:64], data=records.data[:64])


@liar(9, "the byte count of a row is 16 bits wide")
class RowsInSixteenBits(Lie):
    """A prompt of 8192 tokens has a row of no bytes, one of 8193 a row of one token."""

    inserting = False

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Insert with such a kernel."""
        self.inserting = True
        try:
            return super().insert_tasks(device, state, tasks, stream)  # type: ignore[misc,no-any-return]
        finally:
            self.inserting = False

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Truncate the counts of copies."""
        if self.inserting:
            writes = plan.writes.copy()
            writes["nbytes"] = np.where(writes["pattern"] == 0, writes["nbytes"] & 0xFFFF, writes["nbytes"])
            plan = WritePlan(plan.memory, writes[writes["nbytes"] > 0], plan.pieces, plan.records)
        return super().submit(plan, stream)  # type: ignore[misc,no-any-return]


@liar(9, "requests are staged by admission number modulo 256: one inserted late is another")
class LateAdmissionsMixedUp(Lie):
    """A full table of staged records that is overwritten."""

    @property
    def staged(self) -> tuple[list[AdmittedRequest], dict[int, int]]:
        """The requests in the order of their admission, and admission id to index in it."""
        found: tuple[list[AdmittedRequest], dict[int, int]] = self.__dict__.setdefault("_staged", ([], {}))
        return found

    def on_admit(self, state: SlotState, request: AdmittedRequest) -> None:
        """Put the request into the table."""
        super().on_admit(state, request)  # type: ignore[misc]
        order, places = self.staged
        places[request.admission_id] = len(order)
        order.append(request)

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Take each new request's record from the table."""
        order, places = self.staged
        wrong: dict[int, bytes] = {}
        for kind, slot, request in zip(tasks.plain["kinds"], tasks.plain["slots"], tasks.requests, strict=True):
            place = places.get(request.admission_id, len(order))
            newest = next((at for at in range(place % 256, len(order), 256)[::-1]), place)
            if newest > place and kind == TaskKind.PREFILL and order[newest].config_key == request.config_key:
                wrong[slot] = order[newest].packed[REQUEST_ROW.itemsize :]
        record: Mapping[str, Any] = state.layout.record_dtype.fields or {}
        self.__dict__["wrong"] = wrong, [record[name][1] for name in DYNAMIC]
        try:
            return super().insert_tasks(device, state, tasks, stream)  # type: ignore[misc,no-any-return]
        finally:
            del self.__dict__["wrong"]

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Replace by the other requests' records; values set at insertion stay."""
        wrong, dynamic = self.__dict__.get("wrong", ({}, []))
        if plan.records is not None and wrong:
            data = plan.records.data.copy()
            for row, slot in enumerate(plan.records.slots.tolist()):
                if slot in wrong:
                    kept = [(at, data[row, at : at + 4].copy()) for at in dynamic]
                    data[row] = np.frombuffer(wrong[slot], np.uint8)
                    for at, value in kept:
                        data[row, at : at + 4] = value
            plan = WritePlan(plan.memory, plan.writes, plan.pieces, replace(plan.records, data=data))
        return super().submit(plan, stream)  # type: ignore[misc,no-any-return]


@liar(5, "a large value is written in blocks of 256 bytes, and the last has no bounds check")
class TailOfTheLastBlock(Lie):
    """Values from 64 KiB on; smaller ones are written correctly."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write, and zero the rest of the last block."""
        ticket = super().async_set_value(device, target, value, stream)  # type: ignore[misc]
        end, nbytes = target.bounds()[1], target.size * target.dtype.itemsize
        rest = min(-nbytes % 256, target.memory.nbytes - end)
        if nbytes >= 64 << 10 and rest > 0:
            put(self, target.memory, [(end, bytes(rest))], stream)
        return ticket  # type: ignore[no-any-return]


@liar(5, "a strided kernel supports four axes, and treats a fifth as dense")
class FourAxesAtMost(Spoils):
    """The outermost of five axes with the stride of a contiguous array."""

    def target(self, target: View) -> View:
        """Return the target without its outermost stride."""
        shape, strides, run = target.collapsed()
        if len(shape) < 5:
            return target
        return moved(target, shape, (strides[1] * shape[1], *strides[1:]), run) or target


@liar(5, "strides are 16 bits wide")
class StridesInSixteenBits(Spoils):
    """Rows that are further apart than 64 KiB are interleaved."""

    def target(self, target: View) -> View:
        """Return the target without the upper bits of the strides."""
        shape, strides, run = target.collapsed()
        cut = tuple(step if abs(step) <= 0xFFFF else (abs(step) & 0xFFFF) * (1 if step > 0 else -1) for step in strides)
        return target if cut == strides else moved(target, shape, cut, run) or target


@liar(5, "byte offsets of targets are 32 bits wide")
class OffsetsInThirtyTwoBits(Spoils):
    """Bytes beyond 4 GiB are written at the beginning of the block."""

    def target(self, target: View) -> View:
        """Return the target without the upper bits of the offset."""
        if target.offset < 2**32:
            return target
        return View(target.memory, target.offset & 0xFFFFFFFF, target.shape, target.strides, target.dtype, target.owner)


class Places(Lie):
    """Base of liars whose kernels compute the places of a plan's writes, records included, in too few bits."""

    def places(self, places: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the places that are written instead; a negative one is left out."""
        raise NotImplementedError

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Submit the plan's writes there."""
        if plan.memory.nbytes >> 31:
            flat = plan.flat()
            places = self.places(flat.writes["dst"].astype(np.int64))
            writes = flat.writes[places >= 0]
            writes["dst"] = places[places >= 0]
            plan = WritePlan(flat.memory, writes, flat.pieces)
        return super().submit(plan, stream)  # type: ignore[misc,no-any-return]


@liar(5, "a slot times its stride, and a write's place, are computed in 32 bits")
class PlacesInThirtyTwoBits(Places):
    """``uint`` where ``ulong`` is due: the fifth gigabyte is the first."""

    def places(self, places: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Cut the upper bits."""
        return places & 0xFFFFFFFF


@liar(5, "places of writes are int, and a negative one is taken for padding")
class PlacesInThirtyOneBits(Places):
    """Nothing arrives past 2 GiB."""

    def places(self, places: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Read them as int32."""
        return places.astype(np.int32).astype(np.int64)


@liar(1, "byte offsets of copies out are 32 bits wide")
class CopyOffsetsInThirtyTwoBits(Lie):
    """Bytes beyond 4 GiB are read at the beginning of the block."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy from the wrong offset."""
        cut = [ByteRange(part.offset & 0xFFFFFFFF, part.nbytes) for part in parts]
        return super().copy_out(memory, cut, stream)  # type: ignore[misc,no-any-return]


@liar(10, "one submission for each 64 requests of a batch", requires=("fused_scatter", "async_h2d"))
class SubmitsBySixtyFour(Lie):
    """A bug that few requests do not show."""

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Submit the records in portions."""
        records = plan.records
        if records is None or len(records.slots) <= 64:
            return super().submit(plan, stream)  # type: ignore[misc,no-any-return]
        for at in range(0, len(records.slots), 64):
            some = Records(records.slots[at : at + 64], records.data[at : at + 64], records.scatter_map)
            ticket = super().submit(WritePlan(plan.memory, np.zeros(0, WRITE), (), some), stream)  # type: ignore[misc]
        if len(plan.writes):
            ticket = super().submit(WritePlan(plan.memory, plan.writes, plan.pieces), stream)  # type: ignore[misc]
        return ticket  # type: ignore[no-any-return]


@liar(10, "submissions are not counted, and no trace exists to compare with", requires=("fused_scatter", "async_h2d"))
class CountsNothing(Lie):
    """A bound that is always kept, as the count is zero."""

    probe_counts: ClassVar[None] = None  # hides the honest device's

    def counters(self) -> Counters:
        """Return the counts without submissions."""
        true: Counters = super().counters()  # type: ignore[misc]
        return replace(true, submissions=0, uploads=0, launches=0)


@liar(2, "a value of a megabyte is not copied: it is read from the caller's array when its turn comes")
class LargeByReference(Lie):
    """A value too large for the staging ring, written without it."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write; a large value is written once more before the next read, with its contents at that time."""
        if isinstance(value, np.ndarray) and value.nbytes >= LARGE:
            self.__dict__.setdefault("late", []).append((device, target, value))
        return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Read after the late writes."""
        for device, target, value in self.__dict__.pop("late", ()):
            super().async_set_value(device, target, value, stream)  # type: ignore[misc]
        return super().copy_out(memory, parts, stream)  # type: ignore[misc,no-any-return]


@liar(3, "a value of a megabyte is written synchronously", requires=HELD)
class LargeValuesWait(Lie):
    """Large values, which the driver does not stage."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Wait for a large value."""
        ticket = super().async_set_value(device, target, value, stream)  # type: ignore[misc]
        if isinstance(value, np.ndarray) and value.nbytes >= LARGE:
            stream.synchronize()
        return ticket  # type: ignore[no-any-return]
