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
from .plan import LONGEST, Buffer, Ints, PlanBuilder, WritePlan, check_lengths
from .values import host_array, prepare, prepare_array
from .views import Memory, View


class SlotRuns:
    """Rows of tensors for many writes. Neighbours are found once; their whole rows are written as one run.

    ``numbers``: the rows, int64 ``[slots]``, from ``lowest`` to ``highest`` (0, if that is outside). ``begins`` and
    ``counts``: int64 ``[runs]``, the first row of each run and how many it has, at most ``longest``.
    """

    __slots__ = ("begins", "counts", "highest", "longest", "lowest", "numbers")

    def __init__(self, slots: Sequence[int] | Ints) -> None:
        self.numbers = numbers = np.asarray(slots, np.int64)
        edges = np.flatnonzero(numbers[1:] - numbers[:-1] != 1) + 1
        if len(edges):
            edges = np.concatenate([[0], edges, [len(numbers)]])
            self.begins, self.counts = numbers[edges[:-1]], edges[1:] - edges[:-1]
        else:
            self.begins, self.counts = numbers[:1], np.array([len(numbers)][: len(numbers)], np.int64)
        self.longest = int(self.counts.max(initial=0))
        self.lowest, self.highest = int(numbers.min(initial=0)), int(numbers.max(initial=0))

    @classmethod
    def of(cls, slots: Slots) -> SlotRuns:
        """Return the slots, unchanged if their neighbours were found before."""
        return slots if isinstance(slots, cls) else cls(slots)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.numbers)


Slots = Sequence[int] | Ints | SlotRuns


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

    def fill(
        self, target: View, slots: Slots, value: object, begin: int | Ints = 0, end: int | Ints | None = None
    ) -> None:
        """Write one scalar to the elements ``[begin, end)`` of each of ``slots``, the rows of ``target``.

        ``begin``, ``end``: one number for all slots, or int64 ``[slots]``.
        """
        maker = SCALAR_MAKERS.get((target.dtype, type(value)))
        element = prepare(target, value) if maker is None else maker(value)
        if not isinstance(element, np.generic):
            raise ShapeMismatch("the value is no scalar", cure="give one number, or use set", argument="value")
        if len(slots):
            offsets, nbytes = _places(target, SlotRuns.of(slots), begin, _width(target) if end is None else end)
            if not isinstance(nbytes, int):
                offsets, nbytes = offsets[some := nbytes > 0], nbytes[some]
            elif nbytes == 0:
                return
            self._builder(target).fill(offsets, nbytes, element)

    def rows(self, target: View, slots: Slots, values: np.ndarray[Any, Any], begin: int = 0) -> None:
        """Write row i of ``values`` ``[slots, n]``, of the target's dtype, into row ``slots[i]`` from ``begin`` on."""
        values = np.ascontiguousarray(values).reshape(len(slots), -1)
        _check_dtype(target, values)
        if values.size:
            offsets, nbytes = _places(target, SlotRuns.of(slots), begin, begin + values.shape[1])
            self._builder(target).runs(offsets, nbytes, [values.reshape(-1).view(np.uint8)])

    def ragged(
        self, target: View, slots: Slots, values: np.ndarray[Any, Any], lengths: Sequence[int] | Ints, begin: int = 0
    ) -> None:
        """Write the next ``lengths[i]`` elements of ``values`` into row ``slots[i]`` from ``begin`` on.

        ``values``: flat, of the target's dtype, as long as ``lengths`` together.
        """
        counts = np.asarray(lengths, np.int64)
        _check_dtype(target, values)
        least = int(counts.min()) if len(counts) else 0
        if values.ndim != 1 or len(counts) != len(slots) or least < 0 or int(counts.sum()) != len(values):
            what = f"{values.shape} values and {len(counts)} lengths of {int(counts.sum())} for {len(slots)} slots"
            raise ShapeMismatch(what, cure="give the rows one after another, and a length each", argument="values")
        if len(values):
            offsets, nbytes = _places(target, SlotRuns.of(slots), begin, begin + counts)
            assert not isinstance(nbytes, int)
            if not least:
                offsets, nbytes = offsets[some := nbytes > 0], nbytes[some]
            self._builder(target).runs(offsets, nbytes, [np.ascontiguousarray(values).view(np.uint8)])

    def plans(self) -> list[WritePlan]:
        """Return one plan for each memory. Raises :class:`InvalidValue` if two of them overlap."""
        taken = sorted((one.memory.address, one.memory.address + one.memory.nbytes) for one in self._builders.values())
        for (_, end), (begin, _) in pairwise(taken):
            if begin < end:
                cure = "resolve the tensor once, and slice the view"
                raise InvalidValue("two targets share memory", cure=cure, argument="writes")
        return [plan for one in self._builders.values() if not (plan := one.build(inside=True)).empty]

    def _builder(self, target: View) -> PlanBuilder:
        found = self._builders.get(id(target.memory))
        if found is None:
            found = self._builders[id(target.memory)] = PlanBuilder(target.memory)
        self.owners[id(target.owner)] = target.owner  # a state and its companions share one memory
        return found


def across(plans: Sequence[WritePlan], span: Memory) -> WritePlan:
    """Return the plans of memories within ``span`` as one plan of it."""
    shifted: list[np.ndarray[Any, np.dtype[np.void]]] = []
    pieces: list[Buffer] = []
    source = 0
    for plan in [plan.flat() for plan in plans]:
        writes = plan.writes.copy()
        writes["dst"] += np.uint64(plan.memory.address - span.address)
        writes["source"][writes["pattern_bytes"] == 0] += np.uint64(source)
        source += sum([memoryview(piece).nbytes for piece in plan.pieces])
        shifted.append(writes)
        pieces += plan.pieces
    return WritePlan(span, np.concatenate(shifted), pieces)


def _width(target: View) -> int:
    return target.shape[1] if len(target.shape) > 1 else 1


def _check_dtype(target: View, values: np.ndarray[Any, Any]) -> None:
    if values.dtype != target.dtype.storage:
        raise InvalidValue(f"{values.dtype} for a target of {target.dtype}", cure="convert first", argument="value")


def _places(target: View, slots: SlotRuns, begin: int | Ints, end: int | Ints) -> tuple[Ints, Ints | int]:
    """Return the offsets of the slots' elements ``[begin, end)`` and the bytes of each; whole neighbouring rows are one
    run.

    The elements of a row must lie side by side.
    """
    rows, width, item = target.shape[0], _width(target), target.dtype.itemsize
    low = begin if isinstance(begin, int) else int(begin.min())
    high = end if isinstance(end, int) else int(end.max())
    if len(target.shape) > 2 or not 0 <= low <= high <= width or slots.lowest < 0 or slots.highest >= rows:
        raise ShapeMismatch(
            f"elements {low} to {high} of slots {slots.lowest} to {slots.highest} in a view of shape {target.shape}",
            cure="give what lies in it: [slots, width] or [slots]",
            argument="writes",
        )
    if len(target.shape) > 1 and width > 1 and target.strides[1] != item:
        raise InvalidValue("a row's elements lie apart", cure="use set", argument="writes")
    stride = target.strides[0]
    full_rows = type(begin) is type(end) is int and (begin, end) == (0, width) and stride == width * item
    if full_rows and slots.longest * stride <= LONGEST:
        return target.offset + slots.begins * stride, slots.counts * stride
    nbytes = (end - begin) * item
    check_lengths(nbytes)
    return target.offset + slots.numbers * stride + begin * item, nbytes
