"""Views to write to: any piece of a block, strided, reversed, empty or a single element; and the offsets of their
bytes."""

from __future__ import annotations

from itertools import product

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
    room = (memory.nbytes - max(1, view.size) * dtype.itemsize) // dtype.itemsize
    offset = draw(st.integers(0, room), "elements before it") * dtype.itemsize
    view = View.contiguous(memory, offset, shape, dtype)
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
