"""Requests into slots on the native path: from the batch's columns to the event in one call (native/entering.c).

Not new requests alone: hand-offs, pieces of prompts and more blocks come in the same batch with nearly every step, and
go by the same call. A batch from which a request leaves goes by the general way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.devices import RecordedEvent

from .entering import Entering
from .native import Book
from .structs import ENTRY, FEW_BYTES

if TYPE_CHECKING:
    from hal_core import SlotState, TaskBatch, Ticket
    from hal_core.devices import AsyncStream

    from .base import OnGpu
    from .native import Native

Room = tuple[int, int, int]
"""Where entries go: address on the host, address for the kernel, bytes."""
NEAR = 64 << 10
"""Bytes; so many new ones the kernel reads from pinned memory, without an upload. For one request of 1,024 tokens that
saves the host 8 to 10 us, and takes the GPU 2.2 more (docs/evidence/native.md)."""
FEW = FEW_BYTES
"""Bytes; beside them so many of entries and block ids come with the launch itself, so that the kernel reads them
nowhere: 1 to 3 us of the GPU. 0: none do. Beside an upload they go with that, as such a launch takes 0.3 us longer."""
TAIL: Room = (0, 0, 0)
"""Behind the requests of the chunk that is being filled."""
NOT_STAGED, ENTERED, UPLOADED, NO_ROOM, CAPTURED = range(5)
"""What ``enter`` gives; all but the second and the third have done nothing. A captured stream is refused by the general
way, which is tried next."""


class NativeEntering(Entering):
    """Inserts batches of staged requests for one device; what it does is :class:`hal_cuda.entering.Entering`'s."""

    def __init__(self, device: OnGpu, native: Native) -> None:
        super().__init__(device)
        self._enter, self._free = native.calls.enter, device.events.free
        self._landed: RecordedEvent | None = device.events.take(self._uploads)  # of the last upload; recorded by each
        functions = device.kernels.enter.function, device.kernels.enter_few.function if FEW else 0
        self._fixed = device.admissions.table, NEAR, self._uploads.raw, self._landed.raw, *functions

    def submit(self, state: SlotState, tasks: TaskBatch, stream: AsyncStream) -> Ticket | None:
        """Put the batch into its slots; None, with nothing done, where a request is not staged or it does not fit."""
        twin = state.host_table.twin
        if type(twin) is not Book or not (tasks.all_new or tasks.more is not None):
            return super().submit(state, tasks, stream)
        device = self._device
        if device.reads.under_way:
            device.reads.order(state.memory, stream)
        events, free = device.events, self._free
        event = RecordedEvent(events, free.popleft(), stream.stream_key) if free else events.take(stream)
        done = self._enter_batch(twin, tasks, TAIL, stream, event)
        if done == NO_ROOM:
            done = self._from_ring(twin, tasks, stream, event)
        return device.ticket_type(event) if done in (ENTERED, UPLOADED) else None

    def close(self) -> None:
        """Let the event of uploads go, too."""
        super().close()
        self._landed = None

    def _enter_batch(self, twin: Book, tasks: TaskBatch, room: Room, stream: AsyncStream, event: RecordedEvent) -> int:
        """What ``enter`` gives; ``event`` is then behind the batch."""
        device, admissions, key = self._device, self._device.admissions, event.stream_key
        with admissions.lock:  # until the chunks are fenced: no thread that admits may give them other contents
            try:
                fixed = twin.raw, twin.params, admissions.listed, *self._fixed
                done: int = self._enter(*fixed, *room, stream.raw, event.raw, *tasks.native)
            except BaseException:  # a part of it may be under way
                for late in device.mark(stream), device.mark(self._uploads):
                    for one in admissions.chunks:
                        one.fences[late.stream_key] = late
                raise
            if done in (ENTERED, UPLOADED):
                for one in admissions.chunks:  # which of them the batch is in would cost more to find out
                    one.fences[key] = event
                device.last[key] = event
                counts = device._counts
                counts["launches"] += 1
                counts["uploads"] += done == UPLOADED
                counts["submissions"] += 1 + (done == UPLOADED)
        return done

    def _from_ring(self, twin: Book, tasks: TaskBatch, stream: AsyncStream, event: RecordedEvent) -> int:
        """The same where waiting requests have left the entries no room: the kernel reads them from the ring."""
        device = self._device
        span = self._span(len(tasks) * ENTRY.size + len(tasks.block_bytes) + len(tasks.more or b""))
        if span is None:
            return NOT_STAGED
        done = NOT_STAGED
        try:
            done = self._enter_batch(twin, tasks, (span.address, span.address, span.nbytes), stream, event)
        except BaseException:
            device.staging.fence(span, device.last[stream.stream_key])  # a part of it may be under way
            raise
        device.staging.fence(span, event) if done in (ENTERED, UPLOADED) else device.staging.drop(span)
        return done
