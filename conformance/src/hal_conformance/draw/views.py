"""Views to write to: any piece of a block, strided, reversed, turned, empty or a single element; how the elements of
views may lie, and the offsets of their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from hal_core.memory.dtypes import DType
from hal_core.memory.views import Index, Memory, View
from hypothesis import strategies as st

from ..kit import Draw
from .values import draw_dtype

BLOCK_BYTES = 512

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def draw_view(draw: Draw, memory: Memory, dtype: DType | None = None) -> View:
    """Return a part of a view somewhere in ``memory``."""
    if dtype is None:
        dtype = draw_dtype(draw, "dtype of the target")
    shape = draw(shapes, "shape of the whole")
    view = View.contiguous(memory, 0, shape, dtype)
    unit = draw(st.sampled_from([dtype.itemsize, 1]), "its place is a multiple of")
    room = (memory.nbytes - max(1, view.size) * dtype.itemsize) // unit
    view = View.contiguous(memory, draw(st.integers(0, room), "times") * unit, shape, dtype)
    if draw(st.booleans(), "turned"):
        shape = shape[::-1]
        view = View(memory, view.offset, shape, view.strides[::-1], dtype)
    index = tuple(draw(indices(extent), f"index of axis {axis}") for axis, extent in enumerate(shape))
    return view[index] if index else view


def indices(extent: int) -> st.SearchStrategy[Index]:
    """Return whole numbers (an axis less) and slices of either direction."""
    pieces: st.SearchStrategy[Index] = st.slices(extent)
    if extent == 0:
        return pieces
    return st.just(slice(None)) | st.just(slice(None, None, -1)) | pieces | st.integers(-extent, extent - 1)


def places(view: View) -> list[int]:
    """Return the byte offset of each element, in row-major order: from the view's own numbers, not by its methods."""
    return [
        view.offset + sum(at * stride for at, stride in zip(index, view.strides, strict=True))
        for index in product(*map(range, view.shape))
    ]


PLACES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 4100)
"""Byte offsets on both sides of what a device may align to: so many that in turns each meets each element type."""


class Laid(NamedTuple):
    """How elements lie: the axes from the outermost in memory to the innermost, elements from one to the next along the
    innermost, elements between its rows, axes that run backwards, and axes of stride 0."""

    axes: tuple[int, ...] = (0, 1, 2)
    step: int = 1
    between: int = 0
    backwards: tuple[int, ...] = ()
    same: tuple[int, ...] = ()

    def view(self, memory: Memory, place: int, shape: Sequence[int], dtype: DType) -> View:
        """Return a view whose first byte in memory is ``place``."""
        strides, step = [0] * len(shape), self.step * dtype.itemsize
        for axis in reversed(self.axes):
            strides[axis] = 0 if axis in self.same else -step if axis in self.backwards else step
            step *= shape[axis]
            step += self.between * dtype.itemsize * (axis == self.axes[-1])
        low = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True) if stride < 0)
        return View(memory, place - low, tuple(shape), tuple(strides), dtype)


LAID = {
    "in a row": Laid(),
    "backwards": Laid(backwards=(0, 1, 2)),
    "turned": Laid((2, 1, 0)),
    "turned in part": Laid((1, 0, 2)),
    "turned in part, one axis backwards": Laid((0, 2, 1), backwards=(1,)),
    "every second": Laid(step=2),
    "every third, backwards": Laid(step=3, backwards=(2,)),
    "rows apart": Laid(between=3),
    "turned, columns apart": Laid((2, 1, 0), between=2),
}
"""How the elements of a target may lie, with three axes."""
REPEATED = {
    "one plane": Laid(same=(0,)),
    "one column": Laid(same=(2,), between=1),
    "one element": Laid(same=(0, 1, 2)),
    "windows": Laid(between=-4),
}
"""How those of a value on the device may lie besides, for a shape of which the last axis has five."""
