"""Write plans: the writes of a device as data that can be tested without a device.

A plan has two parts, written in this order and never overlapping:

- ``records``: packed per-request records that the device spreads over the fields by a registered :data:`SCATTER_MAP`;
- ``writes``: descriptors, each a run of bytes taken from ``payload`` or filled with a pattern.

A device submits a plan without any knowledge of requests, fields or tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InvalidValue
from .copies import Bytes
from .views import Memory

Buffer = Any
"""bytes, or a contiguous uint8 array (which type checkers accept as a buffer from Python 3.12 on)."""
Ints = np.ndarray[Any, np.dtype[np.int64]]

WRITE = np.dtype([("dst", "<u8"), ("source", "<u8"), ("nbytes", "<u4"), ("pattern_bytes", "<u4")])
"""One descriptor, 24 bytes. ``dst``: byte offset into the memory. ``pattern_bytes`` 0: copy ``nbytes`` from byte
``source`` of the payload. ``pattern_bytes`` 1, 2, 4 or 8: fill ``nbytes`` with a pattern of that many bytes, which
``source`` holds repeated to 8 bytes (so that a device may write 8 bytes at a time at any aligned address)."""

LONGEST = 2**32 - 1
"""Bytes of the longest write that a descriptor holds."""

SCATTER_MAP = np.dtype([("base", "<u8"), ("stride", "<u8"), ("source", "<u4"), ("nbytes", "<u4")])
"""One field of a record: ``nbytes`` from byte ``source`` of the record go to ``base + slot * stride``."""


@dataclass(frozen=True, slots=True)
class Records:
    """Packed records for some slots: ``slots`` int32 ``[n]``, distinct; ``data`` uint8 ``[n, record bytes]``;
    ``scatter_map`` the map of dtype :data:`SCATTER_MAP`, the same object for every plan of a state."""

    slots: np.ndarray[Any, np.dtype[np.int32]]
    data: Bytes
    scatter_map: np.ndarray[Any, np.dtype[np.void]]


class WritePlan:
    """All writes of one submission to ``memory``; see the module's text. Immutable.

    The payload is given as ``pieces``, consecutive bytes or contiguous uint8 arrays, so that a device can join them in
    its upload buffer.
    """

    __slots__ = ("_payload", "memory", "pieces", "records", "writes")

    def __init__(
        self,
        memory: Memory,
        writes: np.ndarray[Any, np.dtype[np.void]],
        pieces: Sequence[Buffer],
        records: Records | None = None,
    ) -> None:
        self.memory, self.writes, self.pieces, self.records = memory, writes, pieces, records
        self._payload: Bytes | None = None

    @property
    def payload(self) -> Bytes:
        """Return the pieces as one uint8 array."""
        if self._payload is None:
            payload = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
            self._payload = np.frombuffer(payload, np.uint8)
        return self._payload

    @property
    def empty(self) -> bool:
        """True for a plan without writes."""
        return len(self.writes) == 0 and self.records is None

    def joined(self, other: WritePlan) -> WritePlan:
        """Return this plan and a disjoint one of the same memory as one plan; the other must have no records."""
        flat = other.flat()
        writes = flat.writes.copy()
        writes["source"][writes["pattern_bytes"] == 0] += np.uint64(
            sum([memoryview(piece).nbytes for piece in self.pieces])
        )
        return WritePlan(self.memory, np.concatenate([self.writes, writes]), [*self.pieces, *flat.pieces], self.records)

    def flat(self) -> WritePlan:
        """Return the same plan without records, for devices that support only descriptors."""
        if self.records is None:
            return self
        rec, payload = self.records, self.payload
        scatter_map, n, width = rec.scatter_map, len(rec.slots), rec.data.shape[1]
        flat = np.zeros((n, len(scatter_map)), WRITE)
        flat["dst"] = scatter_map["base"] + rec.slots[:, None].astype(np.uint64) * scatter_map["stride"]
        start = np.arange(n, dtype=np.uint64)[:, None] * np.uint64(width) + np.uint64(payload.nbytes)
        flat["source"] = start + scatter_map["source"]
        flat["nbytes"] = scatter_map["nbytes"]
        writes = np.concatenate([flat.reshape(-1), self.writes])
        return WritePlan(self.memory, writes, [payload, rec.data.reshape(-1)])


class PlanBuilder:
    """Collects writes: descriptors as an int64 matrix ``[n, 3]`` (dst, source, pattern_bytes << 32 | nbytes), and a
    payload.

    ``copy`` and ``fill`` check their arguments; ``runs``, the unchecked part of ``copy``, is for hot paths.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._rows: list[Ints] = []
        self._pieces: list[Buffer] = []
        self._size = 0

    def copy(self, offsets: Ints, lengths: Ints | int, data: Bytes) -> None:
        """Write ``data`` (uint8, consecutive runs) to ``offsets``; ``lengths`` bytes each.

        :raises InvalidValue: if ``data`` has another number of bytes than the runs together.
        """
        if len(offsets) == 0:
            return
        check_lengths(lengths)
        together = lengths * len(offsets) if isinstance(lengths, int) else int(lengths.sum())
        if together != data.nbytes:
            raise InvalidValue(f"{data.nbytes} bytes for runs of {together} bytes in total", argument="data")
        self.runs(offsets, lengths, [data])

    def fill(self, offsets: Ints, lengths: Ints | int, value: np.generic) -> None:
        """Fill ``lengths`` bytes at each of ``offsets`` with the element ``value`` (its own bytes, repeated)."""
        if len(offsets) == 0:
            return
        check_lengths(lengths)
        pattern = value.tobytes()
        cycle = int.from_bytes(pattern * (8 // len(pattern)), "little", signed=True)
        rows = np.empty((len(offsets), 3), np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2] = offsets, cycle, (len(pattern) << 32) | lengths
        self._rows.append(rows)

    def runs(self, dst: Ints, nbytes: Ints | int, pieces: Sequence[Buffer]) -> None:
        """Copy consecutive pieces in runs of ``nbytes`` to ``dst``."""
        rows = np.empty((len(dst), 3), np.int64)
        rows[:, 0], rows[:, 2] = dst, nbytes
        if len(rows) == 1:
            rows[0, 1] = self._size
            self._size += int(rows[0, 2])
        else:
            ends = rows[:, 2].cumsum() + self._size
            rows[:, 1] = ends - rows[:, 2]
            self._size = int(ends[-1])
        self._rows.append(rows)
        self._pieces += pieces

    def build(self, *, inside: bool = False, disjoint: bool = False) -> WritePlan:
        """Return the plan; of two overlapping writes the last wins (G4).

        ``inside``: the caller guarantees that the writes lie inside the memory and are not empty. ``disjoint``: that
        they do not overlap either.

        :raises InvalidValue: for a write that begins or ends outside the memory.
        """
        rows = self._rows[0] if len(self._rows) == 1 else np.concatenate([_NO_ROWS, *self._rows])
        writes: np.ndarray[Any, np.dtype[np.void]] = rows.reshape(-1).view(WRITE)
        if not inside and not disjoint:
            writes = writes[writes["nbytes"] > 0]
            if len(writes) and (first := int(writes["dst"].view(np.int64).min())) < 0:  # its end may wrap around
                raise InvalidValue(f"a write begins at offset {first}", cure="count from 0", argument="plan")
            if len(writes) and int((writes["dst"] + writes["nbytes"]).max()) > self.memory.nbytes:
                raise InvalidValue("a write ends outside the memory", argument="plan")
        return WritePlan(self.memory, writes if disjoint else last_wins(writes), self._pieces)


_NO_ROWS = np.zeros((0, 3), np.int64)


def check_lengths(lengths: Ints | int) -> None:
    """Raise :class:`InvalidValue` for a run of more bytes than a descriptor holds."""
    longest = lengths if isinstance(lengths, int) else int(lengths.max(initial=0))
    if longest > LONGEST:
        raise InvalidValue(f"a write of {longest} bytes", cure="give less than 4 GiB at once", argument="plan")


def last_wins(writes: np.ndarray[Any, np.dtype[np.void]]) -> np.ndarray[Any, np.dtype[np.void]]:
    """Return writes with the same effect without overlaps: earlier writes lose the bytes that later ones write."""
    if len(writes) < 2:
        return writes
    order = np.argsort(writes["dst"], kind="stable")
    begin = writes["dst"][order]
    if bool((begin[:-1] + writes["nbytes"][order][:-1] <= begin[1:]).all()):
        return writes
    kept: list[tuple[int, int, int, int]] = []
    taken: list[tuple[int, int]] = []  # sorted, disjoint byte ranges that later writes fill
    for dst, source, nbytes, pattern_bytes in reversed(writes.tolist()):
        for low, high in _uncovered(dst, dst + nbytes, taken):
            kept.append((low, _advance_source(source, low - dst, pattern_bytes), high - low, pattern_bytes))
        taken = _merged(taken, (dst, dst + nbytes))
    return np.array(kept[::-1], WRITE)


def _advance_source(source: int, skipped: int, pattern_bytes: int) -> int:
    """Return the source of a write after ``skipped`` bytes; a pattern is rotated by them."""
    if pattern_bytes == 0:
        return source + skipped
    turned = (skipped % 8) * 8
    return ((source >> turned) | (source << (64 - turned))) & 0xFFFF_FFFF_FFFF_FFFF if turned else source


def _uncovered(low: int, high: int, taken: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of ``[low, high)`` that no range of ``taken`` covers."""
    parts = []
    for begin, end in taken:
        if end <= low or begin >= high:
            continue
        if begin > low:
            parts.append((low, begin))
        low = max(low, end)
    if low < high:
        parts.append((low, high))
    return parts


def _merged(taken: list[tuple[int, int]], new: tuple[int, int]) -> list[tuple[int, int]]:
    """Return ``taken`` with ``new`` added, sorted and disjoint."""
    low, high = new
    rest = []
    for begin, end in taken:
        if end < low or begin > high:
            rest.append((begin, end))
        else:
            low, high = min(low, begin), max(high, end)
    return sorted([*rest, (low, high)])


def apply_to_host(plan: WritePlan, buffer: Bytes) -> None:
    """Write a plan into host memory: the reference for every device's submission.

    ``buffer`` is uint8 ``[memory.nbytes]``. The cpu device runs this, and a device's tests compare with it.
    """
    write_to_host(plan.writes, plan.payload, plan.records, buffer)


def write_to_host(
    writes: np.ndarray[Any, np.dtype[np.void]], payload: Bytes, records: Records | None, buffer: Bytes
) -> None:
    """Write the parts of a plan into host memory."""
    if records is not None:
        _spread_to_host(records, buffer)
    target = buffer.data
    for dst, data in runs_of(writes, payload):
        target[dst : dst + len(data)] = data


def runs_of(writes: np.ndarray[Any, np.dtype[np.void]], payload: Bytes) -> Iterator[tuple[int, Buffer]]:
    """Yield the offset of each write and its bytes: a part of the payload, or the repeated pattern of a fill."""
    given = payload.data
    for dst, source, nbytes, pattern in writes.tolist():
        if pattern == 0:
            yield dst, given[source : source + nbytes]
        else:
            yield dst, (source.to_bytes(8, "little") * (nbytes // 8 + 1))[:nbytes]


def _spread_to_host(records: Records, buffer: Bytes) -> None:
    for base, stride, source, nbytes in records.scatter_map.tolist():
        rows = np.lib.stride_tricks.as_strided(
            buffer[base:], (int(records.slots.max()) + 1, nbytes), (stride, 1), writeable=True
        )
        rows[records.slots] = records.data[:, source : source + nbytes]
