"""FastDeploy's conversions of values: ``async_set_value(tgt, src)`` of its model runners."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hal_core import BoundDevice, DType, Stream, Ticket

Array = np.ndarray[Any, np.dtype[Any]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
INT64, INT32 = np.dtype("q"), np.dtype("i")


def scalars(values: list[Any], dtype: DType, names: str) -> Array:
    """Scalars as one array of the dtype: a float into an integer is cut, integers are exact.

    :raises ValueError: for None and any other object than a Python number, as upstream's function does, and for a
        number that the dtype cannot hold.
    """
    kinds = set(map(type, values))
    if not kinds <= {bool, int, float}:
        value = next(value for value in values if type(value) not in (bool, int, float))
        raise ValueError(f"{names}: {value!r} ({type(value).__name__}) is no int, float or bool")
    try:
        if float in kinds and dtype.kind == "int":
            values = [int(value) for value in values]
        return np.array(values, dtype.storage)
    except (OverflowError, ValueError):
        raise ValueError(f"{names}: {', '.join(map(repr, values[:4]))} does not fit {dtype}") from None


def integers(values: Sequence[int] | Array, dtype: np.dtype[Any], name: str) -> Array:
    """Return a list or array of whole numbers as an array of the dtype, int64 or int32; an array may be the caller's.

    :raises ValueError: for an element that is no whole number, or does not fit.
    """
    if not isinstance(values, np.ndarray):
        try:
            packed = struct.pack(f"{len(values)}{dtype.char}", *values)  # a third of np.array's time
        except (TypeError, struct.error):
            raise _no_integers(dtype, name) from None
        return np.frombuffer(packed, dtype)
    if values.dtype == dtype and values.ndim == 1:
        return values
    fits = values.ndim == 1 and values.dtype.kind in "iu"
    if fits and not np.can_cast(values.dtype, dtype) and len(values):
        bounds = np.iinfo(dtype)
        fits = int(values.min()) >= bounds.min and int(values.max()) <= bounds.max
    if not fits:
        raise _no_integers(dtype, name)
    return values.astype(dtype)


def _no_integers(dtype: np.dtype[Any], name: str) -> ValueError:
    return ValueError(f"{name}: an element is no whole number of {dtype}")


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths, one after another: ``values`` flat, ``lengths`` int64 ``[rows]``."""

    values: Array
    lengths: Ints

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | Array], dtype: np.dtype[Any], name: str) -> Ragged:
        """Convert lists and arrays of whole numbers.

        :raises ValueError: for an element that is no whole number, or does not fit.
        """
        lengths = np.array([*map(len, rows)], np.int64)
        if len(rows) and all(isinstance(row, np.ndarray) for row in rows):
            return cls(np.concatenate([integers(row, dtype, name) for row in rows]), lengths)
        values, at, size = np.empty(int(lengths.sum()), dtype), 0, dtype.itemsize
        memory: Any = values  # a buffer for type checkers from Python 3.12 on
        try:
            for row, length in zip(rows, lengths.tolist(), strict=True):
                if isinstance(row, np.ndarray):
                    values[at : at + length] = integers(row, dtype, name)
                elif length:
                    struct.pack_into(f"{length}{dtype.char}", memory, at * size, *row)
                at += length
        except (TypeError, struct.error):
            raise _no_integers(dtype, name) from None
        return cls(values, lengths)

    @property
    def begins(self) -> Ints:
        """Where each row begins in ``values``."""
        return self.lengths.cumsum() - self.lengths

    def cut(self, begins: Ints, lengths: Ints) -> Ragged:
        """Return ``lengths[i]`` elements of each row from ``begins[i]`` on; no copy if these are all elements."""
        if not begins.any() and np.array_equal(lengths, self.lengths):
            return self
        starts = (self.begins + begins).tolist()
        parts = [self.values[at : at + length] for at, length in zip(starts, lengths.tolist(), strict=True)]
        return Ragged(np.concatenate(parts), lengths)


class SetValue:
    """``async_set_value(tgt, src)`` for a device: upstream's arguments and conversions, hal's order and memory."""

    def __init__(self, device: BoundDevice, stream: Stream | None = None) -> None:
        self.device, self.stream = device, device.default_stream if stream is None else stream

    def __call__(self, tgt: Any, src: Any) -> Ticket:  # noqa: ANN401 (a framework's tensors)
        """Write ``src`` into ``tgt``. A number fills; a list, array or tensor is cast and has as many elements.

        :raises ValueError: for None, a NumPy scalar, a tuple, another number of elements, and one that does not fit.
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
            try:
                return np.array(src, dtype.storage)  # from Python's numbers, so that integers are exact
            except OverflowError as error:
                raise ValueError(f"src: an element does not fit {dtype}: {error}") from None
        return array.astype(dtype.storage)
