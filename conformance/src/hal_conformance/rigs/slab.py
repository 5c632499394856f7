"""Blocks of megabytes with their expected bytes, and views of many axes or many runs over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hal_core.errors import HalError
from hal_core.memory.dtypes import DType, dtype_of
from hal_core.memory.views import View

from ..harness import backdoor
from ..harness.asserts import assert_says
from ..harness.backdoor import arrive
from ..harness.bits import Array, noise
from ..kit import Kit
from .block import Block

GAP = 37
"""Bytes between two targets, so that no piece begins on a convenient boundary."""


class Slab(Block):
    """A block of any size. Its expected bytes are written through NumPy's strides, from a view's own numbers."""

    def __init__(self, kit: Kit, nbytes: int, content: Array | None = None) -> None:
        super().__init__(kit, nbytes=nbytes)
        if content is not None:
            self.should[...] = content
            backdoor.write(self.device, self.memory, 0, self.should, self.stream)

    def at(self, offset: int, shape: Sequence[int], dtype: str = "uint8") -> View:
        """Return a contiguous view from byte ``offset``."""
        return View.contiguous(self.memory, offset, tuple(shape), dtype_of(dtype))

    def over(self, view: View) -> Array:
        """Return the expected elements of a view of this slab, for reading or writing."""
        return np.ndarray(view.shape, view.dtype.storage, self.should.data, view.offset, view.strides)

    def write(self, target: View, value: object, elements: Array | np.generic | None = None) -> None:
        """Set the value, wait, and expect it; ``elements`` are its bytes if the value itself is not an array."""
        arrive(self.set(target, value))
        self.over(target)[...] = value if elements is None else elements

    def write_or_refuse(self, target: View, value: View, elements: Array) -> bool:
        """Do the same for a device value that the device may refuse with a reason; return False if it did."""
        try:
            arrive(self.set(target, value))
        except HalError as error:
            assert_says(error, device=self.kit.bound.name, hook="async_set_value", argument="value")
            return False
        self.over(target)[...] = elements
        return True


def elements(seed: int, shape: Sequence[int], dtype: DType) -> Array:
    """Return random elements of a type's storage; a bool is 0 or 1."""
    count = int(np.prod(shape, dtype=np.int64))
    raw = noise(seed, count * dtype.itemsize)
    if dtype.kind == "bool":
        raw &= 1
    return raw.view(dtype.storage).reshape(tuple(shape))


def comb(slab: Slab, begin: int, axes: int, ones: int, dtype: DType, rng: np.random.Generator) -> View:
    """Return a view of ``axes`` axes that cannot be merged, ``ones`` of them with one element, in random order.

    Strides have both signs and no element touches another; the view starts at byte ``begin`` of the slab.
    """
    step, places = 2 * dtype.itemsize, []
    for axis in range(axes):
        extent = 3 if axis < 2 else 2
        places.append((extent, step * int(rng.choice([-1, 1]))))
        step = step * extent + dtype.itemsize
    places += [(1, int(rng.choice([-24, 0, 8, 1 << 40]))) for _ in range(ones)]
    order = rng.permutation(len(places)).tolist()
    shape, strides = tuple(places[at][0] for at in order), tuple(places[at][1] for at in order)
    low = sum((extent - 1) * stride for extent, stride in places if stride < 0)
    return View(slab.memory, begin - low, shape, strides, dtype)
