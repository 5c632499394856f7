"""The element types of hal: one small object for each type, the same on every device and without its framework.

NumPy has no bfloat16 (the upper half of an IEEE 754 binary32: sign, 8 exponent bits, 7 fraction bits). It is stored as
its uint16 pattern, and this module converts to and from it. Every other type is stored as the NumPy type with its name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from hal_core.errors import ConversionRefused, InvalidValue

Kind = Literal["bool", "int", "float"]
ScalarMaker = Callable[[Any], np.generic]


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """An element type. There is exactly one object for each name: compare with ``is``, use as a dict key."""

    name: str
    kind: Kind
    itemsize: int
    storage: np.dtype[Any]

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return dtype_of, (self.name,)  # copies and unpickled objects are the same object


def _make(name: str, kind: Kind) -> DType:
    storage = np.dtype("uint16" if name == "bfloat16" else name)
    return DType(name, kind, storage.itemsize, storage)


BOOL: Final = _make("bool", "bool")
UINT8: Final = _make("uint8", "int")
UINT16: Final = _make("uint16", "int")
UINT32: Final = _make("uint32", "int")
UINT64: Final = _make("uint64", "int")
INT8: Final = _make("int8", "int")
INT16: Final = _make("int16", "int")
INT32: Final = _make("int32", "int")
INT64: Final = _make("int64", "int")
FLOAT16: Final = _make("float16", "float")
BFLOAT16: Final = _make("bfloat16", "float")
FLOAT32: Final = _make("float32", "float")
FLOAT64: Final = _make("float64", "float")

DTYPES: Final = (BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FLOAT16, BFLOAT16, FLOAT32, FLOAT64)

INT_RANGE: Final[dict[DType, tuple[int, int]]] = {BOOL: (0, 1)} | {
    d: (int(np.iinfo(d.storage).min), int(np.iinfo(d.storage).max)) for d in DTYPES if d.kind == "int"
}
PRECISION: Final = {FLOAT16: 11, BFLOAT16: 8, FLOAT32: 24, FLOAT64: 53}  # significant bits
TOP: Final = {FLOAT16: 16, BFLOAT16: 128, FLOAT32: 128, FLOAT64: 1024}  # finite magnitudes are below 2**TOP
# The least magnitude that rounds to infinity: half a unit above the largest finite value (that tie goes to the even
# neighbour, 2**TOP). No binary64 value lies between the largest float64 and its limit.
OVERFLOW: Final = {d: 2.0 ** TOP[d] - 2.0 ** (TOP[d] - p - 1) for d, p in PRECISION.items() if d is not FLOAT64}
OVERFLOW[FLOAT64] = math.inf

# The type of an array's elements, by its NumPy dtype in native byte order.
ARRAY_TYPES: Final[dict[np.dtype[Any], DType]] = {d.storage: d for d in DTYPES if d is not BFLOAT16}

# One table for everything that names a type: the object itself, its bare name, its name in a framework, and the NumPy
# dtype. A NumPy uint16 is uint16; bfloat16 in it must be named.
_TYPES: Final[dict[Any, DType]] = {
    **{d: d for d in DTYPES},
    **{prefix + d.name: d for d in DTYPES for prefix in ("", "paddle.", "torch.")},
    **ARRAY_TYPES,
}


def dtype_of(x: object) -> DType:
    """Return the :class:`DType` named by ``x``: a DType, a NumPy dtype, or a name such as "int64", "paddle.int64" or
    "torch.bfloat16".

    Byte order belongs to storage: a byte-swapped NumPy dtype names the same type. Raises :class:`InvalidValue` for
    anything else.
    """
    try:
        return _TYPES[x]
    except (KeyError, TypeError):  # TypeError: not hashable
        if isinstance(x, np.dtype) and x.name in _TYPES:
            return _TYPES[x.name]
    raise InvalidValue(
        f"{x!r} is not an element type of hal",
        cure="use one of " + ", ".join(d.name for d in DTYPES) + ", or a NumPy dtype of that name",
        argument="dtype",
    )


def bfloat16_to_float32(bits: NDArray[Any]) -> NDArray[np.float32]:
    """Return the exact values of bfloat16 patterns, in a new array."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Return floats below the overflow limit as bfloat16 patterns in a new array: one rounding to nearest, ties to
    even.

    Binary64 goes through binary32 rounded *to odd*, which keeps the information for the second rounding (Boldo and
    Melquiond, "Emulation of a FMA and correctly rounded sums", IEEE Transactions on Computers, 2008). Call it with
    NumPy's floating-point warnings off.
    """
    near = values.astype(np.float32)
    bits = near.view(np.uint32)
    if values.dtype == np.float64:  # towards zero, then the last bit is set if the result is inexact
        bits = bits - (np.abs(near) > np.abs(values)) | (near != values)
    upper = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(near), upper | np.uint32(0x0040), rounded).astype(np.uint16)


def bfloat16_scalar(v: float) -> np.uint16:
    """Return the same for one Python float, without arrays: scaled so that its last place in bfloat16 is the unit."""
    if math.isfinite(v):
        unit = max(math.frexp(v)[1] - 8, -133)  # 2**-133 is the smallest subnormal
        rounded = round(math.ldexp(v, -unit))  # the scaling is exact, round() is half to even
        v = math.copysign(math.ldexp(rounded, unit), v)
    bits = int.from_bytes(struct.pack(">f", v)[:2], "big")
    return np.uint16(bits | 0x0040 if math.isnan(v) else bits)


def inexact_ints(ints: NDArray[Any], dtype: DType) -> NDArray[np.bool_]:
    """Return where an int has more significant bits than ``dtype``, or is too large for it; computed in integers."""
    size = ints if ints.dtype.kind == "u" else np.abs(ints.astype(np.int64))  # the least int64 wraps to its magnitude
    size = size.astype(np.uint64)
    lowest = np.maximum(size & (~size + np.uint64(1)), np.uint64(1))  # the lowest bit that is set
    bad: NDArray[np.bool_] = size >> np.uint64(PRECISION[dtype]) >= lowest
    return bad | (size >> np.uint64(TOP[dtype]) > 0) if dtype is FLOAT16 else bad


# --- One scalar into each type: a function for each target and class -----------------------------------------------


def _int_maker(dtype: DType, to_float: ScalarMaker) -> ScalarMaker:
    """Return a converter of ints and bools (Python's bool is an int) to ``dtype``."""
    if dtype.kind == "float":
        precision, top = PRECISION[dtype], TOP[dtype]

        def to_exact(v: int) -> np.generic:
            size = abs(v)
            # The bits from the highest to the lowest that is set must be at most `precision`; 0 has none.
            if size.bit_length() - (size & -size).bit_length() < precision and size.bit_length() <= top:
                return to_float(float(v))
            raise _refused(v, dtype)

        return to_exact

    make: ScalarMaker = dtype.storage.type
    low, high = INT_RANGE[dtype]

    def to_int(v: int) -> np.generic:
        if low <= v <= high:
            return make(v)
        raise _refused(v, dtype)

    return to_int


def _float_maker(dtype: DType) -> ScalarMaker:
    """Return a converter of floats to ``dtype``, rounded once, as NumPy's scalar constructors do."""
    make: ScalarMaker = bfloat16_scalar if dtype is BFLOAT16 else dtype.storage.type
    limit = OVERFLOW.get(dtype, math.nan)  # no float is below NaN: bool and int accept no float

    def to_float(v: float) -> np.generic:
        if -limit < v < limit or (limit == limit and not math.isfinite(v)):
            return make(v)
        raise _refused(v, dtype)

    return to_float


def _scalar_makers() -> dict[tuple[DType, type], ScalarMaker]:
    def of_numpy(maker: ScalarMaker) -> ScalarMaker:
        return lambda v: maker(v.item())

    makers: dict[tuple[DType, type], ScalarMaker] = {}
    for target in DTYPES:
        of_float = _float_maker(target)
        of_int = _int_maker(target, of_float)
        makers |= {(target, bool): of_int, (target, int): of_int, (target, float): of_float}
        for d in ARRAY_TYPES.values():
            makers[target, d.storage.type] = of_numpy(of_float if d.kind == "float" else of_int)
        if target is not BFLOAT16:  # a NumPy scalar of the target's dtype is immutable: its own conversion
            makers[target, target.storage.type] = lambda v: v
    return makers


def _refused(v: int | float, dtype: DType) -> ConversionRefused:
    """Return the error for a scalar ``v`` that does not fit ``dtype``."""
    if isinstance(v, float):
        what = f"the value has float {v!r}"
    else:  # Python refuses to print very large ints
        what = f"the value has int {v}" if v.bit_length() <= 128 else f"the value has an int of {v.bit_length()} bits"
    if dtype is BOOL:
        return refusal(f"{what}, but bool takes only bools and the ints 0 and 1", "compare it first: value != 0")
    if dtype.kind == "int":
        low, high = INT_RANGE[dtype]
        cure = "round it to int first" if isinstance(v, float) else "clip it to that range"
        return refusal(
            f"{what}, but {dtype} takes only bools and ints from {low} to {high}", f"{cure}, or use a wider target"
        )
    if isinstance(v, float):
        overflow = f"{what}, but {dtype} overflows to infinity from a magnitude of {OVERFLOW[dtype]!r}"
        return refusal(overflow, "clip it, or pass an infinity if one is meant")
    exact = f"{what}, but {dtype} holds only ints of {PRECISION[dtype]} significant bits below 2**{TOP[dtype]} exactly"
    return refusal(exact, "pass a float if rounding is meant, or use a wider target")


def unknown_value(what: str) -> ConversionRefused:
    """Return the error for a value of no known class."""
    names = ", ".join(d.name for d in DTYPES)
    return refusal(f"the value is {what}", f"pass bools, ints, floats, lists of them, or a NumPy array of {names}")


def refusal(what: str, cure: str) -> ConversionRefused:
    """Return an error of conversion, which names the argument ``value``."""
    return ConversionRefused(what, cure=cure, argument="value")


SCALAR_MAKERS: Final = _scalar_makers()
