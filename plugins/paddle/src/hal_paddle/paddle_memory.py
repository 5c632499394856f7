"""Device memory as Paddle tensors: one int64 base, viewed as another type as a whole and then sliced.

All Paddle versions agree only on that order: a slice that is then viewed as another type has a wrong offset.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hal_core import InvalidValue, View
from hal_core.devices import check_plain, dtype_of, extent

ALIGNMENT = 64
"""Bytes; memory begins on a cache line."""
WORD = 8
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Tensor = Any
"""A Paddle tensor."""


def empty_words(place: Any, nbytes: int) -> Tensor:  # noqa: ANN401 (a Paddle place)
    """Return an int64 tensor of at least ``nbytes`` on a place. It copies no data, so it does not wait for a held
    stream (``paddle.to_tensor`` would)."""
    import paddle

    return paddle._C_ops.empty([max(1, -(-nbytes // WORD))], paddle.int64, place)


def host_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a Paddle tensor on the CPU place that shares the memory of an array, and keeps it alive."""
    import paddle

    return paddle.Tensor(value=array, place=paddle.CPUPlace(), zero_copy=True)


class PaddleMemory:
    """``nbytes`` of device memory from byte ``begin`` of ``base``, a flat contiguous tensor that starts at its storage.

    ``unit`` is the widest element, in bytes, in which the memory can be viewed: 8 for hal's own memory, for a foreign
    tensor its element.
    """

    __slots__ = ("__weakref__", "_views", "address", "base", "begin", "device", "nbytes", "unit")

    def __init__(self, device: object, base: Tensor, begin: int, nbytes: int, unit: int) -> None:
        self.device, self.base, self.begin, self.nbytes, self.unit = device, base, begin, nbytes, unit
        self.address = int(base.data_ptr()) + begin
        self._views: dict[str, Tensor] = {}

    @classmethod
    def allocate(cls, device: object, place: Any, nbytes: int) -> PaddleMemory:  # noqa: ANN401
        """Return a new block on a 64-byte boundary; the contents are undefined."""
        base = empty_words(place, nbytes + ALIGNMENT)
        return cls(device, base, -int(base.data_ptr()) % ALIGNMENT, nbytes, WORD)

    def typed(self, dtype: str) -> Tensor:
        """Return the whole base as another type; its element 0 is the first of the storage, ``begin`` bytes before this
        memory."""
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self.base.view(dtype)
        return view

    def bytes(self, offset: int, nbytes: int) -> Tensor:
        """Return ``nbytes`` from byte ``offset``, contiguous, as uint8."""
        at = self.begin + offset
        return self.typed("uint8")[at : at + nbytes]


def resolve(device: Any, place: Any, target: Any) -> View:  # noqa: ANN401 (a device; a place; any tensor)
    """Return a view of a Paddle tensor on ``place``. Raises :class:`InvalidValue` for anything else."""
    if not is_on(place, target):
        what = type(target).__name__
        where = f"the tensor is on {target.place}" if hasattr(target, "place") else f"{what} is not a tensor"
        raise InvalidValue(
            f"{where}, but the target must be a Paddle tensor on {place}",
            cure="give a view of a state, or a tensor on that place",
            argument="target",
        )
    check_plain(target, "target")
    dtype = dtype_of(str(target.dtype))
    shape, size = tuple(target.shape), dtype.itemsize
    steps = tuple(step * size for step in target.strides)
    low, end = extent(shape, steps, size)
    first = int(target._offset()) + low
    import paddle

    span = paddle.as_strided(target, [(first + end - low) // size], [1], 0)
    memory = PaddleMemory(device, span, first, end - low, size)
    return View(memory, -low, shape, steps, dtype)


def is_on(place: Any, value: Any) -> bool:  # noqa: ANN401 (a place; anything)
    """Return True for a Paddle tensor with memory on ``place``."""
    if not hasattr(value, "data_ptr") or not hasattr(value, "strides") or not hasattr(value, "place"):
        return False
    return str(value.place) == str(place) and (value.data_ptr() != 0 or 0 in value.shape)
