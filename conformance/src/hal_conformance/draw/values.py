"""Strategies for G6: values of every class near the edges of every type, and their containers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hal_core.memory.dtypes import DTYPES, DType, dtype_of
from hypothesis import strategies as st

from ..kit import Draw


def draw_dtype(draw: Draw, label: str, among: Sequence[DType] = DTYPES) -> DType:
    """Return an element type; drawn by name, which reads better in a failure."""
    return dtype_of(draw(st.sampled_from([dtype.name for dtype in among]), label))


_near_powers = st.builds(
    lambda sign, power, off: sign * 2**power + off, st.sampled_from([1, -1]), st.integers(0, 66), st.integers(-1, 1)
)
_odd_times_power = st.builds(lambda odd, power: odd * 2**power, st.integers(-(2**25), 2**25), st.integers(0, 40))
ints = st.integers(0, 1) | st.integers(-300, 300) | _near_powers | _odd_times_power

_limits = (65504.0, 65519.99, 65520.0, 2.0**128 - 2.0**119, 2.0**128 - 2.0**103, 1.7976931348623157e308)
_tiny = (2.0**-24, 2.0**-25, 1.0000001 * 2.0**-25, 2.0**-133, 2.0**-134, 2.0**-149, 2.0**-150, 5e-324)


@st.composite
def _ties(draw: st.DrawFn) -> float:
    """Return a double in the middle of two neighbours of a format of 8, 11 or 24 bits, or next to it."""
    bits = draw(st.sampled_from([8, 11, 24]))
    middle = (draw(st.integers(2 ** (bits - 1), 2**bits - 1)) + 0.5) * 2.0 ** draw(st.integers(-20, 5))
    return math.nextafter(middle, draw(st.sampled_from([middle, 0.0, math.inf]))) * draw(st.sampled_from([1, -1]))


floats = (
    st.floats(width=16) | st.floats() | _ties() | st.sampled_from([*_limits, *_tiny, *(-v for v in (*_limits, *_tiny))])
)
scalars = st.booleans() | ints | floats


def fitting(dtype: DType) -> st.SearchStrategy[Any]:
    """Return Python values that mostly convert to a type."""
    if dtype.kind == "bool":
        return st.booleans() | st.integers(0, 1)
    if dtype.kind == "float":
        return floats | st.integers(-128, 128) | st.booleans()
    low = 0 if dtype.name.startswith("u") else -(2 ** (8 * dtype.itemsize - 1))
    high = low + 2 ** (8 * dtype.itemsize) - 1
    return st.integers(low, high) | st.sampled_from([low, high]) | st.booleans()


def of_dtype(dtype: DType) -> st.SearchStrategy[Any]:
    """Return Python values that an array of a NumPy type holds exactly."""
    if dtype.kind == "float":
        return st.floats(width=8 * dtype.itemsize)  # type: ignore[arg-type]  # bfloat16 is not asked for here
    return fitting(dtype).filter(lambda value: dtype.kind == "bool" or not isinstance(value, bool)).map(_class(dtype))


def _class(dtype: DType) -> type:
    return bool if dtype.kind == "bool" else int


def contained(draw: Draw, items: Sequence[Any], shape: Sequence[int]) -> Any:  # noqa: ANN401 (lists and arrays)
    """Return the items, in C order, in one of the containers that a caller may use."""
    kind = draw(st.sampled_from(["list", "tuple", "nested", "array"]), "container")
    if kind == "array" and len({type(item) for item in items}) == 1:
        return array_of(draw, items, shape)
    nested: Any = list(items)
    if kind == "nested":
        for extent in reversed(shape[1:]):
            nested = [nested[i : i + extent] for i in range(0, len(nested), extent)] if extent else nested
    return tuple(nested) if kind == "tuple" else nested


def array_of(draw: Draw, items: Sequence[Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return an array of a NumPy type that holds all items exactly, in some memory layout."""
    fits = [dtype for dtype in DTYPES if dtype.name != "bfloat16" and all(_holds(dtype, item) for item in items)]
    if not fits:
        return np.array(items, object)
    array = np.array(items, draw_dtype(draw, "dtype of the array", fits).storage).reshape(shape)
    return LAYOUTS[draw(st.sampled_from([*LAYOUTS]), "memory layout")](array)


def _holds(dtype: DType, item: Any) -> bool:  # noqa: ANN401 (a Python scalar)
    if {"bool": bool, "int": int, "float": float}[dtype.kind] is not type(item):
        return False
    try:
        with np.errstate(all="ignore"):
            back = np.array(item, dtype.storage).item()
    except OverflowError:
        return False
    return bool(back == item or (back != back and item != item))


def reversed_memory(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the same values, stored in reverse order."""
    return array[..., ::-1].copy()[..., ::-1] if array.ndim else array


def with_gaps(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the same values, with other bytes between them."""
    return np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array


def byte_swapped(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the same values in the other byte order."""
    return array.astype(array.dtype.newbyteorder())


LAYOUTS: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "plain": np.asarray,
    "column-major": np.asfortranarray,
    "reversed": reversed_memory,
    "with gaps": with_gaps,
    "byte-swapped": byte_swapped,
}
