"""Copies between two views of one device: the source as a new contiguous tensor, whose elements are then scattered."""

from __future__ import annotations

from typing import Any

import numpy as np
from hal_core import InvalidValue, View
from hal_core.devices import dtype_of

from .paddle_memory import PaddleMemory, Tensor

MOST_AXES = 9
"""Most axes of a Paddle tensor."""


def on_elements(view: View) -> bool:
    """Return whether a view's elements lie on whole elements of its storage."""
    assert isinstance(view.memory, PaddleMemory)
    steps = [step for count, step in zip(view.shape, view.strides, strict=True) if count > 1]
    return not any(step % view.dtype.itemsize for step in (view.memory.begin + view.offset, *steps))


def by_bytes(view: View) -> View:
    """Return the view with the bytes of each element as one more axis."""
    return View(view.memory, view.offset, (*view.shape, view.dtype.itemsize), (*view.strides, 1), dtype_of("uint8"))


def gather(value: View, dtype: str) -> Tensor:
    """Return the elements of a view in a new flat tensor, in the order of :func:`elements_of`; computed on the device.

    Paddle has no negative strides, so reversed axes are read forwards. Raises :class:`InvalidValue` for more axes than
    its tensors have.
    """
    import paddle

    memory, size = value.memory, value.dtype.itemsize
    assert isinstance(memory, PaddleMemory)
    axes = [(count, abs(step) // size) for count, step in zip(value.shape, value.strides, strict=True) if count != 1]
    if len(axes) > MOST_AXES:
        raise InvalidValue(
            f"the device value has {len(axes)} axes", cure=f"reshape it to at most {MOST_AXES}", argument="value"
        )
    low = memory.begin + value.bounds()[0]
    shape, strides = [count for count, _ in axes], [step for _, step in axes]
    strided = paddle.as_strided(memory.typed(dtype), shape or [1], strides or [1], low)
    begin = strided.data_ptr()
    packed = strided.contiguous()  # the same object, which has memory of its own then, unless it was contiguous
    return (paddle.assign(packed) if packed.data_ptr() == begin else packed).reshape([-1])


def elements_of(target: View, value: View) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the index, in the target's storage, of each element that :func:`gather` returns for ``value``."""
    memory, size = target.memory, target.dtype.itemsize
    assert isinstance(memory, PaddleMemory)
    at = np.array(memory.begin + target.offset, np.int64)
    for extent, step in zip(target.shape, target.strides, strict=True):
        at = at[..., None] + np.arange(extent, dtype=np.int64) * step
    reversed_axes = tuple(slice(None, None, -1 if step < 0 else 1) for step in value.strides)
    return np.ascontiguousarray((at // size).reshape(value.shape)[reversed_axes]).reshape(-1)
