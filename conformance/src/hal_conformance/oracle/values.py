"""The oracle of G6: a value converted to a type, in exact arithmetic. Shares no code with the conversion."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
from hal_core.memory.dtypes import DType

REFUSED = "refused"
NAN = "nan"

# Type to (bits of precision, exponent of the least normal, exponent that is too large): IEEE 754-2019, table 3.5;
# bfloat16 is the upper half of binary32.
FORMATS = {
    "float16": (11, -14, 16),
    "bfloat16": (8, -126, 128),
    "float32": (24, -126, 128),
    "float64": (53, -1022, 1024),
}
PACKED = {"float16": "<e", "float32": "<f", "float64": "<d"}


def converted(value: bool | int | float, dtype: DType) -> bytes | str:
    """Return the bytes that ``value`` must become, :data:`NAN` for any NaN, or :data:`REFUSED`."""
    if dtype.kind == "float":
        return _to_float(value, dtype)
    if isinstance(value, float):
        return REFUSED
    if dtype.kind == "bool":
        return bytes([value]) if value in (0, 1) else REFUSED
    try:
        return int(value).to_bytes(dtype.itemsize, "little", signed=not dtype.name.startswith("u"))
    except OverflowError:
        return REFUSED


def _to_float(value: bool | int | float, dtype: DType) -> bytes | str:
    if isinstance(value, float) and not math.isfinite(value):
        return NAN if math.isnan(value) else _encoded(value, dtype)
    rounded = _rounded(Fraction(value), *FORMATS[dtype.name])
    exact = rounded == Fraction(value)
    if rounded is None or not (exact or isinstance(value, float)):
        return REFUSED
    return _encoded(math.copysign(float(abs(rounded)), value), dtype)


def _rounded(value: Fraction, precision: int, least: int, top: int) -> Fraction | None:
    """Return the nearest number of the format, ties to even; None for infinity."""
    if value == 0:
        return value
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, least) - precision + 1)
    nearest = round(size / unit) * unit  # Python rounds a fraction half to even
    return None if nearest >= Fraction(2) ** top else nearest if value > 0 else -nearest


def _encoded(value: float, dtype: DType) -> bytes:
    """Return the bytes of a number that the format holds exactly."""
    return struct.pack("<f", value)[2:] if dtype.name == "bfloat16" else struct.pack(PACKED[dtype.name], value)


def stored(values: Any, dtype: DType) -> np.ndarray[Any, Any]:  # noqa: ANN401 (a number, or a list of numbers)
    """Values of a declared field as they must be in memory. Each must be one that the type holds."""
    listed = values if isinstance(values, list | tuple) else [values]
    data = b"".join([one for value in listed if isinstance(one := converted(value, dtype), bytes)])
    return np.frombuffer(data, dtype.storage)


def same(got: bytes, should: bytes | str, dtype: DType) -> bool:
    """Return whether an element's bytes are the expected ones; any NaN equals a NaN."""
    if should != NAN:
        return got == should
    wide = b"\0\0" + got if dtype.name == "bfloat16" else got
    return math.isnan(struct.unpack(PACKED.get(dtype.name, "<f"), wide)[0])


def plain(value: Any) -> Any:  # noqa: ANN401 (a scalar or an array of any type)
    """Return the Python values of a NumPy scalar or array, which hold those of every type exactly."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
