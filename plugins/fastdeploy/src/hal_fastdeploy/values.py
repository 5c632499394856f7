"""FastDeploy's conversions of values: ``async_set_value(tgt, src)`` of its model runners."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from hal_core import BoundDevice, DType, Stream, Ticket

Array = np.ndarray[Any, np.dtype[Any]]


def scalars(values: list[Any], dtype: DType, names: str) -> Array:
    """Scalars as one array of the dtype: a float into an integer is cut, integers are exact.

    :raises ValueError: for None and any other object than a Python number, as upstream's function does.
    """
    for value in values:
        if type(value) not in (bool, int, float):
            raise ValueError(f"{names}: {value!r} ({type(value).__name__}) is no int, float or bool")
    if dtype.kind == "int":
        values = [int(value) for value in values]
    return np.array(values, dtype.storage)


def integers(values: Sequence[int] | Array, dtype: type[np.signedinteger[Any]], name: str) -> Array:
    """Return a list or array of whole numbers as an array of the dtype, int64 or int32; an array may be the caller's.

    :raises ValueError: for an element that is no whole number, or does not fit.
    """
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        return values.astype(dtype, copy=False)
    try:
        packed = struct.pack(f"{len(values)}{'q' if dtype is np.int64 else 'i'}", *values)  # a third of np.array's time
    except (TypeError, struct.error):
        raise ValueError(f"{name}: an element is no whole number of {np.dtype(dtype)}") from None
    return np.frombuffer(packed, dtype)


class SetValue:
    """``async_set_value(tgt, src)`` for a device: upstream's arguments and conversions, hal's order and memory."""

    def __init__(self, device: BoundDevice, stream: Stream | None = None) -> None:
        self.device, self.stream = device, device.default_stream if stream is None else stream

    def __call__(self, tgt: Any, src: Any) -> Ticket:  # noqa: ANN401 (a framework's tensors)
        """Write ``src`` into ``tgt``. A number fills; a list, array or tensor is cast and has as many elements.

        :raises ValueError: for None, a NumPy scalar, a tuple, and another number of elements.
        """
        view = self.device.device.resolve(tgt)
        if isinstance(src, bool | int | float):
            value: Any = scalars([src], view.dtype, "src")[0] if view.dtype.name != "bfloat16" else float(src)
        elif isinstance(src, list | np.ndarray) or hasattr(src, "data_ptr"):
            value = self._elements(view.dtype, src)
            count = int(np.prod(value.shape)) if hasattr(value, "shape") else len(value)
            if count != view.size:
                raise ValueError(f"{count} elements for a target of {view.size}")
        else:
            raise ValueError(f"src: {type(src).__name__} is no int, float, bool, list, array or tensor")
        return self.device.async_set_value(target=tgt, value=value, stream=self.stream)

    def _elements(self, dtype: DType, src: Any) -> Any:  # noqa: ANN401
        if hasattr(src, "data_ptr"):  # a tensor: cast by its framework, on its place
            return src if str(src.dtype).rpartition(".")[2] == dtype.name else src.astype(dtype.name)
        if dtype.name == "bfloat16":
            return np.asarray(src, np.float32)
        array = np.asarray(src)
        if array.dtype == object:
            raise ValueError("src has elements that are no numbers, or rows of different lengths")
        if isinstance(src, list):
            return np.array(src, dtype.storage)  # from Python's numbers, so that integers are exact
        return array.astype(dtype.storage)
