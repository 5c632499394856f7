"""Conversion of a write plan to elements: for each width an index array and the values, for one in-place scatter each.

Every run of bytes is written in the widest elements that its address and length allow, so a whole plan is at most one
scatter of 8, 4, 2 and 1 bytes each, whatever the number of requests. For devices whose framework can scatter elements,
but launch no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .copies import Bytes
from .packing import cut
from .plan import Records, WritePlan, runs_of

WIDTHS = (8, 4, 2, 1)
Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
Rows = np.ndarray[Any, np.dtype[np.void]]


@dataclass
class Elements:
    """Writes in elements of ``width`` bytes: pieces of element indices, and pieces of values."""

    width: int
    indices: list[Ints] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    count: int = 0

    def add(self, indices: Ints, values: list[Any]) -> None:
        """Add elements; the values are buffers with a total of ``width`` bytes per index."""
        self.indices.append(indices)
        self.values += values
        self.count += indices.size

    def fill(self, indices: Ints, values: Bytes) -> None:
        """Copy all pieces into two flat arrays."""
        at = 0
        for piece in self.indices:
            indices[at : at + piece.size] = piece.reshape(-1)
            at += piece.size
        values[...] = np.frombuffer(b"".join(self.values), np.uint8)


class ScatterColumns:
    """A scatter map as columns: for each width, which bytes of a record go to which elements."""

    def __init__(self, scatter_map: Rows, shift: int, widest: int) -> None:
        self.keep = scatter_map  # kept alive, as its id() is its key
        found: dict[int, list[tuple[Ints, Ints, Ints]]] = {}
        for base, stride, source, nbytes in scatter_map.tolist():
            width = int(_width(np.int64((base + shift) | stride | nbytes), widest))
            first = (base + shift) // width + np.arange(nbytes // width)
            step = np.full(nbytes // width, stride // width)
            found.setdefault(width, []).append((source + np.arange(nbytes), first, step))
        self.columns = {
            width: tuple(np.concatenate(part) for part in zip(*columns, strict=True))
            for width, columns in found.items()
        }

    def add(self, records: Records, into: dict[int, Elements]) -> None:
        """Add the elements of these records."""
        slots = records.slots.astype(np.int64)[:, None]
        for width, (columns, first, step) in self.columns.items():
            values = np.ascontiguousarray(records.data[:, columns])
            into.setdefault(width, Elements(width)).add(first + slots * step, [values])


def elements(plan: WritePlan, shift: int, widest: int, columns: ScatterColumns | None) -> dict[int, Elements]:
    """Return the plan's elements by width. ``shift``: bytes from the storage's start to the memory's; ``widest``: the
    widest element that may be used; ``columns``: those of the plan's scatter map."""
    found: dict[int, Elements] = {}
    if plan.records is not None and columns is not None:
        columns.add(plan.records, found)
    writes = plan.writes
    if not len(writes):
        return found
    starts = writes["dst"].astype(np.int64) + shift
    sizes = writes["nbytes"].astype(np.int64)
    widths = _width(starts | sizes, widest)
    for width in np.unique(widths).tolist():
        chosen = np.flatnonzero(widths == width)
        into = found.setdefault(width, Elements(width))
        into.add(_indices(starts[chosen], sizes[chosen], width), _values(writes[chosen], plan.payload))
    return found


FEW = 16
"""Number of writes up to which each is a separate buffer; NumPy joins more into one."""


def _values(writes: Rows, payload: Bytes) -> list[Any]:
    """Return the consecutive data of the writes, as some buffers."""
    if len(writes) > FEW:
        source, nbytes = writes["source"].astype(np.int64), writes["nbytes"].astype(np.int64)
        ends = nbytes.cumsum()
        if not writes["pattern_bytes"].any():
            first = int(source[0])
            if np.array_equal(source - first, ends - nbytes):  # the layout of a packed strided value
                return [payload[first : first + int(ends[-1])]]
            return [payload[np.repeat(source - (ends - nbytes), nbytes) + np.arange(int(ends[-1]))]]
        if writes["pattern_bytes"].all() and (nbytes == nbytes[0]).all():
            size = int(nbytes[0])
            cycles = np.ascontiguousarray(writes["source"]).view(np.uint8).reshape(-1, 8)
            return [np.ascontiguousarray(np.tile(cycles, -(-size // 8))[:, :size])]
    return [data for _, data in runs_of(writes, payload)]


def _width(aligned: Any, widest: int) -> Any:  # noqa: ANN401 (int64, one or an array)
    """Return the lowest set bit, at most ``widest``: the widest element that divides address and length."""
    bits = aligned | widest
    return bits & -bits


def _indices(starts: Ints, sizes: Ints, width: int) -> Ints:
    counts = sizes // width
    ends = counts.cumsum()
    first = starts // width - (ends - counts)
    indices: Ints = np.repeat(first, counts)
    indices += np.arange(int(ends[-1]), dtype=np.int64)
    return indices


def in_pieces(plan: WritePlan, limit: int) -> Iterator[WritePlan]:
    """Yield plans that write at most ``limit`` bytes each (at least a record), in an order with the same effect."""
    records = plan.records
    size = int(plan.writes["nbytes"].sum()) + (0 if records is None else records.data.nbytes)
    if size <= limit:
        yield plan
        return
    none, rows = plan.writes[:0], cut(plan.writes, max(8, limit // 8 * 8))
    if records is not None:
        some = max(1, limit // max(1, records.data.shape[1]))
        for at in range(0, len(records.slots), some):
            part = Records(records.slots[at : at + some], records.data[at : at + some], records.scatter_map)
            yield WritePlan(plan.memory, none, (), part)
    ends, begin = np.cumsum(rows["nbytes"], dtype=np.int64), 0
    while begin < len(rows):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + limit, "right")))
        yield WritePlan(plan.memory, rows[begin:end], (plan.payload,))
        begin = end
