"""New requests into slots by one small entry each: their bytes were staged at admission, the kernel does the rest.

This is ``insert_tasks`` for batches of new requests alone, the common case and the one that counts: of each request the
host writes 112 bytes and its block ids, whatever the length of the prompt. At most one upload and one launch a batch.
"""

from __future__ import annotations

import weakref
from itertools import accumulate
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.layout import BRIEF, STAGED
from hal_core.ledger import FEW, TOKENS
from hal_core.state import DYNAMIC
from hal_core.tickets import Ticket

from .admissions import HEAD, Chunk
from .launching import ENTER, THREADS
from .streams import CudaStream, CudaTicket

if TYPE_CHECKING:
    from hal_core.staging import Span
    from hal_core.state import SlotState
    from hal_core.tasks import TaskBatch

    from .device import CudaDevice

Int64s = np.ndarray[Any, np.dtype[np.int64]]
ENTRY = Struct("<8q6q")
"""One request: ``Entry`` of kernels/enter.cu. The ledger's row of its slot comes first."""
SOURCE = 8
"""Column of the entries' matrix, after that row."""
BRIEFS = Struct("<8q")
PIECE = 16 << 10
"""Bytes of a token row that one block of threads writes; ``PIECE`` of kernels/enter.cu."""
WHERE = Struct("<QQ")
"""The parameters that differ from launch to launch: ``entries`` and ``blocks``."""
assert BRIEFS.size == BRIEF.itemsize


class Entering:
    """Inserts batches of staged requests for one device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._known: weakref.WeakKeyDictionary[SlotState, bytes] = weakref.WeakKeyDictionary()
        self._uploads = device._new_stream()

    def adopt(self, state: SlotState, spread: int) -> None:
        """Describe a state to the kernel, once; ``spread`` is the address of its spread table."""
        params, places = np.zeros(1, ENTER), state.layout.fields
        params["memory"], params["spread"], params["fields"] = state.memory.address, spread, len(state.spread)
        params["dynamic"] = [places[name].offset for name in DYNAMIC]
        params["rows_at"] = -(-(HEAD.size + state.layout.record_dtype.itemsize) // 16) * 16
        for at, (base, stride, size, cycle) in enumerate(state.rows.plain):
            params["rows"][0, at] = (base, stride, cycle & (2**64 - 1), size)
        self._known[state] = params.tobytes()

    def submit(self, state: SlotState, tasks: TaskBatch, stream: CudaStream) -> Ticket | None:
        """Put the batch into its slots; None, with nothing done, where a request is not staged or it does not fit."""
        device, few, n = self._device, len(tasks) <= FEW, len(tasks)
        numbers: Any  # a list for a few requests, an array for many
        fill: Any = _fill_few if few else _fill
        if few:
            numbers = [BRIEFS.unpack(request.brief)[STAGED] for request in tasks.requests]
            if 0 in numbers:
                return None
        else:
            numbers = tasks.brief(state.layout)[:, STAGED]
        nbytes = n * ENTRY.size + 4 * sum(tasks.plain["block_counts"])
        if nbytes > device.ring.limit:
            return None
        span = device.ring.take(nbytes)
        admissions = device.admissions
        with admissions.lock:  # until the chunks are fenced: no thread that admits may give them other contents
            found = admissions.find_few(numbers) if few else admissions.find(numbers)
            if found is None:
                device.ring.drop(span)
                return None
            try:
                longest = fill(state, tasks, found, span)
                self._upload(span, n, stream)
                for chunk in admissions.chunks:
                    chunk.order(stream)
                self._launch(state, n, longest, span, stream)
            finally:
                event = device.events.record(stream.handle)
                device.ring.fence(span, event)
                for chunk in admissions.chunks:  # few; which of them the batch is in would cost more to find out
                    chunk.fences[event.lane] = event
        return CudaTicket(event)

    def _launch(self, state: SlotState, n: int, longest: int, span: Span, stream: CudaStream) -> None:
        """The kernel reads the entries from pinned memory itself: they are small, and a copy costs the host more."""
        device, kernel = self._device, self._device.kernels.enter
        if device.reads.under_way:
            device.reads.order(state.memory, stream)
        kernel.load(self._known[state])
        WHERE.pack_into(kernel.buffer, 0, span.address, span.address + n * ENTRY.size)
        kernel.launch(n, THREADS, stream.handle, 1 - (-longest * 8 // PIECE))
        device.count_launch()

    def _upload(self, span: Span, n: int, stream: CudaStream) -> None:
        """Copy the new bytes of the chunk that has most of them to the device, on a stream of their own.

        Several chunks with new bytes are rare: of the others the kernel reads the pinned memory.
        """
        dirty = [chunk for chunk in self._device.admissions.chunks if chunk.used > chunk.uploaded]
        if not dirty:
            return
        largest = max(dirty, key=lambda chunk: chunk.used - chunk.uploaded)
        for chunk in dirty:
            if chunk is not largest:
                _read_in_place(chunk, span, n)
        device, block, begin = self._device, largest.block, largest.uploaded
        result = device.driver.api.cuMemcpyHtoDAsync(
            block.mirror + begin, block.address + begin, largest.used - begin, self._uploads.handle
        )
        device.driver.ok(result, "cuMemcpyHtoDAsync")
        event = device.events.record(self._uploads.handle)
        largest.fences[event.lane] = largest.arrival = event
        largest.ordered.clear()
        largest.uploaded = largest.used
        device.count("uploads")
        device.count("submissions")


def _fill(state: SlotState, tasks: TaskBatch, addresses: Int64s, span: Span) -> int:
    """Fill the span with entries and block ids; the longest token row, in elements, that is written or reset."""
    n, counts, buffer = len(tasks), tasks.plain["block_counts"], span.buffer
    entries = buffer[: n * ENTRY.size].view(np.int64).reshape(n, -1)
    entries[:, :SOURCE] = written = state.ledger.table[tasks.slots]
    entries[:, SOURCE] = addresses
    entries[:, SOURCE + 1] = tasks.slots
    entries[:, SOURCE + 2] = tasks.starts
    entries[:, SOURCE + 3] = tasks.lengths
    entries[:, SOURCE + 4] = tasks.block_counts
    entries[:, SOURCE + 5] = list(accumulate(counts[:-1], initial=0))
    buffer[n * ENTRY.size :] = tasks.blocks.view(np.uint8)
    return int(np.maximum(written[:, TOKENS], tasks.brief(state.layout)[:, TOKENS]).max())


def _fill_few(state: SlotState, tasks: TaskBatch, addresses: list[int], span: Span) -> int:
    """The same for a few requests, without NumPy calls whose cost is all overhead."""
    plain, table, buffer = tasks.plain, state.ledger.table, span.buffer.data
    starts, lengths, counts = plain["starts"], plain["lengths"], plain["block_counts"]
    at, longest = 0, 0
    for i, slot in enumerate(plain["slots"]):
        written = table[slot].tolist()
        longest = max(longest, written[TOKENS], tasks.requests[i].total)
        ENTRY.pack_into(buffer, i * ENTRY.size, *written, addresses[i], slot, starts[i], lengths[i], counts[i], at)
        at += counts[i]
    blocks: Any = tasks.block_ids
    buffer[len(tasks) * ENTRY.size :] = blocks[0].data.cast("B") if len(blocks) == 1 else tasks.blocks.data.cast("B")
    return longest


def _read_in_place(chunk: Chunk, span: Span, n: int) -> None:
    """Let the entries whose requests are in this chunk, beyond what was uploaded, name its pinned memory."""
    sources = span.buffer[: n * ENTRY.size].view(np.int64).reshape(n, -1)[:, SOURCE]
    mirror = chunk.block.mirror
    sources[(sources >= mirror + chunk.uploaded) & (sources < mirror + chunk.used)] += chunk.block.address - mirror
