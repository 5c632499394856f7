"""Conversion of callers' numbers to plain integers that fit int32."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InvalidValue

Int32s = np.ndarray[Any, np.dtype[np.int32]]
Ids = Sequence[int] | Int32s


def whole(values: Any, name: str, ints: dict[str, array[int]] | None = None) -> list[int]:  # noqa: ANN401
    """Return the values as Python integers that fit int32, and add them to ``ints``; floats and bools are refused."""
    plain: list[Any] = values.tolist() if isinstance(values, np.ndarray) else list(values)
    if plain and set(map(type, plain)) != {int}:
        plain = [int(v) if isinstance(v, np.integer) else v for v in plain]
        if set(map(type, plain)) != {int}:
            raise InvalidValue(f"{name} must be whole numbers", cure="give int, not bool or float", argument=name)
    try:
        column = array("i", plain)
    except OverflowError:
        raise InvalidValue(
            f"{name} must be whole numbers that fit int32", cure="give numbers from -2**31 to 2**31 - 1", argument=name
        ) from None
    if ints is not None:
        ints[name] = column
    return plain


def block_ids(ids: Ids) -> Int32s:
    """Return one task's block ids; an int32 array is returned unchanged."""
    if type(ids) is np.ndarray and ids.dtype == np.int32 and ids.ndim == 1:
        return ids
    return np.array(whole(ids, "blocks"), np.int32)
