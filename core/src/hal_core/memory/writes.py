"""Writes to several memories as one submission: tensors that a framework has allocated, and states.

A worker resolves its tensors once (``device.resolve(tensor)``), collects what one call of its scheduler writes to them,
and gives that to ``device.write``. Nothing is written before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import InvalidValue, ShapeMismatch
from .dtypes import SCALAR_MAKERS
from .plan import Buffer, PlanBuilder, WritePlan
from .values import host_array, prepare, prepare_array
from .views import Memory, View

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Writes:
    """Writes for one ``device.write``. Values are read there: leave arrays unchanged until it returns.

    Of two writes to one place the last one wins. Views of one tensor come from one ``resolve``: two memories that
    overlap are refused.
    """

    def __init__(self) -> None:
        self._builders: dict[int, PlanBuilder] = {}
        self.owners: dict[int, object] = {}
        """What the views belong to, by id: a state orders writes after the steps that read it."""

    def set(self, target: View, value: object) -> None:
        """Write a host value to a view: a scalar fills, a list, array or host tensor has as many elements (G6)."""
        tensor = host_array(value)
        prepared: Any = prepare(target, value) if tensor is None else prepare_array(target, *tensor)
        if 0 in target.shape:
            return
        offsets, nbytes = target.runs()
        if isinstance(prepared, np.ndarray):
            self._builder(target).copy(offsets, nbytes, prepared.reshape(-1).view(np.uint8))
        else:
            self._builder(target).fill(offsets, nbytes, prepared)

    def fill(self, target: View, slots: Sequence[int], value: object, begin: int = 0, end: int | None = None) -> None:
        """Write one scalar to the elements ``[begin, end)`` of each of ``slots``, the rows of ``target``."""
        maker = SCALAR_MAKERS.get((target.dtype, type(value)))
        element = prepare(target, value) if maker is None else maker(value)
        if not isinstance(element, np.generic):
            raise ShapeMismatch("the value is no scalar", cure="give one number, or use set", argument="value")
        width = _width(target) if end is None else end
        if width > begin and len(slots):
            offsets = _places(target, slots, begin, width)
            self._builder(target).fill(offsets, (width - begin) * target.dtype.itemsize, element)

    def rows(self, target: View, slots: Sequence[int], values: np.ndarray[Any, Any], begin: int = 0) -> None:
        """Write row i of ``values`` ``[slots, n]``, of the target's dtype, into row ``slots[i]`` from ``begin`` on."""
        values = np.ascontiguousarray(values).reshape(len(slots), -1)
        if values.dtype != target.dtype.storage:
            raise InvalidValue(f"{values.dtype} for a target of {target.dtype}", cure="convert first", argument="value")
        if values.size:
            offsets = _places(target, slots, begin, begin + values.shape[1])
            self._builder(target).copy(
                offsets, values.shape[1] * target.dtype.itemsize, values.reshape(-1).view(np.uint8)
            )

    def ragged(self, target: View, slots: Sequence[int], rows: Sequence[np.ndarray[Any, Any]], begin: int = 0) -> None:
        """Write each of ``rows``, arrays of the target's dtype, into row ``slots[i]`` from ``begin`` on."""
        lengths = np.array([*map(len, rows)], np.int64)
        if strange := {row.dtype for row in rows} - {target.dtype.storage}:
            raise InvalidValue(f"{strange} for a target of {target.dtype}", cure="convert first", argument="value")
        if not lengths.any():
            return
        offsets, nbytes = _places(target, slots, begin, begin + int(lengths.max())), lengths * target.dtype.itemsize
        some = lengths > 0
        pieces = [np.ascontiguousarray(row).view(np.uint8) for row in rows if len(row)]
        self._builder(target).runs(offsets[some], nbytes[some], pieces)

    def plans(self) -> list[WritePlan]:
        """One plan for each memory. Raises :class:`InvalidValue` if two of them overlap."""
        taken = sorted((one.memory.address, one.memory.address + one.memory.nbytes) for one in self._builders.values())
        for (_, end), (begin, _) in pairwise(taken):
            if begin < end:
                cure = "resolve the tensor once, and slice the view"
                raise InvalidValue("two targets share memory", cure=cure, argument="writes")
        return [plan for one in self._builders.values() if not (plan := one.build()).empty]

    def _builder(self, target: View) -> PlanBuilder:
        found = self._builders.get(id(target.memory))
        if found is None:
            found = self._builders[id(target.memory)] = PlanBuilder(target.memory)
            self.owners[id(target.owner)] = target.owner
        return found


def across(plans: Sequence[WritePlan], span: Memory) -> WritePlan:
    """Plans of memories that lie within ``span``, as one plan of it."""
    shifted: list[np.ndarray[Any, np.dtype[np.void]]] = []
    pieces: list[Buffer] = []
    source = 0
    for plan in [plan.flat() for plan in plans]:
        writes = plan.writes.copy()
        writes["dst"] += np.uint64(plan.memory.address - span.address)
        writes["source"][writes["pattern"] == 0] += np.uint64(source)
        source += sum([memoryview(piece).nbytes for piece in plan.pieces])
        shifted.append(writes)
        pieces += plan.pieces
    return WritePlan(span, np.concatenate(shifted), pieces)


def _width(target: View) -> int:
    return target.shape[1] if len(target.shape) > 1 else 1


def _places(target: View, slots: Sequence[int], begin: int, end: int) -> Ints:
    """The byte at which element ``begin`` of each slot lies. The elements ``[begin, end)`` must lie side by side."""
    rows, width = target.shape[0], _width(target)
    numbers = np.asarray(slots, np.int64)
    if len(target.shape) > 2 or not 0 <= begin <= end <= width or int(numbers.min()) < 0 or int(numbers.max()) >= rows:
        raise ShapeMismatch(
            f"elements {begin} to {end} of slots {int(numbers.min())} to {int(numbers.max())} in a view of shape "
            f"{target.shape}",
            cure="give what lies in it: [slots, width] or [slots]",
            argument="writes",
        )
    if len(target.shape) > 1 and width > 1 and target.strides[1] != target.dtype.itemsize:
        raise InvalidValue("a row's elements lie apart", cure="use set", argument="writes")
    return target.offset + numbers * target.strides[0] + begin * target.dtype.itemsize
