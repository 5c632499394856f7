"""New requests into slots on the native path: from the batch's columns to the event in one call (native/entering.c)."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

from .entering import Entering
from .native import Book
from .structs import ENTRY

if TYPE_CHECKING:
    from hal_core import SlotState, TaskBatch, Ticket
    from hal_core.devices import AsyncStream, RecordedEvent

    from .admissions import Chunk
    from .base import OnGpu
    from .native import Native

Room = tuple[int, int, int]
"""Where entries go: address on the host, address for the kernel, bytes."""
MOVE = Struct("<QQQ")
"""Bytes of the device that were not uploaded, and how far from them (modulo 2**64) the pinned memory is."""


class NativeEntering(Entering):
    """Inserts batches of staged requests for one device; what it does is :class:`hal_cuda.entering.Entering`'s."""

    def __init__(self, device: OnGpu, native: Native) -> None:
        super().__init__(device)
        self._enter = native.calls.enter

    def submit(self, state: SlotState, tasks: TaskBatch, stream: AsyncStream) -> Ticket | None:
        """Put the batch into its slots; None, with nothing done, where a request is not staged or it does not fit."""
        twin = state.host_table.twin
        if not isinstance(twin, Book) or not tasks.all_new:
            return super().submit(state, tasks, stream)
        device, admissions = self._device, self._device.admissions
        nbytes = len(tasks) * ENTRY.size + len(tasks.block_bytes)
        if not admissions.has(tasks.requests[-1]):  # staged last, so the first to have found no room
            return None
        span = None if admissions.fits(nbytes) else self._span(nbytes)  # before the lock: a full ring is waited for
        event = None
        with admissions.lock:  # until the chunks are fenced: no thread that admits may give them other contents
            place = admissions.tail(nbytes) if span is None else None
            try:
                if place is not None:
                    block, at = place[0].block, place[1]
                    room = block.address + at, block.mirror + at, nbytes
                    event = self._enter_batch(state, tasks, twin, place[0], room, stream)
                elif span is not None:
                    event = self._enter_batch(state, tasks, twin, None, (span.address, span.address, nbytes), stream)
            finally:
                if span is not None:
                    last = device.last.get(stream.stream_key)  # of an error, too: a part of it may be under way
                    device.staging.drop(span) if last is None else device.staging.fence(span, last)
        return None if event is None else device.ticket_type(event)

    def _enter_batch(
        self, state: SlotState, tasks: TaskBatch, twin: Book, chunk: Chunk | None, room: Room, stream: AsyncStream
    ) -> RecordedEvent | None:
        """The event after the batch; ``chunk`` has the entries, if any has."""
        device, admissions, uploads = self._device, self._device.admissions, self._uploads
        dirty = [one for one in admissions.chunks if one.used > one.uploaded]
        chosen = chunk or max(dirty, key=lambda one: one.used - one.uploaded, default=None)
        moves = b"".join([_move(one) for one in dirty if one is not chosen])
        upload = (0, 0, 0)
        if chosen is not None:
            block, begin = chosen.block, chosen.uploaded
            upload = block.mirror + begin, block.address + begin, chosen.used - begin
        if device.reads.under_way:
            device.reads.order(state.memory, stream)
        events = device.events
        event, arrival = events.take(stream), self._arrival if chosen is None else events.take(uploads)
        order = uploads.raw, 0 if arrival is None else arrival.raw, stream.raw, device.kernels.enter.function, event.raw
        fixed = twin.raw, self._known[state], admissions.table, moves
        try:
            if not self._enter(*fixed, *room, *upload, *order, *tasks.native):
                return None
        except BaseException:  # a part of it may be under way
            event = device.mark(stream)
            self._fence(event, chosen, device.mark(uploads))
            raise
        device.last[stream.stream_key] = event
        device.primitives.count("launches")
        self._fence(event, chosen, arrival)
        if chosen is not None and arrival is not None:
            device.primitives.count("uploads")
            device.last[uploads.stream_key] = self._arrival = arrival
            chosen.uploaded = chosen.used
        return event

    def _fence(self, event: RecordedEvent, chosen: Chunk | None, arrival: RecordedEvent | None) -> None:
        """Which chunks the batch is in would cost more to find out than that all wait for it."""
        for one in self._device.admissions.chunks:
            one.fences[event.stream_key] = event
        if chosen is not None and arrival is not None:
            chosen.fences[arrival.stream_key] = arrival


def _move(chunk: Chunk) -> bytes:
    """Of another chunk what was not uploaded is read in its pinned memory."""
    mirror, away = chunk.block.mirror, chunk.block.address - chunk.block.mirror
    return MOVE.pack(mirror + chunk.uploaded, mirror + chunk.used, away & (2**64 - 1))
