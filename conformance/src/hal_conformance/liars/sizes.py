"""Liars at the sizes of production: right up to a number of bytes, axes, slots, requests, tokens or ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.errors import OutOfMemory
from hal_core.memory.plan import WRITE, Records, WritePlan
from hal_core.memory.views import ByteRange, View
from hal_core.slots.geometry import DYNAMIC
from hal_core.slots.layout import REQUEST_ROW
from hal_core.slots.tasks import TaskKind

from .proxies import HELD, moved
from .rows import SET, Call, How, first, instead, meanwhile, noted, register, row, then

if TYPE_CHECKING:
    from hal_core.memory.values import Value

    from ..harness.bits import Array

LARGE = 1 << 20
"""Bytes from which a value is large."""
COUNTED = ("fused_scatter", "async_h2d")

# -- places of writes and copies ---------------------------------------------------------------------------------------


def block_tail(call: Call) -> None:
    target = call.target
    end, nbytes = target.bounds()[1], target.size * target.dtype.itemsize
    rest = min(-nbytes % 256, target.memory.nbytes - end)
    if nbytes >= 64 << 10 and rest > 0:
        call.write(target.memory, (end, bytes(rest)))


def into(change: Callable[[View], View]) -> How:
    """Return a lie that writes values to another target, of as many elements."""

    def lie(call: Call) -> object:
        other, value = change(call.target), call.value
        if other is not call.target and isinstance(value, np.ndarray):
            value = value.reshape(other.shape)
        return call(target=other, value=value)

    return lie


def four_axes(target: View) -> View:
    shape, strides, run = target.collapsed()
    if len(shape) < 5:
        return target
    return moved(target, shape, (strides[1] * shape[1], *strides[1:]), run) or target


def short_strides(target: View) -> View:
    shape, strides, run = target.collapsed()
    cut = tuple(step if abs(step) <= 0xFFFF else (abs(step) & 0xFFFF) * (1 if step > 0 else -1) for step in strides)
    return target if cut == strides else moved(target, shape, cut, run) or target


def short_offset(target: View) -> View:
    if target.offset < 2**32:
        return target
    return View(target.memory, target.offset & 0xFFFFFFFF, target.shape, target.strides, target.dtype, target.owner)


def places(cut: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> How:
    """Return a lie that writes a plan's writes, records included, elsewhere; a negative place is left out."""

    def lie(call: Call) -> object:
        if not call.plan.memory.nbytes >> 31:
            return call()
        flat = call.plan.flat()
        found = cut(flat.writes["dst"].astype(np.int64))
        writes = flat.writes[found >= 0]
        writes["dst"] = found[found >= 0]
        return call(plan=WritePlan(flat.memory, writes, flat.pieces))

    return lie


def first_ranges(most: int) -> How:
    """Return a lie that copies the ranges after the first ``most`` from where the memory begins."""
    return lambda call: call(
        parts=[part if at < most else ByteRange(0, part.nbytes) for at, part in enumerate(call.parts)]
    )


def refuse_empty(call: Call) -> object:
    if any(part.nbytes == 0 for part in call.parts):
        raise ValueError("error -30 of a copy of 0 bytes")
    return call()


PLACES = {
    "a large value is written in blocks of 256 bytes, and the last has no bounds check": row(
        "TailOfTheLastBlock", 5, "async_set_value", then(block_tail)
    ),  # values from 64 KiB on; smaller ones are written correctly
    "a strided kernel supports four axes, and treats a fifth as dense": row(
        "FourAxesAtMost", 5, "async_set_value", into(four_axes)
    ),  # the outermost of five axes with the stride of a contiguous array
    "strides are 16 bits wide": row(
        "StridesInSixteenBits", 5, "async_set_value", into(short_strides)
    ),  # rows that are further apart than 64 KiB are interleaved
    "byte offsets of targets are 32 bits wide": row(
        "OffsetsInThirtyTwoBits", 5, "async_set_value", into(short_offset)
    ),  # bytes beyond 4 GiB are written at the beginning of the block
    "a slot times its stride, and a write's place, are computed in 32 bits": row(
        "PlacesInThirtyTwoBits", 5, "submit", places(lambda found: found & 0xFFFFFFFF)
    ),  # uint where ulong is due: the fifth gigabyte is the first
    "places of writes are int, and a negative one is taken for padding": row(
        "PlacesInThirtyOneBits", 5, "submit", places(lambda found: found.astype(np.int32).astype(np.int64))
    ),  # nothing arrives past 2 GiB
    "byte offsets of copies out are 32 bits wide": row(
        "CopyOffsetsInThirtyTwoBits",
        1,
        "copy_out",
        lambda call: call(parts=[ByteRange(part.offset & 0xFFFFFFFF, part.nbytes) for part in call.parts]),
    ),  # bytes beyond 4 GiB are read at the beginning of the block
    "a copy out refuses a range of no bytes": row(
        "EmptyRangesRefused", 1, "copy_out", refuse_empty
    ),  # CL_INVALID_VALUE, for a size of 0
    "a copy out has no array for a range of no bytes": row(
        "EmptyRangesLeftOut", 1, "copy_out", lambda call: call(parts=[part for part in call.parts if part.nbytes])
    ),  # a loop that passes over empty ranges
    "a copy out has at most 1,024 ranges": row("ThousandRanges", 1, "copy_out", first_ranges(1024)),
    "a copy out has at most 4,096 ranges": row("ThousandsOfRanges", 1, "copy_out", first_ranges(4096)),
}
register(__name__, PLACES)

# -- slots and requests of a batch -------------------------------------------------------------------------------------


def replanned(plan: WritePlan, **parts: Any) -> WritePlan:  # noqa: ANN401 (those of a plan)
    """Return a plan with other parts."""
    kept = {name: getattr(plan, name) for name in ("memory", "writes", "pieces", "records")}
    return WritePlan(**{**kept, **parts})


def records(change: Callable[[Records], Records]) -> How:
    """Return a lie that submits a plan with other records."""

    def lie(call: Call) -> object:
        plan = call.plan
        return call() if plan.records is None else call(plan=replanned(plan, records=change(plan.records)))

    return lie


def some(records: Records, begin: int | None, end: int | None) -> Records:
    """Return the records of some slots of a batch."""
    return replace(records, slots=records.slots[begin:end], data=records.data[begin:end])


def without_negative(records: Records) -> Records:
    kept = records.slots.astype(np.int16) >= 0
    kept[0] = True  # a batch has one
    return replace(records, slots=records.slots[kept], data=records.data[kept])


def by_so_many(most: int) -> How:
    """Return a lie: a submission for each ``most`` requests of a batch."""

    def lie(call: Call) -> object:
        plan, records = call.plan, call.plan.records
        if records is None or len(records.slots) <= most:
            return call()
        for at in range(0, len(records.slots), most):
            ticket = call(plan=WritePlan(plan.memory, np.zeros(0, WRITE), (), some(records, at, at + most)))
        if len(plan.writes):
            ticket = call(plan=replanned(plan, records=None))
        return ticket

    return lie


def in_two_writes(call: Call) -> object:
    plan, records = call.plan, call.plan.records
    if records is None or len(records.slots) <= 32:
        return call()
    call(plan=WritePlan(plan.memory, plan.writes[:0], [b""], some(records, None, 32)))
    return call(plan=replanned(plan, records=some(records, 32, None)))


def counted_once(parts: Callable[[WritePlan], list[WritePlan]]) -> How:
    """Return a lie that submits a plan in parts, of which ``counters()`` has one; a plan of one part is honest."""

    def lie(call: Call) -> object:
        counts = call.me.__dict__["_counts"]
        first, *others = parts(call.plan)
        ticket = call(plan=first)
        kept = dict(counts)
        for part in others:
            ticket = call(plan=part)
        counts.update({name: kept.get(name, 0) for name in ("submissions", "uploads", "launches")})
        return ticket

    return lie


def wavefronts(plan: WritePlan) -> list[WritePlan]:
    if plan.records is None or len(plan.records.slots) <= 64:
        return [plan]
    found = [some(plan.records, at, at + 64) for at in range(0, len(plan.records.slots), 64)]
    rest = [WritePlan(plan.memory, plan.writes[:0], [b""], part) for part in found[1:]]
    return [replanned(plan, records=found[0]), *rest]


def rows_apart(plan: WritePlan) -> list[WritePlan]:
    if plan.records is None or len(plan.records.slots) <= 256 or not len(plan.writes):
        return [plan]
    return [replanned(plan, writes=plan.writes[:0], pieces=[b""]), replanned(plan, records=None)]


def without_fills(call: Call) -> object:
    writes = call.plan.writes
    if len(writes) >= 30:  # every column of a new state is filled; without that the bug would be obvious
        return call()
    return call(plan=replanned(call.plan, writes=writes[writes["pattern_bytes"] == 0]))


def short_rows(call: Call) -> object:
    if not call.me.__dict__.get("inserting"):
        return call()
    writes = call.plan.writes.copy()
    writes["nbytes"] = np.where(writes["pattern_bytes"] == 0, writes["nbytes"] & 0xFFFF, writes["nbytes"])
    return call(plan=replanned(call.plan, writes=writes[writes["nbytes"] > 0]))


def places_of_floats(call: Call) -> list[int]:
    return [entry[1] for entry in call.state.layout.record_dtype.fields.values() if entry[0] == np.float32]


def flush(data: Any) -> Any:  # noqa: ANN401 (an array)
    bits = np.ascontiguousarray(data).view(np.uint32)
    return np.where(bits & 0x7F800000 == 0, bits & 0x80000000, bits).astype(np.uint32).view(np.uint8)


def flushed_records(call: Call) -> object:
    found, floats = call.plan.records, call.me.__dict__.get("floats")
    if found is None or not floats:
        return call()
    data = found.data.copy()
    for at in floats:
        data[:, at : at + 4] = flush(data[:, at : at + 4])
    return call(plan=replanned(call.plan, records=replace(found, data=data)))


def note_admission(call: Call) -> None:
    order, places = call.kept("staged", ([], {}))  # requests in the order of admission; admission id to place in it
    places[call.request.admission_id] = len(order)
    order.append(call.request)


def records_of_later_requests(call: Call) -> dict[int, bytes]:
    """Return the record that each new request's slot gets: that of the newest with its number modulo 256."""
    order, places = call.kept("staged", ([], {}))
    wrong, plain = dict[int, bytes](), call.tasks.plain
    for kind, slot, request in zip(plain["kinds"], plain["slots"], call.tasks.requests, strict=True):
        place = places.get(request.admission_id, len(order))
        newest = next((at for at in range(place % 256, len(order), 256)[::-1]), place)
        if newest > place and kind == TaskKind.PREFILL and order[newest].config_key == request.config_key:
            wrong[slot] = order[newest].packed[REQUEST_ROW.itemsize :]
    return wrong


def other_requests_records(call: Call) -> object:
    """Replace by the other requests' records; values set at insertion stay."""
    found, (wrong, dynamic) = call.plan.records, call.me.__dict__.get("wrong") or ({}, [])
    if found is None or not wrong:
        return call()
    data = found.data.copy()
    for at, slot in enumerate(found.slots.tolist()):
        if slot in wrong:
            kept = [(begin, data[at, begin : begin + 4].copy()) for begin in dynamic]
            data[at] = np.frombuffer(wrong[slot], np.uint8)
            for begin, value in kept:
                data[at, begin : begin + 4] = value
    return call(plan=replanned(call.plan, records=replace(found, data=data)))


def places_of_dynamic(call: Call) -> list[int]:
    return [call.state.layout.record_dtype.fields[name][1] for name in DYNAMIC]


BATCHES = {
    "fills are left out, so the tail of a row is not reset": row(
        "NoRowReset", 11, "submit", without_fills, seen="block tables of FastDeploy"
    ),  # a scatter kernel without fills
    "the byte count of a row is 16 bits wide": row(
        "RowsInSixteenBits",
        9,
        "insert_tasks",
        meanwhile(lambda call: (call.me, "inserting", True)),
        also={"submit": short_rows},
    ),  # a prompt of 8192 tokens has a row of no bytes, one of 8193 a row of one token
    "denormal parameters of a request are flushed to zero": row(
        "RecordsFlushDenormals",
        9,
        "insert_tasks",
        meanwhile(lambda call: (call.me, "floats", places_of_floats(call))),
        also={"submit": flushed_records},
    ),  # a record scattered by a kernel for floats
    "requests are staged by admission number modulo 256: one inserted late is another": row(
        "LateAdmissionsMixedUp",
        9,
        "insert_tasks",
        meanwhile(lambda call: (call.me, "wrong", (records_of_later_requests(call), places_of_dynamic(call)))),
        also={"on_admit": then(note_admission), "submit": other_requests_records},
    ),  # a full table of staged records that is overwritten
    "slot numbers of a batch are bytes": row(
        "SlotsInEightBits", 9, "submit", records(lambda found: replace(found, slots=found.slots & np.int32(0xFF)))
    ),  # slot 256 is slot 0
    "slot numbers are int16, and a negative one is taken for padding": row(
        "SlotsInSixteenBits", 9, "submit", records(without_negative)
    ),  # requests in slots from 32768 on never arrive
    "a kernel of 64 threads takes 64 requests of a batch, whatever the batch": row(
        "SixtyFourAtOnce", 9, "submit", records(lambda found: some(found, None, 64))
    ),  # no loop over the rest
    "one submission for each 64 requests of a batch": row(
        "SubmitsBySixtyFour", 10, "submit", by_so_many(64), COUNTED
    ),  # a bug that few requests do not show
    "a batch for more than 32 slots is two writes, of which the second may be refused": row(
        "HalfOfALargeBatch", 8, "submit", in_two_writes
    ),  # a table of fixed length
    "an insertion is a launch for each 64 requests, of which one is counted": row(
        "WavefrontsCountOnce", 10, "submit", counted_once(wavefronts), ("fused_scatter", "probe_counts")
    ),  # the loop is below the counter
    "the rows of more than 256 requests are a submission of their own, which is not counted": row(
        "RowsCountNothing", 10, "submit", counted_once(rows_apart), ("fused_scatter", "probe_counts")
    ),  # two kernels from a size on
}
register(__name__, BATCHES)

# -- large values, and memory that is not there ------------------------------------------------------------------------


def own_error(error: OutOfMemory) -> BaseException:
    return error if error.argument == "ring" else RuntimeError(f"error -4: {error.what}")


def write_what_fits(call: Call, error: OutOfMemory) -> None:
    if isinstance(call.value, np.ndarray) and error.argument != "ring":
        call(target=call.target[:4], value=np.ascontiguousarray(call.value[:4]))


def in_two_collectives(call: Call) -> object:
    part, memory = call.state.broadcast_range(), call.state.memory
    if part.nbytes <= 4096:
        return call()
    communicator = call.device.communicator(call.group)
    communicator.broadcast(memory, ByteRange(part.offset, 4096), call.stream)
    return communicator.broadcast(memory, ByteRange(part.offset + 4096, part.nbytes - 4096), call.stream)


def is_large(value: Value) -> bool:
    return isinstance(value, np.ndarray) and value.nbytes >= LARGE


def note_large(call: Call) -> None:
    if is_large(call.value):
        call.kept("late", []).append((call.device, call.target, call.value))


def write_the_large(call: Call) -> None:
    for device, target, value in call.me.__dict__.pop("late", ()):
        call.honest("async_set_value")(device, target, value, call.stream)


def note(when: Callable[[Array], object]) -> How:
    """Return a lie that keeps some arrays by reference until :func:`write_the_large`."""

    def lie(call: Call) -> object:
        if isinstance(call.value, np.ndarray) and call.value.nbytes >= 4096 and when(call.value):
            call.kept("late", []).append((call.device, call.target, call.value))
        return call()

    return lie


def is_read_only_memory(value: Array) -> bool:
    owner: Any = value
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, memoryview) and owner.readonly


def note_plan(call: Call) -> None:
    plan = call.plan
    call.me.__dict__["late_plan"] = replanned(plan) if plan.records is None else None


def write_the_plan(call: Call) -> None:
    late = call.me.__dict__.pop("late_plan", None)
    if late is not None and late.memory is call.memory:
        call.honest("submit")(late, call.stream)


VALUES = {
    "the source array is captured by reference, and read when later work is done": row(
        "ByReference", 2, "submit", then(note_plan), seen="vLLM, five times", also={"copy_out": first(write_the_plan)}
    ),  # an asynchronous copy from pageable memory that is not kept alive: the bytes are read late
    "a value of a megabyte is not copied: it is read from the caller's array when its turn comes": row(
        "LargeByReference", 2, "async_set_value", first(note_large), also={"copy_out": first(write_the_large)}
    ),  # a value too large for the staging ring, written without it
    "a value that begins on a page is read where it is, when its turn comes": row(
        "PagesReadInPlace",
        2,
        SET,
        note(lambda value: value.ctypes.data % 4096 == 0),
        also={"copy_out": first(write_the_large)},
    ),  # memory that a device can take as it is
    "memory that nobody may write by Python is read where it is, when its turn comes": row(
        "MapsReadInPlace",
        2,
        SET,
        note(is_read_only_memory),
        also={"copy_out": first(write_the_large)},
    ),  # a read-only map is taken for a constant
    "a value of a megabyte is written synchronously": row(
        "LargeValuesWait", 3, SET, then(lambda call: call.stream.synchronize() if is_large(call.value) else None), HELD
    ),  # large values, which the driver does not stage
    "a write that finds no device memory raises the runtime's own error": row(
        "AllocatorsOwnError", 26, "async_set_value", instead(OutOfMemory, own_error), "staging"
    ),  # a code of the driver's, without hook and cure
    "a write that finds no device memory has written what fits": row(
        "WhatFitsIsWritten", 26, "async_set_value", noted(OutOfMemory, write_what_fits), "staging"
    ),  # piece by piece, until one is refused
    "a slice of more than 4,096 bytes is two collectives": row(
        "TwoCollectives", 14, "broadcast_tokens", in_two_collectives, "several_ranks"
    ),  # a buffer of fixed length
}
register(__name__, VALUES)
