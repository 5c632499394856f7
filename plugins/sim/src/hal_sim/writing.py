"""How writes reach the accelerator: a plan is one upload and one launch, whatever is in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.base import plan_value
from hal_core.errors import InvalidValue
from hal_core.packing import Packed
from hal_core.plan import WritePlan
from hal_core.tickets import Ticket
from hal_core.views import View

from hal_sim._native import MAX_RANK
from hal_sim.accelerator import Spread
from hal_sim.memory import SimMemory
from hal_sim.ordering import SimStream, SimTicket

if TYPE_CHECKING:
    from hal_core.values import Value

    from hal_sim.device import SimDevice

PIECE = 256 << 10
"""Bytes; what does not fit the ring is uploaded in pieces of this size."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Ints = tuple[int, ...]


class Writer:
    """Submits plans and values for one device.

    Everything that a call writes is on the device before the one launch that changes the target, so that a call that
    is refused half-way (no memory, a full ring, a refused copy) leaves the target as it was.
    """

    def __init__(self, device: SimDevice) -> None:
        self._device, self._accelerator = device, device.accelerator

    def submit(self, plan: WritePlan, stream: SimStream) -> Ticket:
        """One upload and one launch; a plan over the ring's limit is uploaded in pieces and launched once."""
        memory = _ours(plan.memory)
        packed = Packed.of(plan)
        self._device.reads.order(memory, stream)
        with self._staged(packed.nbytes, lambda block: packed.fill(block, plan), stream) as block:
            self._launch(plan, memory, packed, block, stream)
        return self._ticket(stream, memory)

    def set_value(self, target: View, value: Value, stream: SimStream) -> Ticket:
        """Write a converted value into a view."""
        memory = _ours(target.memory)
        self._device.reads.order(memory, stream)
        if isinstance(value, View):
            return self._copy(target, value, stream)
        shape, strides, run = collapse(target)
        address = memory.address + target.offset
        if not isinstance(value, np.ndarray) and not shape:
            pattern = value.tobytes()
            self._accelerator.fill(address, run, int.from_bytes(pattern, "little"), len(pattern), stream.stream)
            self._count("launches")
            return self._ticket(stream, memory)
        if len(shape) >= MAX_RANK:  # the elements of a run may take one axis more
            return self.submit(plan_value(target, value), stream)
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        if not shape and data.nbytes <= self._device.staging.limit:
            self._upload(address, data, stream)
            return self._ticket(stream, memory)
        if isinstance(value, np.ndarray):
            steps, item = _packed(shape, run), run
        else:  # one element, spread over all: a stride of 0
            shape, strides, item = _elements(target, shape, strides, run)
            steps = (0,) * len(shape)

        def fill(block: Bytes) -> None:
            block[...] = data

        with self._staged(data.nbytes, fill, stream) as block:
            self._strided(address, strides, block, steps, shape, item, stream)
        return self._ticket(stream, memory)

    # -- staging ------------------------------------------------------------------------------------------------

    @contextmanager
    def _staged(self, nbytes: int, fill: Callable[[Bytes], None], stream: SimStream) -> Iterator[int]:
        """The device address of bytes that ``fill`` writes, for work put on ``stream`` within the ``with``."""
        ring = self._device.staging
        if nbytes > ring.limit:
            whole = np.empty(nbytes, np.uint8)
            fill(whole)
            room = self._device.allocate(nbytes)
            for at in range(0, nbytes, min(PIECE, ring.limit)):
                self._upload(room.address + at, whole[at : at + min(PIECE, ring.limit)], stream)
                room.used(stream, stream.record())
            yield room.address
            room.used(stream, stream.record())
            return
        span = ring.take(nbytes)
        try:
            self._accelerator.host_write(span.address, nbytes)
            fill(span.buffer)
            mirror = span.segment.block.mirror + span.begin  # type: ignore[attr-defined]  # a PinnedBlock
            self._accelerator.h2d(mirror, span.address, nbytes, stream.stream)
            self._count("uploads")
            yield mirror
        finally:
            ring.fence(span, stream.record())

    def _upload(self, address: int, data: Bytes, stream: SimStream) -> None:
        """Upload bytes that fit the ring straight to where they belong."""
        ring = self._device.staging
        span = ring.take(data.nbytes)
        try:
            self._accelerator.host_write(span.address, data.nbytes)
            span.buffer[...] = data
            self._accelerator.h2d(address, span.address, data.nbytes, stream.stream)
            self._count("uploads")
        finally:
            ring.fence(span, stream.record())

    # -- launches -----------------------------------------------------------------------------------------------

    def _launch(self, plan: WritePlan, memory: SimMemory, packed: Packed, block: int, stream: SimStream) -> None:
        spread, records = None, plan.records
        if records is not None:
            slots = min((memory.nbytes - base) // step for base, step, _, _ in records.spread.tolist() if step)
            spread = Spread(
                records=block + packed.records_at,
                record_nbytes=packed.record_bytes,
                count=packed.records,
                slots=block + packed.slots_at,
                fields=memory.table(records.spread),
                field_count=len(records.spread),
                slot_limit=slots,
                base=memory.address,
            )
        self._accelerator.plan(
            spread, block, packed.nbytes, packed.writes, stream.stream, base=memory.address, payload=packed.payload_at
        )
        self._count("launches")

    def _strided(self, dst: int, to: Ints, src: int, steps: Ints, shape: Ints, item: int, stream: SimStream) -> None:
        self._accelerator.strided(
            dst=dst, src=src, shape=shape, dst_strides=to, src_strides=steps, item_nbytes=item, stream=stream.stream
        )
        self._count("launches")

    def _copy(self, target: View, source: View, stream: SimStream) -> Ticket:
        """Between two views of this device, in stream order, as if the source were read before anything is written."""
        to, memory, other = _axes(target), _ours(target.memory), _ours(source.memory)
        from_, item = _axes(source), target.dtype.itemsize
        dst, src = memory.address + target.offset, other.address + source.offset
        if target.shape == source.shape and not _overlap(target, source):
            self._strided(dst, to[1], src, from_[1], to[0], item, stream)
        else:
            between = self._device.allocate(target.size * item)
            try:
                self._strided(between.address, _packed(from_[0], item), src, from_[1], from_[0], item, stream)
                self._strided(dst, to[1], between.address, _packed(to[0], item), to[0], item, stream)
            finally:
                between.used(stream, stream.record())
        return self._ticket(stream, memory, other)

    def _ticket(self, stream: SimStream, *memories: SimMemory) -> SimTicket:
        event = stream.record()
        for memory in memories:
            memory.used(stream, event)
        return SimTicket(event)

    def _count(self, name: str) -> None:
        self._device.count(name)
        self._device.count("submissions")


def _ours(memory: object) -> SimMemory:
    if isinstance(memory, SimMemory):
        return memory
    raise InvalidValue(
        f"{type(memory).__name__} is no memory of this device", cure="use what its allocate() gave", argument="plan"
    )


def collapse(view: View) -> tuple[Ints, Ints, int]:
    """``(shape, strides, run)``: the outer axes that are left when neighbouring bytes are one run of ``run`` bytes."""
    run, keep = view.dtype.itemsize, len(view.shape)
    while keep and (view.strides[keep - 1] == run or view.shape[keep - 1] == 1):
        run *= view.shape[keep - 1]
        keep -= 1
    axes = [(n, step) for n, step in zip(view.shape[:keep], view.strides[:keep], strict=True) if n != 1]
    return tuple(n for n, _ in axes), tuple(step for _, step in axes), run


def _axes(view: View) -> tuple[Ints, Ints]:
    """Shape and strides without axes of one. Raises where more are left than the strided kernel takes."""
    axes = [(n, step) for n, step in zip(view.shape, view.strides, strict=True) if n != 1]
    if len(axes) > MAX_RANK:
        raise InvalidValue(
            f"a device value of {len(axes)} axes", cure=f"reshape it to at most {MAX_RANK}", argument="value"
        )
    return tuple(n for n, _ in axes), tuple(step for _, step in axes)


def _elements(target: View, shape: Ints, strides: Ints, run: int) -> tuple[Ints, Ints, int]:
    """The collapsed axes, with the elements of each run as one axis more."""
    item = target.dtype.itemsize
    if run == item:
        return shape, strides, item
    return (*shape, run // item), (*strides, item), item


def _packed(shape: Ints, item: int) -> Ints:
    """The strides of items of ``item`` bytes that lie one after the other."""
    return tuple(item * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _overlap(one: View, other: View) -> bool:
    (low, high), (begin, end) = one.bounds(), other.bounds()
    a, b = one.memory.address, other.memory.address
    return a + low < b + end and b + begin < a + high
