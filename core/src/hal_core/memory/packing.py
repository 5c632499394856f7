"""Packing of a write plan into the bytes of a staging block, and back. Plain NumPy, no device.

A block is: descriptors, slots, records, payload, each on a 16-byte boundary (the widest load of the kernel).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .copies import Bytes
from .plan import WRITE, Records, WritePlan, write_to_host

LONGEST_WRITE = 16 << 10
"""Bytes of a descriptor at most: a longer copy or fill is cut into several, which blocks of threads share."""

JOINED = 96 << 10
"""Bytes; up to this size joining bytes and copying once is faster than many small copies. Above it, the joined bytes
would be fresh pages each time (malloc maps them), which costs more than the copies."""


def _up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


class Packed(NamedTuple):
    """The layout of a plan in its staging block of ``nbytes``.

    ``writes`` and ``records``: how many, of which each record has ``record_bytes``. The descriptors come first, the
    rest at these byte offsets.
    """

    nbytes: int
    writes: int
    records: int
    record_bytes: int
    slots_at: int
    records_at: int
    payload_at: int

    @classmethod
    def of(cls, plan: WritePlan) -> Packed:
        """Lay out a plan's block."""
        at = _up(plan.writes.nbytes)
        records = plan.records
        count = 0 if records is None else len(records.slots)
        slots_at, records_at = at, at
        if records is not None:
            records_at = _up(slots_at + 4 * count)
            at = _up(records_at + records.data.nbytes)
        size = sum(map(len, plan.pieces))
        width = 0 if records is None else records.data.shape[1]
        return cls(at + size, len(plan.writes), count, width, slots_at, records_at, at)

    def fill(self, block: Bytes, plan: WritePlan) -> None:
        """Write the plan into the block; after this the plan's arrays may change (G2)."""
        parts = [plan.writes.tobytes()]
        if plan.records is not None:
            slots, data = plan.records.slots, plan.records.data
            parts += [_gap(plan.writes.nbytes, self.slots_at), slots.tobytes()]
            parts += [_gap(self.slots_at + slots.nbytes, self.records_at), data.tobytes()]
            parts.append(_gap(self.records_at + data.nbytes, self.payload_at))
        else:
            parts.append(_gap(plan.writes.nbytes, self.payload_at))
        if self.nbytes <= JOINED:
            block[: self.nbytes] = np.frombuffer(b"".join([*parts, *plan.pieces]), np.uint8)
            return
        block[: self.payload_at] = np.frombuffer(b"".join(parts), np.uint8)
        view, at = memoryview(block.data), self.payload_at
        for piece in plan.pieces:
            end = at + len(piece)
            view[at:end] = piece.data if isinstance(piece, np.ndarray) else piece
            at = end


def _gap(begin: int, end: int) -> bytes:
    return bytes(end - begin)


def apply_packed(packed: Packed, block: Bytes, scatter_map: np.ndarray[Any, np.dtype[np.void]], buffer: Bytes) -> None:
    """Apply to host memory the plan that is packed in ``block``: the reference for the launch of a plan.

    ``scatter_map`` is the table of its records (dtype :data:`hal_core.memory.plan.SCATTER_MAP`), ``buffer`` uint8
    ``[memory.nbytes]``.
    """
    records, end = None, packed.records_at + packed.records * packed.record_bytes
    if packed.records:
        slots = block[packed.slots_at :][: 4 * packed.records].view(np.int32)
        records = Records(slots, block[packed.records_at : end].reshape(packed.records, -1), scatter_map)
    writes = block[: packed.writes * WRITE.itemsize].view(WRITE)
    write_to_host(writes, block[packed.payload_at : packed.nbytes], records, buffer)


def cut_long_writes(plan: WritePlan) -> WritePlan:
    """Return the same plan with no copy or fill longer than ``LONGEST_WRITE``; the plan itself if it has none."""
    writes = plan.writes
    if not len(writes) or int(writes["nbytes"].max()) <= LONGEST_WRITE:
        return plan
    return WritePlan(plan.memory, cut(writes, LONGEST_WRITE), plan.pieces, plan.records)


def cut(writes: np.ndarray[Any, np.dtype[np.void]], longest: int) -> np.ndarray[Any, np.dtype[np.void]]:
    """Return the same writes, cut to at most ``longest`` bytes each (a multiple of 8, a whole cycle of a pattern)."""
    parts = (writes["nbytes"].astype(np.int64) + longest - 1) // longest
    index = np.repeat(np.arange(len(writes)), parts)
    first = np.cumsum(parts) - parts
    skip = (np.arange(len(index)) - first[index]).astype(np.uint64) * np.uint64(longest)
    rows = writes[index]
    rows["dst"] += skip
    rows["source"] += np.where(rows["pattern_bytes"] == 0, skip, 0).astype(np.uint64)
    rows["nbytes"] = np.minimum(writes["nbytes"][index] - skip, longest)
    return rows
