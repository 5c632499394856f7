"""Conversion of callers' numbers to int32."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from ..errors import InvalidValue

Int32s = np.ndarray[Any, np.dtype[np.int32]]
Ids = Sequence[int] | Int32s
INT32 = np.dtype(np.int32)
_PLAIN = {list, tuple, range}


def int_column(values: Any, name: str) -> array[int]:  # noqa: ANN401
    """Return the values as int32; floats and bools are refused."""
    plain: list[Any] = values.tolist() if isinstance(values, np.ndarray) else list(values)
    if plain and set(map(type, plain)) != {int}:
        plain = [int(v) if isinstance(v, np.integer) else v for v in plain]
        if set(map(type, plain)) != {int}:
            raise InvalidValue(f"{name} must be whole numbers", cure="give int, not bool or float", argument=name)
    try:
        return array("i", plain)
    except OverflowError:
        raise InvalidValue(
            f"{name} must be whole numbers that fit int32", cure="give numbers from -2**31 to 2**31 - 1", argument=name
        ) from None


def block_ids(blocks: Sequence[Ids]) -> bytes | array[int]:
    """Return every task's block ids, one task's after the other, as int32."""
    if {*map(type, blocks)} <= _PLAIN:
        return int_column([*chain.from_iterable(blocks)], "blocks")
    return b"".join([_ids(ids) for ids in blocks])


def _ids(ids: Ids) -> bytes | array[int]:
    if type(ids) is np.ndarray and ids.dtype is INT32 and ids.ndim == 1:
        return ids.tobytes()
    return int_column(ids, "blocks")
