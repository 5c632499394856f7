"""Insertion of new requests by one small entry each: their bytes were staged at admission, and the kernel does the
rest.

This is ``insert_tasks`` for batches of only new requests, the common and critical case. For each request the host
writes 128 bytes and its block ids, whatever the length of the prompt. One upload and one launch a batch.
"""

from __future__ import annotations

import weakref
from itertools import accumulate
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import Ticket
from hal_core.devices import ADMISSION_ID, DYNAMIC, FEW, ROW_FIELDS, TOKENS

from .admissions import Chunk
from .structs import ENTER, ENTRY, HANDED, PIECE, THREADS

if TYPE_CHECKING:
    from hal_core import SlotState, TaskBatch
    from hal_core.devices import AsyncStream, RecordedEvent, Span

    from .base import OnGpu

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Int64s = np.ndarray[Any, np.dtype[np.int64]]
ROWS = len(ROW_FIELDS)
"""Columns of two numbers, ``Lengths`` of kernels/enter.cu: the lower from the host table; the upper the request's."""
SOURCE = 8
"""Column of the entries' matrix, after that row."""
NO_HAND_OFF = (-1, 0)
"""The last columns: no first token, no drafts."""
WHERE = Struct("<QQ")
"""The parameters that differ from launch to launch: ``entries`` and ``blocks``."""


class Entering:
    """Inserts batches of staged requests for one device."""

    def __init__(self, device: OnGpu) -> None:
        self._device = device
        self._known: weakref.WeakKeyDictionary[SlotState, bytes] = weakref.WeakKeyDictionary()
        self._uploads = device.stream()
        self._arrival: RecordedEvent | None = None  # the end of the last upload, and so of all before it

    def register_state(self, state: SlotState, scatter_map: int) -> None:
        """Describe a state to the kernel, once; ``scatter_map`` is the address of its scatter map."""
        params, places = np.zeros(1, ENTER), state.layout.fields
        params["memory"], params["spread"], params["fields"] = state.memory.address, scatter_map, len(state.scatter_map)
        params["dynamic"] = [places[name].offset for name in DYNAMIC]
        params["handed"] = [places[name].offset for name in HANDED]
        params["drafts"], record = places["draft_tokens"].width, state.layout.record_dtype
        assert record.fields is not None
        params["step_at"], params["rows_at"] = record.fields["step_idx"][1], -(-record.itemsize // 16) * 16
        for at, (base, stride, size, cycle) in enumerate(state.rows.plain):
            params["rows"][0, at] = (base, stride, cycle & (2**64 - 1), size)
        self._known[state] = params.tobytes()

    def params_of(self, state: SlotState) -> bytes:
        """Return a state's parameters of the kernel."""
        return self._known[state]

    def submit(self, state: SlotState, tasks: TaskBatch, stream: AsyncStream) -> Ticket | None:
        """Insert the batch into its slots. Return None without any effect if it has other tasks than new requests, one
        is not staged, or it does not fit."""
        if not tasks.all_prefill:
            return None
        self._device.check_stream(stream)
        device, n = self._device, len(tasks)
        few = n <= FEW
        fill: Any = _fill_few if few else _fill
        admissions, nbytes = device.admissions, n * ENTRY.size + 4 * sum(tasks.plain["block_counts"])
        if not admissions.has(tasks.requests[-1]):  # staged last, so the first without room
            return None
        span = (
            None if admissions.fits(nbytes) else self._span(nbytes)
        )  # before the lock, as it may wait for a full ring
        with admissions.lock:  # until the chunks are fenced: admitting threads must not overwrite them
            place = admissions.tail(nbytes) if span is None else None
            found: Any  # a list for a few requests, an array for many
            if few:
                found = admissions.find_few([request.admission_id for request in tasks.requests])
            else:
                found = admissions.find(tasks.request_row[:, ADMISSION_ID])
            if found is None or (place is None and span is None):
                if span is not None:
                    device.staging.drop(span)
                return None
            chunk, at = place or (None, 0)
            buffer = chunk.block.buffer[at : chunk.used] if chunk is not None else span.buffer  # type: ignore[union-attr]
            try:
                longest = fill(state, tasks, found, buffer)
                self._upload(chunk, buffer[: n * ENTRY.size])
                if self._arrival is not None:
                    stream.wait(self._arrival)
                entries = chunk.block.mirror + at if chunk is not None else span.address  # type: ignore[union-attr]
                self._launch(state, n, longest, entries, stream)
            finally:
                event = device.mark(stream)
                for one in admissions.chunks:  # few; finding the batch's own chunks would cost more
                    one.fences[event.stream_key] = event
                if span is not None:
                    device.staging.fence(span, event)
        return device.ticket_type(event)

    def close(self) -> None:
        """Release the last upload's event, before the device's events are destroyed."""
        self._arrival = None

    def _span(self, nbytes: int) -> Span | None:
        """Return room for entries in the ring, whose pinned memory the kernel reads; None beyond the ring's limit."""
        ring = self._device.staging
        return ring.take(nbytes) if nbytes <= ring.limit else None

    def _launch(self, state: SlotState, n: int, longest: int, entries: int, stream: AsyncStream) -> None:
        device, kernel = self._device, self._device.kernels.enter
        if device.reads.under_way:
            device.reads.order(state.memory, stream)
        kernel.load(self._known[state])
        WHERE.pack_into(kernel.buffer, 0, entries, entries + n * ENTRY.size)
        kernel.launch(n, THREADS, stream.handle, 3 - (-longest * 8 // PIECE))
        device.primitives.count("launches")

    def _upload(self, chunk: Chunk | None, entries: Bytes) -> None:
        """Copy a chunk's new bytes to the device, on a separate stream: those of ``chunk``, which holds the entries, or
        else of the chunk with the most.

        If another chunk also has new bytes, which is rare, the kernel reads its pinned memory.
        """
        device = self._device
        dirty = [one for one in device.admissions.chunks if one.used > one.uploaded]
        if not dirty:
            return
        chosen = chunk or max(dirty, key=lambda one: one.used - one.uploaded)
        for one in dirty:
            if one is not chosen:
                _read_in_place(one, entries)
        block, begin = chosen.block, chosen.uploaded
        device.primitives.copy_in(block.mirror + begin, block.address + begin, chosen.used - begin, self._uploads.raw)
        device.primitives.count("uploads")
        self._arrival = event = device.mark(self._uploads)
        chosen.fences[event.stream_key] = event
        chosen.uploaded = chosen.used


def _read_in_place(chunk: Chunk, entries: Bytes) -> None:
    """Point the entries of requests in this chunk, beyond its uploaded part, at its pinned memory."""
    sources = entries.view(np.int64).reshape(-1, ENTRY.size // 8)[:, SOURCE]
    mirror = chunk.block.mirror
    sources[(sources >= mirror + chunk.uploaded) & (sources < mirror + chunk.used)] += chunk.block.address - mirror


def _fill(state: SlotState, tasks: TaskBatch, addresses: Int64s, buffer: Bytes) -> int:
    """Write entries and block ids; return the longest token row, in elements, that is written or reset."""
    n, counts, blocks = len(tasks), tasks.plain["block_counts"], tasks.blocks.view(np.uint8)
    entries = buffer[: n * ENTRY.size].view(np.int64).reshape(n, -1)
    entries[:, :SOURCE] = written = state.host_table.table[tasks.slots]
    entries[:, :ROWS] |= tasks.request_row[:, :ROWS] << 32
    entries[:, SOURCE] = addresses
    entries[:, SOURCE + 1] = tasks.slots
    entries[:, SOURCE + 2] = tasks.num_computed_tokens
    entries[:, SOURCE + 3] = tasks.num_scheduled_tokens
    entries[:, SOURCE + 4] = tasks.block_counts
    entries[:, SOURCE + 5] = list(accumulate(counts[:-1], initial=0))
    entries[:, SOURCE + 6 :] = NO_HAND_OFF
    buffer[n * ENTRY.size : n * ENTRY.size + len(blocks)] = blocks
    return int(np.maximum(written[:, TOKENS], tasks.request_row[:, TOKENS]).max())


def _fill_few(state: SlotState, tasks: TaskBatch, addresses: list[int], buffer: Bytes) -> int:
    """Do the same for a few requests, without NumPy calls that would be all overhead.

    Without it and ``Admissions.find_few`` the host's part of an insertion of 1 request takes 85 % longer, of 8 requests
    28 % (``python benchmarks/few.py stand-in``, medians of 800 in turn, 2026-11-22).
    """
    plain, table, data = tasks.plain, state.host_table.table, buffer.data
    starts, lengths, counts = plain["num_computed_tokens"], plain["num_scheduled_tokens"], plain["block_counts"]
    at, longest = 0, 0
    for i, slot in enumerate(plain["slots"]):
        written, request = table[slot].tolist(), tasks.requests[i]
        longest = max(longest, written[TOKENS], request.total)
        rows = [was | own << 32 for was, own in zip(written[:ROWS], request.row_lengths, strict=True)]
        others = addresses[i], slot, starts[i], lengths[i], counts[i], at, *NO_HAND_OFF
        ENTRY.pack_into(data, i * ENTRY.size, *rows, *written[ROWS:], *others)
        at += counts[i]
    ids = tasks.block_ids[0] if len(tasks) == 1 else tasks.blocks
    begin = len(tasks) * ENTRY.size
    data[begin : begin + ids.nbytes] = ids.tobytes()
    return longest
