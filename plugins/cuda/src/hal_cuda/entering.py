"""New requests into slots by one small entry each: their bytes were staged at admission, the kernel does the rest.

This is ``insert_tasks`` for batches of new requests alone, the common case and the one that counts: of each request the
host writes 112 bytes and its block ids, whatever the length of the prompt. One upload and one launch a batch.
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
    from hal_core.state import SlotState
    from hal_core.tasks import TaskBatch

    from .device import CudaDevice

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
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
        admissions, entries = device.admissions, n * ENTRY.size
        with admissions.lock:  # until the chunks are fenced: no thread that admits may give them other contents
            room = admissions.room(entries + 4 * sum(tasks.plain["block_counts"]))  # first: it may empty a chunk
            found = None if room is None else (admissions.find_few if few else admissions.find)(numbers)
            if room is None or found is None:
                return None
            chunk, at = room
            try:
                longest = fill(state, tasks, found, chunk.block.buffer[at : chunk.used])
                self._upload(chunk, chunk.block.buffer[at : at + entries])
                for other in admissions.chunks:
                    other.order(stream)
                self._launch(state, n, longest, chunk.block.mirror + at, stream)
            finally:
                event = device.events.record(stream.handle)
                for other in admissions.chunks:  # few; which of them the batch is in would cost more to find out
                    other.fences[event.lane] = event
        return CudaTicket(event)

    def _launch(self, state: SlotState, n: int, longest: int, entries: int, stream: CudaStream) -> None:
        device, kernel = self._device, self._device.kernels.enter
        if device.reads.under_way:
            device.reads.order(state.memory, stream)
        kernel.load(self._known[state])
        WHERE.pack_into(kernel.buffer, 0, entries, entries + n * ENTRY.size)
        kernel.launch(n, THREADS, stream.handle, 1 - (-longest * 8 // PIECE))
        device.count_launch()

    def _upload(self, chunk: Chunk, entries: Bytes) -> None:
        """Copy what the chunk has gained, the entries at its end included, to the device, on a stream of its own.

        That another chunk has new bytes is rare: of that one the kernel reads the pinned memory.
        """
        device, block, begin = self._device, chunk.block, chunk.uploaded
        for other in device.admissions.chunks:
            if other is not chunk and other.used > other.uploaded:
                _read_in_place(other, entries)
        result = device.driver.api.cuMemcpyHtoDAsync(
            block.mirror + begin, block.address + begin, chunk.used - begin, self._uploads.handle
        )
        device.driver.ok(result, "cuMemcpyHtoDAsync")
        event = device.events.record(self._uploads.handle)
        chunk.fences[event.lane] = chunk.arrival = event
        chunk.ordered.clear()
        chunk.uploaded = chunk.used
        device.count("uploads")
        device.count("submissions")


def _read_in_place(chunk: Chunk, entries: Bytes) -> None:
    """Let the entries whose requests are in this chunk, beyond what was uploaded, name its pinned memory."""
    sources = entries.view(np.int64).reshape(-1, ENTRY.size // 8)[:, SOURCE]
    mirror = chunk.block.mirror
    sources[(sources >= mirror + chunk.uploaded) & (sources < mirror + chunk.used)] += chunk.block.address - mirror


def _fill(state: SlotState, tasks: TaskBatch, addresses: Int64s, buffer: Bytes) -> int:
    """Write entries and block ids; the longest token row, in elements, that is written or reset."""
    n, counts, blocks = len(tasks), tasks.plain["block_counts"], tasks.blocks.view(np.uint8)
    entries = buffer[: n * ENTRY.size].view(np.int64).reshape(n, -1)
    entries[:, :SOURCE] = written = state.ledger.table[tasks.slots]
    entries[:, SOURCE] = addresses
    entries[:, SOURCE + 1] = tasks.slots
    entries[:, SOURCE + 2] = tasks.starts
    entries[:, SOURCE + 3] = tasks.lengths
    entries[:, SOURCE + 4] = tasks.block_counts
    entries[:, SOURCE + 5] = list(accumulate(counts[:-1], initial=0))
    buffer[n * ENTRY.size : n * ENTRY.size + len(blocks)] = blocks
    return int(np.maximum(written[:, TOKENS], tasks.brief(state.layout)[:, TOKENS]).max())


def _fill_few(state: SlotState, tasks: TaskBatch, addresses: list[int], buffer: Bytes) -> int:
    """The same for a few requests, without NumPy calls whose cost is all overhead."""
    plain, table, data = tasks.plain, state.ledger.table, buffer.data
    starts, lengths, counts = plain["starts"], plain["lengths"], plain["block_counts"]
    at, longest = 0, 0
    for i, slot in enumerate(plain["slots"]):
        written = table[slot].tolist()
        longest = max(longest, written[TOKENS], tasks.requests[i].total)
        ENTRY.pack_into(data, i * ENTRY.size, *written, addresses[i], slot, starts[i], lengths[i], counts[i], at)
        at += counts[i]
    ids = tasks.block_ids[0] if len(tasks) == 1 else tasks.blocks
    begin = len(tasks) * ENTRY.size
    data[begin : begin + ids.nbytes] = ids.tobytes()
    return longest
