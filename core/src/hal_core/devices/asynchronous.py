"""The asynchronous device: everything but the vendor's primitives.

A vendor writes :class:`hal_core.devices.primitives.Primitives` and a class derived from :class:`AsyncDevice` with its
``name`` and ``capabilities``. What the base does with them:

- **staging**: bytes of the host go through a ring whose spans are used again only after the event of their last use;
- **order**: writes wait on their stream for copies out that still read what they change; the host does not wait;
- **all or nothing**: what a call writes is on the device before the one launch that changes the target;
- **lifetimes**: memory that nobody holds is freed when the last work that was put on any stream by then is over; arrays
  of a copy out keep their host block;
- **two of everything**: nothing is shared between two opened devices, two states or two streams but the ring
  of their device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..errors import InvalidValue, OutOfMemory
from ..memory.packing import Packed
from ..memory.plan import Buffer, WritePlan, runs_of
from ..memory.writes import across
from ..tickets import DONE, Ticket
from .blocks import Bytes, MirroredBlock
from .lifetimes import DeviceMemory
from .primitives import Launch, PlanLaunch, Primitives
from .ring_options import RingOptions
from .staging import StagingRing
from .streaming import StreamDevice, primitive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..memory.views import ByteRange, Memory, View
    from ..slots.state import SlotState
    from ..streams import Stream
    from .blocks import HostBlock
    from .events import AsyncStream, RecordedEvent
    from .staging import Span


class AsyncDevice(StreamDevice):
    """One opened device over ``primitives``, with a staging ring as its ``options`` say."""

    piece: ClassVar[int] = 256 << 10
    """Bytes; what does not fit the ring is uploaded in pieces of this size, the next while the last two are under way:
    more would spread over more of the ring, and out of the processor's caches."""

    def __init__(self, index: int, primitives: Primitives, options: RingOptions | None = None) -> None:
        super().__init__(index, primitives)
        chosen = options or RingOptions()
        self.primitives, self.value_limit = primitives, chosen.value_limit
        self.staging = StagingRing(partial(MirroredBlock, primitives), chosen)
        self._tables: dict[int, tuple[DeviceMemory, int]] = {}

    # -- memory -------------------------------------------------------------------------------------------------------

    @primitive
    def allocate(self, nbytes: int) -> DeviceMemory:
        """A block of device memory; what nobody holds any more is freed first."""
        self.retired.reap()
        for stream_key in [stream_key for stream_key, event in self.last.items() if event.done()]:
            del self.last[stream_key]  # of streams that are gone, or have nothing to do
        try:
            address = self.primitives.allocate(nbytes)
        except OutOfMemory:
            if not self.retired.reap(self.staging.deadline):  # memory that is given back once its work is over
                raise
            address = self.primitives.allocate(nbytes)
        self.count("allocations")
        return DeviceMemory(self, address, nbytes, free=partial(self.primitives.free, address))

    def address_of(self, memory: Memory) -> int:
        """The address of memory that this device can write. Raises :class:`InvalidValue` for another's."""
        if not isinstance(memory, DeviceMemory):
            raise InvalidValue(
                f"{type(memory).__name__} is no memory of this device", cure="use what its allocate() gave"
            )
        return memory.address

    @primitive
    def register_state(self, state: SlotState) -> None:
        """Put the map of the state's records where launches find it; waits until it is there."""
        if self.capabilities.fused_scatter:
            self.table(state.scatter_map, state.sizes.num_slots)

    def table(self, scatter_map: np.ndarray[Any, np.dtype[np.void]], slots: int) -> DeviceMemory:
        """A map of records in device memory, where it stays until the array is gone; waits for its upload."""
        found = self._tables.get(id(scatter_map))
        if found is None:
            data = np.ascontiguousarray(scatter_map).view(np.uint8).reshape(-1)
            memory = self.allocate(data.nbytes)
            self.upload(memory.address, data, self.uploads).wait(self.staging.deadline)
            found = self._tables[id(scatter_map)] = memory, slots
            weakref.finalize(scatter_map, self._tables.pop, id(scatter_map), None)
        return found[0]

    # -- staging ------------------------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> Span:
        """A span of the ring for the host to write, then to :meth:`send`; waits for room where the ring is full."""
        span = self.staging.take(nbytes)
        self.primitives.host_write(span.address, nbytes)
        return span

    def send(self, span: Span, target: int, launch: Launch | None, stream: AsyncStream) -> RecordedEvent:
        """Upload a span to device address ``target``, launch what reads it, and fence it; the event after both."""
        event = self.events.take(stream)
        try:
            self.primitives.submit(span.address, target, span.nbytes, launch, stream.raw, event.raw)
        except BaseException:
            self.staging.fence(span, self.mark(stream))  # a part of it may be under way
            raise
        self.staging.fence(span, event)
        self.last[stream.stream_key] = event
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
                raise self.full(f"the upload of {data.nbytes} bytes did not go on for {self.staging.deadline} s")
            events.append(self.upload(target + at, data[at : at + step], stream))
        return events[-1]

    def room(self, data: Bytes, stream: AsyncStream) -> DeviceMemory:
        """Device memory with bytes that do not fit the ring, for what is put on ``stream`` next.

        They are uploaded beside all streams, so a held one is not waited for (G3). Bytes above ``value_limit`` take as
        much device memory only for a stream that goes on. Where this raises, nothing of the caller's has changed.
        """
        if data.nbytes > self.value_limit:
            self.require_moving(data.nbytes, stream)
        room = self.allocate(data.nbytes)
        stream.wait(self.upload_pieces(room.address, data, self.uploads))
        return room

    def require_moving(self, nbytes: int, stream: AsyncStream) -> None:
        """Wait until a stream has done what is on it, before anything is put there that would wait for it half done."""
        self.count("host_waits")
        if not stream.record().wait(self.staging.deadline):
            raise self.full(f"{nbytes} bytes wait for a stream that was busy for {self.staging.deadline} s")

    def full(self, what: str) -> OutOfMemory:
        """The error of a wait that has reached its deadline."""
        cure = "the device has stopped, or holds its stream; find out why, or give less at once, or raise value_limit"
        return OutOfMemory(what, cure=cure, device=self.located, argument="ring")

    # -- work ---------------------------------------------------------------------------------------------------------

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """One upload and one launch; a plan over the ring's limit is uploaded in pieces and launched once.

        Without ``fused_scatter`` each run of bytes is a copy of its own.
        """
        self.check_open()
        if plan.empty:
            return DONE
        own = self.own(stream)
        memory = self.address_of(plan.memory)
        if not self.capabilities.fused_scatter:
            return self.submit_runs(plan, own)
        scatter_map = slots = 0
        if plan.records is not None:
            table = self._tables.get(id(plan.records.scatter_map))
            if table is None:  # a map of no state: putting it on the device would wait
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
        begins = [self.address_of(plan.memory) for plan in plans]
        end = max([begin + plan.memory.nbytes for begin, plan in zip(begins, plans, strict=True)])
        span = DeviceMemory(self, min(begins), end - min(begins), keep=[plan.memory for plan in plans])
        return self.submit(across(plans, span), stream)

    def pack(self, plan: WritePlan) -> tuple[WritePlan, Packed]:
        """The plan as it is launched (its writes may be cut or put in another order), and its layout in the block."""
        return plan, Packed.of(plan)

    def launch_staged(
        self, nbytes: int, fill: Callable[[Bytes], None], launch: Launch, memory: Memory, stream: AsyncStream
    ) -> Ticket:
        """Stage ``nbytes`` that ``fill`` writes, upload them, and launch what reads them and writes to ``memory``."""
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
        whole = np.empty(nbytes, np.uint8)
        fill(whole)
        room = self.room(whole, stream)
        self.order_after_reads(stream, memory)
        self.primitives.launch(launch, room.address, stream.raw)
        self.primitives.count("launches")
        return self.ticket(stream)

    def submit_runs(self, plan: WritePlan, stream: AsyncStream) -> Ticket:
        """A plan by copies alone, one a run of bytes; all of them are staged first, as far as the ring holds them."""
        address, limit = self.address_of(plan.memory), self.staging.limit
        plan = plan.flat()
        if (nbytes := int(plan.writes["nbytes"].sum())) > limit:
            self.require_moving(nbytes, stream)
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
                self.staging.fence(span, event := self.mark(stream))
            ticket = self.ticket_type(event)
        return ticket

    def submit_value(self, target: View, value: np.ndarray[Any, Any] | np.generic, stream: Stream) -> Ticket:
        """Bytes that lie together go straight to their place; everything else is a plan."""
        shape, _, _ = target.collapsed()
        if shape or not isinstance(value, np.ndarray) or not 0 < value.nbytes <= self.staging.limit:
            return super().submit_value(target, value, stream)
        own, address = self.own(stream), self.address_of(target.memory)
        self.order_after_reads(own, target.memory)
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return self.ticket_type(self.upload(address + target.offset, data, own))

    def enqueue_copies(
        self, block: HostBlock, memory: Memory, parts: Sequence[ByteRange], after: AsyncStream, stream: AsyncStream
    ) -> RecordedEvent:
        """One compound primitive for all parts."""
        address = self.address_of(memory)
        places = [(address + part.offset, part.nbytes) for part in parts]
        before, event = self.events.take(after), self.events.take(stream)
        self.primitives.submit_copy_out(block.address, places, after.raw, stream.raw, before.raw, event.raw)
        self.last[stream.stream_key] = event
        return event

    def release(self, *, whole: bool) -> None:
        """Give the states' maps back with the rest."""
        if whole:
            self._tables.clear()
        super().release(whole=whole)


Run = tuple[int, Buffer]
"""Where in the memory a run of bytes begins, and the bytes."""


def short_runs(plan: WritePlan, longest: int) -> Iterator[Run]:
    """What a plan writes as runs of at most ``longest`` bytes."""
    flat = plan.flat()
    for offset, data in runs_of(flat.writes, flat.payload):
        for at in range(0, len(data), longest):
            yield offset + at, data[at : at + longest]


def grouped(runs: Iterable[Run], limit: int) -> Iterator[list[Run]]:
    """Runs one after the other, in lists of at most ``limit`` bytes."""
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
