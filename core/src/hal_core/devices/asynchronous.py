"""The asynchronous device: everything but the vendor's primitives.

A vendor writes :class:`hal_core.devices.primitives.Primitives` and a class derived from :class:`AsyncDevice` with its
``name`` and ``capabilities``. The base adds:

- **staging**: host bytes go through a ring whose spans are reused only after the event of their last use;
- **order**: writes wait on their stream for copies out that still read their target; the host does not wait;
- **all or nothing**: a call's data is on the device before the one launch that changes the target;
- **lifetimes**: unreferenced memory is freed when the work that was queued on any stream by then is done; the arrays of
  a copy out keep their host block;
- **isolation**: two opened devices, states or streams share only the ring of their device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..errors import InvalidValue, OutOfMemory
from ..memory.copies import Bytes
from ..memory.packing import Packed
from ..memory.plan import Buffer, WritePlan, runs_of
from ..memory.writes import across
from ..tickets import DONE, Ticket
from .blocks import MirroredBlock
from .primitives import Launch, PlanLaunch, Primitives
from .retired_memory import DeviceMemory, SpanMemory
from .ring_options import RingOptions
from .staging import StagingRing
from .stream_device import StreamDevice, primitive

if TYPE_CHECKING:
    from ..memory.views import ByteRange, Memory, View
    from ..slots.state import SlotState
    from ..streams import Stream
    from .blocks import HostBlock
    from .events import AsyncStream, RecordedEvent
    from .staging import Span


class AsyncDevice(StreamDevice):
    """One opened device over ``primitives``, with a staging ring configured by its ``options``."""

    piece: ClassVar[int] = 256 << 10
    """Bytes; data larger than the ring is uploaded in pieces of this size, the next one while the last two are in
    flight. Larger pieces would spread over more of the ring, and out of the processor's caches."""

    def __init__(self, index: int, primitives: Primitives, options: RingOptions | None = None) -> None:
        super().__init__(index, primitives)
        chosen = options or RingOptions()
        self.primitives, self.value_limit = primitives, chosen.value_limit
        self.staging = StagingRing(partial(MirroredBlock, primitives), chosen)
        self._tables: dict[int, tuple[DeviceMemory, int]] = {}

    # -- memory -------------------------------------------------------------------------------------------------------

    @primitive
    def allocate(self, nbytes: int) -> DeviceMemory:
        """Allocate device memory, after freeing unreferenced memory."""
        self.retired.reap()
        for stream_key in [stream_key for stream_key, event in self.last.items() if event.done()]:
            del self.last[stream_key]  # streams that are gone or idle
        try:
            address = self.primitives.allocate(nbytes)
        except OutOfMemory:
            if not self.retired.reap(self.staging.deadline):  # memory is freed once its work is done
                raise
            address = self.primitives.allocate(nbytes)
        self.count("allocations")
        return DeviceMemory(self, address, nbytes, free=partial(self.primitives.free, address))

    def address_of(self, memory: Memory) -> int:
        """Return the address of memory that this device can write. Raises :class:`InvalidValue` for foreign memory."""
        if not isinstance(memory, DeviceMemory):
            raise InvalidValue(
                f"{type(memory).__name__} is not memory of this device", cure="use memory from its allocate()"
            )
        return memory.address

    @primitive
    def register_state(self, state: SlotState) -> None:
        """Upload the map of the state's records for launches, and wait for it."""
        super().register_state(state)
        if self.capabilities.fused_scatter:
            self.table(state.scatter_map, state.sizes.num_slots)

    def table(self, scatter_map: np.ndarray[Any, np.dtype[np.void]], slots: int) -> DeviceMemory:
        """Return a map of records in device memory, where it stays until the array is deleted; waits for its upload."""
        found = self._tables.get(id(scatter_map))
        if found is None:
            data = np.ascontiguousarray(scatter_map).view(np.uint8).reshape(-1)
            memory = self.allocate(data.nbytes)
            if not self.upload(memory.address, data, self.upload_stream).wait(self.staging.deadline):
                raise self.deadline_error(f"the map of a state was not uploaded in {self.staging.deadline} s")
            found = self._tables[id(scatter_map)] = memory, slots
            weakref.finalize(scatter_map, self._tables.pop, id(scatter_map), None)
        return found[0]

    # -- staging ------------------------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> Span:
        """Return a span of the ring for the host to write and then :meth:`send`; waits for room if the ring is full."""
        span = self.staging.take(nbytes)
        self.primitives.host_write(span.address, nbytes)
        return span

    def send(self, span: Span, target: int, launch: Launch | None, stream: AsyncStream) -> RecordedEvent:
        """Upload a span to device address ``target``, launch the kernel that reads it, and fence it; return the event
        after both."""
        try:
            event = self.events.take(stream)
        except BaseException:
            self.staging.drop(span)
            raise
        try:
            self.primitives.submit(span.address, target, span.nbytes, launch, stream.raw, event.raw)
        except BaseException:
            self.fence(span, stream)  # a part of it may be in flight
            raise
        self.staging.fence(span, event)
        self.last[stream.stream_key] = event
        return event

    def fence(self, span: Span, stream: AsyncStream) -> RecordedEvent:
        """Fence a span after the work that is now on ``stream``. If no event can be recorded there, the device has a
        fault: the span can never be used again."""
        try:
            event = self.mark(stream)
        except Exception as error:
            self.health.report(error, lambda _: True)
            raise
        self.staging.fence(span, event)
        return event

    def upload(self, target: int, data: Bytes, stream: AsyncStream) -> RecordedEvent:
        """Copy bytes that fit the ring to device address ``target``."""
        span = self.take(data.nbytes)
        span.buffer[...] = data
        return self.send(span, target, None, stream)

    def upload_pieces(self, target: int, data: Bytes, stream: AsyncStream) -> RecordedEvent:
        """Copy bytes that do not fit the ring to device address ``target``, in pieces."""
        step = min(self.piece, self.staging.limit)
        events: list[RecordedEvent] = []
        for at in range(0, data.nbytes, step):
            if len(events) == 2 and not events.pop(0).wait(self.staging.deadline):
                raise self.deadline_error(
                    f"the upload of {data.nbytes} bytes made no progress for {self.staging.deadline} s"
                )
            events.append(self.upload(target + at, data[at : at + step], stream))
        return events[-1]

    def upload_large(self, data: Bytes, stream: AsyncStream) -> DeviceMemory:
        """Return device memory with bytes that do not fit the ring, for the next work on ``stream``.

        They are uploaded on a separate stream, so a held stream is not waited for (G3). Bytes above ``value_limit`` get
        device memory only if the stream makes progress. If this raises, the caller's memory is unchanged.
        """
        if data.nbytes > self.value_limit:
            self.wait_for_queued_work(data.nbytes, stream)
        uploaded = self.allocate(data.nbytes)
        stream.wait(self.upload_pieces(uploaded.address, data, self.upload_stream))
        return uploaded

    def wait_for_queued_work(self, nbytes: int, stream: AsyncStream) -> None:
        """Wait until a stream has done its queued work, before queuing work that a held stream would leave half
        done."""
        self.count("host_waits")
        if not stream.record().wait(self.staging.deadline):
            raise self.deadline_error(f"{nbytes} bytes wait for a stream that was busy for {self.staging.deadline} s")

    def deadline_error(self, what: str) -> OutOfMemory:
        """Return the error of a wait that has reached its deadline."""
        cure = "the device has stopped, or holds its stream; find out why, or give less at once, or raise value_limit"
        return OutOfMemory(what, cure=cure, device=self.located, argument="ring")

    # -- work ---------------------------------------------------------------------------------------------------------

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Upload once and launch once; a plan over the ring's limit is uploaded in pieces and launched once.

        Without ``fused_scatter`` each run of bytes is a separate copy.
        """
        self.check_open()
        if plan.empty:
            return DONE
        own = self.own_stream(stream)
        memory = self.address_of(plan.memory)
        if not self.capabilities.fused_scatter:
            return self.submit_runs(plan, own)
        scatter_map = slots = 0
        if plan.records is not None:
            table = self._tables.get(id(plan.records.scatter_map))
            if table is None:  # a map without a state: uploading it would wait
                plan = plan.flat()
            else:
                scatter_map, slots = table[0].address, table[1]
        plan, packed = self.pack(plan)
        fields = 0 if plan.records is None else len(plan.records.scatter_map)
        launch = PlanLaunch(memory, plan.memory.nbytes, scatter_map, fields, slots, packed)
        return self.launch_staged(packed.nbytes, partial(packed.fill, plan=plan), launch, plan.memory, own)

    def submit_all(self, plans: Sequence[WritePlan], stream: Stream) -> Ticket:
        """One plan of the addresses from the lowest memory to the end of the highest, where kernels take addresses."""
        if len(plans) < 2 or not self.capabilities.several_memories:
            return super().submit_all(plans, stream)
        memories = [plan.memory for plan in plans]
        parts = [(begin := self.address_of(memory), begin + memory.nbytes) for memory in memories]
        span = SpanMemory(self, parts, keep=memories)
        return self.submit(across(plans, span), stream)

    def pack(self, plan: WritePlan) -> tuple[WritePlan, Packed]:
        """Return the plan as it is launched (its writes may be cut or reordered), and its layout in the block."""
        return plan, Packed.of(plan)

    def launch_staged(
        self, nbytes: int, fill: Callable[[Bytes], None], launch: Launch, memory: Memory, stream: AsyncStream
    ) -> Ticket:
        """Stage ``nbytes`` written by ``fill``, upload them, and launch the kernel that reads them and writes to
        ``memory``."""
        if nbytes <= self.staging.limit:
            span = self.take(nbytes)
            try:
                fill(span.buffer)
                self.order_after_reads(stream, memory)
            except BaseException:
                self.staging.drop(span)
                raise
            block = span.segment.block
            assert isinstance(block, MirroredBlock)
            return self.ticket_type(self.send(span, block.mirror + span.begin, launch, stream))
        data = np.empty(nbytes, np.uint8)
        fill(data)
        uploaded = self.upload_large(data, stream)
        self.order_after_reads(stream, memory)
        self.primitives.launch(launch, uploaded.address, stream.raw)
        self.primitives.count("launches")
        return self.ticket(stream)

    def submit_runs(self, plan: WritePlan, stream: AsyncStream) -> Ticket:
        """Submit a plan as one copy per run of bytes; all runs are staged first, as far as the ring holds them."""
        address, limit = self.address_of(plan.memory), self.staging.limit
        plan = plan.flat()
        if (nbytes := int(plan.writes["nbytes"].sum())) > limit:
            self.wait_for_queued_work(nbytes, stream)
        self.order_after_reads(stream, plan.memory)
        ticket: Ticket = DONE
        for group in grouped(short_runs(plan, limit), limit):
            span = self.take(sum([len(data) for _, data in group]))
            span.buffer[...] = np.frombuffer(b"".join([data for _, data in group]), np.uint8)
            source = span.address
            try:
                for offset, data in group:
                    self.primitives.copy_in(address + offset, source, len(data), stream.raw)
                    self.primitives.count("uploads")
                    source += len(data)
            finally:
                event = self.fence(span, stream)
            ticket = self.ticket_type(event)
        return ticket

    def submit_value(self, target: View, value: np.ndarray[Any, Any] | np.generic, stream: Stream) -> Ticket:
        """Copy contiguous bytes straight to their target; submit everything else as a plan."""
        shape, _, _ = target.collapsed()
        if shape or not isinstance(value, np.ndarray) or not 0 < value.nbytes <= self.staging.limit:
            return super().submit_value(target, value, stream)
        own, address = self.own_stream(stream), self.address_of(target.memory)
        self.order_after_reads(own, target.memory)
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return self.ticket_type(self.upload(address + target.offset, data, own))

    def enqueue_copies(
        self, block: HostBlock, memory: Memory, parts: Sequence[ByteRange], after: AsyncStream, stream: AsyncStream
    ) -> RecordedEvent:
        """Copy all parts with one compound primitive."""
        address = self.address_of(memory)
        places = [(address + part.offset, part.nbytes) for part in parts]
        before, event = self.events.take(after), self.events.take(stream)
        self.primitives.submit_copy_out(block.address, places, after.raw, stream.raw, before.raw, event.raw)
        self.last[stream.stream_key] = event
        return event

    def release(self, *, settled: bool) -> None:
        """Release the states' maps with the rest."""
        if settled:
            self._tables.clear()
        super().release(settled=settled)


Run = tuple[int, Buffer]
"""The offset of a run in the memory, and its bytes."""


def short_runs(plan: WritePlan, longest: int) -> Iterator[Run]:
    """Yield the writes of a plan as runs of at most ``longest`` bytes."""
    flat = plan.flat()
    for offset, data in runs_of(flat.writes, flat.payload):
        for at in range(0, len(data), longest):
            yield offset + at, data[at : at + longest]


def grouped(runs: Iterable[Run], limit: int) -> Iterator[list[Run]]:
    """Yield consecutive runs in lists of at most ``limit`` bytes."""
    group: list[Run] = []
    size = 0
    for run in runs:
        if group and size + len(run[1]) > limit:
            yield group
            group, size = [], 0
        group.append(run)
        size += len(run[1])
    if group:
        yield group
