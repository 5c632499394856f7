"""Insertion by one small entry per request, from the batch's columns to the event in one native call (insertion.c).

A request's bytes were staged at admission, and the kernel does the rest: for each request the host writes 128 bytes and
its block ids, whatever the length of the prompt. Hand-offs, pieces of prompts and additional blocks are part of the
same call. A batch with a leaving request uses the general path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hal_core.devices import DYNAMIC, RecordedEvent

from .native import NativeHostTable
from .structs import ENTER, ENTRY, FEW_BYTES, HANDED

if TYPE_CHECKING:
    from hal_core import SlotState, TaskBatch, Ticket
    from hal_core.devices import AsyncStream, Span

    from .base import OnNative

Room = tuple[int, int, int]
"""Where entries are written: address on the host, address for the kernel, bytes."""
NEAR = 64 << 10
"""Bytes: up to this many new ones are read by the kernel from pinned memory, without an upload. For one request of
1,024 tokens that saves the host 8 to 10 us, and costs the GPU 2.2 us (docs/evidence/native.md)."""
FEW = FEW_BYTES
"""Bytes of entries and block ids that are passed in the launch itself, so that the kernel reads them from no memory;
this saves 1 to 3 us of the GPU. 0: none. Not used beside an upload, as such a launch takes 0.3 us longer."""
TAIL: Room = (0, 0, 0)
"""Entries are placed after the requests of the chunk being filled."""
NOT_STAGED, ENTERED, UPLOADED, NO_ROOM, CAPTURED = range(5)
"""Results of ``enter``; all but the second and the third had no effect. The general path, tried next, refuses a
captured stream."""


class Insertion:
    """Inserts batches of staged requests for one device."""

    def __init__(self, device: OnNative) -> None:
        self._device = device
        self._upload_stream = device.stream()
        self._enter, self._free = device.native.calls.enter, device.events.free
        self._landed: RecordedEvent | None = device.events.take(self._upload_stream)  # recorded by each upload
        functions = device.kernels.enter.function, device.kernels.enter_few.function if FEW else 0
        self._fixed = device.staged_requests.table, NEAR, self._upload_stream.raw, self._landed.raw, *functions

    @staticmethod
    def describe(state: SlotState, scatter_map: int) -> bytes:
        """Return the kernel's parameters for a state; ``scatter_map`` is the address of its scatter map."""
        params, places = np.zeros(1, ENTER), state.layout.fields
        params["memory"], params["spread"], params["fields"] = state.memory.address, scatter_map, len(state.scatter_map)
        params["dynamic"] = [places[name].offset for name in DYNAMIC]
        params["handed"] = [places[name].offset for name in HANDED]
        params["drafts"], record = places["draft_tokens"].width, state.layout.record_dtype
        assert record.fields is not None
        params["step_at"], params["rows_at"] = record.fields["step_idx"][1], -(-record.itemsize // 16) * 16
        for at, (base, stride, size, cycle) in enumerate(state.row_geometry):
            params["rows"][0, at] = (base, stride, cycle & (2**64 - 1), size)
        return params.tobytes()

    def submit(self, state: SlotState, tasks: TaskBatch, stream: AsyncStream) -> Ticket | None:
        """Insert the batch into its slots. Return None without any effect if a request leaves or is not staged, or the
        batch does not fit."""
        twin = state.host_table.twin
        if type(twin) is not NativeHostTable:
            return None
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
        """Release the event of uploads, before the device's events are destroyed."""
        self._landed = None

    def _enter_batch(
        self, twin: NativeHostTable, tasks: TaskBatch, room: Room, stream: AsyncStream, event: RecordedEvent
    ) -> int:
        """Return the result of ``enter``; ``event`` is then recorded after the batch."""
        device, staged_requests, key = self._device, self._device.staged_requests, event.stream_key
        with staged_requests.lock:  # until the chunks are fenced: admitting threads must not overwrite them
            try:
                fixed = twin.raw, twin.params, staged_requests.listed, *self._fixed
                done: int = self._enter(*fixed, *room, stream.raw, event.raw, tasks.ints, tasks.rows)
            except BaseException:  # part of the batch may be in flight
                for late in device.mark(stream), device.mark(self._upload_stream):
                    for one in staged_requests.chunks:
                        one.fences[late.stream_key] = late
                raise
            if done in (ENTERED, UPLOADED):
                for one in staged_requests.chunks:  # finding the batch's own chunks would cost more
                    one.fences[key] = event
                device.last[key] = event
                counts = device._counts
                counts["launches"] += 1
                counts["uploads"] += done == UPLOADED
                counts["submissions"] += 1 + (done == UPLOADED)
        return done

    def _from_ring(self, twin: NativeHostTable, tasks: TaskBatch, stream: AsyncStream, event: RecordedEvent) -> int:
        """Do the same with the entries in the ring, if waiting requests left no room for them in a chunk."""
        device = self._device
        span = self._span(len(tasks) * ENTRY.size + len(tasks.ints))
        if span is None:
            return NOT_STAGED
        done = NOT_STAGED
        try:
            done = self._enter_batch(twin, tasks, (span.address, span.address, span.nbytes), stream, event)
        except BaseException:
            device.fence(span, stream)  # part of the batch may be in flight
            raise
        device.staging.fence(span, event) if done in (ENTERED, UPLOADED) else device.staging.drop(span)
        return done

    def _span(self, nbytes: int) -> Span | None:
        """Return room for entries in the ring, whose pinned memory the kernel reads; None beyond the ring's limit."""
        ring = self._device.staging
        return ring.take(nbytes) if nbytes <= ring.limit else None
