"""Conversion of values to a target's dtype and shape, by class and by value (guarantee G6), into new memory (G2).

A value has a class: bool, int or float. Lists convert element by element, each by its own class, so all-bool lists are
bool, bools among ints count as 0 and 1, and ints among floats must be exact in the target.

=========  ======================  ============================  ==============================================
from / to  bool                    int                           float
=========  ======================  ============================  ==============================================
bool       itself                  0 or 1                        0.0 or 1.0
int        0 and 1, else refused   in range, else refused        if exact, else refused
float      refused                 refused                       to nearest, ties to even; NaN, infinities and
                                                                 signed zeros kept; overflow to infinity refused
=========  ======================  ============================  ==============================================

Sources: IEEE 754-2019, 4.3.1 (roundTiesToEven) and 7.4 (overflow is decided on the rounded result); bfloat16 is the
upper half of binary32. Every conversion rounds once. NaNs stay NaNs; their payload is unspecified, except that a value
of the target's dtype is copied bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from hal_core.errors import ConversionRefused, InvalidValue, ShapeMismatch
from hal_core.memory.dtypes import (
    ARRAY_TYPES,
    BFLOAT16,
    BOOL,
    FLOAT64,
    INT64,
    INT_RANGE,
    OVERFLOW,
    SCALAR_MAKERS,
    DType,
    bfloat16_to_float32,
    dtype_of,
    float_to_bfloat16,
    inexact_ints,
    refusal,
    unknown_value,
)

Array = NDArray[Any]

_INT64: Final = INT64.storage
# From-to pairs in which every int fits.
_WIDENING: Final = {
    (a, b)
    for a, (low, high) in INT_RANGE.items()
    for b, (least, most) in INT_RANGE.items()
    if least <= low <= high <= most
}
_LISTS: Final[dict[type, DType]] = {bool: BOOL, int: INT64, float: FLOAT64}
_MAX_DEPTH: Final = 16  # of nested lists; also stops at a list that contains itself


def convert(value: object, dtype: DType, shape: tuple[int, ...], source: DType | None = None) -> Array:
    """Return a new C-contiguous array of ``dtype.storage`` with exactly ``shape`` and the converted ``value``.

    A Python or NumPy scalar or a 0-d array fills the shape. Lists and tuples (also nested) and arrays are reshaped if
    the element count fits; an empty one fits only an empty shape. ``source`` names the dtype of an array that holds raw
    storage: bfloat16 given as uint16.

    Raises :class:`ShapeMismatch` and :class:`ConversionRefused`; the latter names the first offending element.
    """
    if source is None:
        if isinstance(value, (list, tuple)):
            return _from_sequence(value, dtype, shape)
        if type(value) is np.ndarray and ARRAY_TYPES.get(value.dtype) is dtype and value.ndim:
            return _fit(value.copy(), shape)
    scalar = convert_scalar(value, dtype, source)
    if scalar is not None:
        out = np.empty(shape, dtype.storage)
        out[...] = scalar
        return out
    assert isinstance(value, np.ndarray)
    return _from_array(value, dtype, shape, source)


def convert_scalar(value: object, dtype: DType, source: DType | None = None) -> np.generic | None:
    """Return ``value`` as a NumPy scalar of ``dtype.storage``, or None if it is no scalar (a list, tuple or array).

    For ``view[...] = scalar``: a fill needs no array. Raises :class:`ConversionRefused`, as :func:`convert` does.
    """
    if source is None:
        maker = SCALAR_MAKERS.get((dtype, type(value)))
        if maker is not None:
            return maker(value)
    return _other_scalar(value, dtype, source)


def _other_scalar(value: object, dtype: DType, source: DType | None) -> np.generic | None:
    """Convert scalars outside the table: 0-d arrays, raw storage, byte-swapped scalars, subclasses of int and float."""
    if isinstance(value, (np.ndarray, np.generic)):
        if value.ndim:
            return None
        found = _source_of(value, source)
        one = _native(np.asarray(value), found)
        if found is dtype:
            raw: np.generic = one[0]
            return raw
        item = (bfloat16_to_float32(one) if found is BFLOAT16 else one).item()
        return SCALAR_MAKERS[dtype, type(item)](item)
    if source is not None:
        raise InvalidValue(
            f"source={source} was given with a {type(value).__name__}",
            cure="give it only with an array or NumPy scalar of raw storage",
            argument="source",
        )
    if isinstance(value, (list, tuple)):
        return None
    if isinstance(value, int):
        return SCALAR_MAKERS[dtype, int](int(value))
    if isinstance(value, float):
        return SCALAR_MAKERS[dtype, float](float(value))
    raise unknown_value(f"a {type(value).__name__}")


def _source_of(value: Array | np.generic, source: DType | None) -> DType:
    """Return the dtype of the values in ``value``, which is the storage of ``source`` if that is given."""
    if isinstance(value, np.ma.MaskedArray):
        raise unknown_value("a masked array")
    try:
        found = dtype_of(value.dtype)
    except InvalidValue:
        raise unknown_value(f"of NumPy dtype {value.dtype}") from None
    if source is None or source is found:
        return found
    if source.storage == found.storage:
        return source
    raise InvalidValue(
        f"source={source} is stored as {source.storage}, but the value is {found}",
        cure=f"give the raw {source.storage} storage, or leave source out",
        argument="source",
    )


# --- Arrays --------------------------------------------------------------------------------------------------------


def _native(value: Array, source: DType) -> Array:
    """Return ``value`` C-contiguous with at least one dimension, in its storage dtype and native byte order; may share
    memory."""
    if source is BFLOAT16 and value.dtype.kind == "V":
        value = value.view(np.uint16)  # the bfloat16 of the ml_dtypes package
    return np.ascontiguousarray(value, dtype=source.storage)


def _from_array(value: Array, dtype: DType, shape: tuple[int, ...], source: DType | None) -> Array:
    found = _source_of(value, source)
    native = _native(np.asarray(value), found)
    _check_count(native.shape, shape)
    return _fit(native.copy() if found is dtype else _cast(native, found, dtype), shape)


def _cast(native: Array, source: DType, dtype: DType) -> Array:
    """Return a new array of ``dtype`` from a native C-contiguous one of another dtype."""
    if not native.size:
        return np.empty(native.shape, dtype.storage)
    if source.kind == "float":
        return _cast_float(native, source, dtype)
    if dtype.kind == "float":
        _refuse_where(inexact_ints(native, dtype), native, source, dtype)
        return float_to_bfloat16(native.astype(np.float32)) if dtype is BFLOAT16 else native.astype(dtype.storage)
    out = native.astype(dtype.storage)  # wraps, or is True for any int but 0
    if (source, dtype) not in _WIDENING:
        _refuse_where(out != native, native, source, dtype)  # NumPy compares mixed signs by value
    return out


def _cast_float(native: Array, source: DType, dtype: DType) -> Array:
    if dtype.kind != "float":
        _refuse_where(np.ones(native.shape, bool), native, source, dtype)
    with np.errstate(all="ignore"):  # underflow and signalling NaNs are valid here
        values = bfloat16_to_float32(native) if source is BFLOAT16 else native
        limit = OVERFLOW[dtype]
        if limit < OVERFLOW[source]:
            _refuse_where(np.isfinite(values) & (np.abs(values) >= limit), native, source, dtype)
        return float_to_bfloat16(values) if dtype is BFLOAT16 else values.astype(dtype.storage)


# --- Lists ---------------------------------------------------------------------------------------------------------


def _from_sequence(value: Sequence[Any], dtype: DType, shape: tuple[int, ...]) -> Array:
    kinds = [*map(type, value)]
    if dtype is INT64 and kinds.count(int) == len(kinds):  # the hot path: token ids
        try:
            return _fit(np.array(value, _INT64), shape)
        except OverflowError:
            pass  # refused below, with the index
    flat, have, kind = _flatten(value, kinds)
    _check_count(have, shape)
    found = _LISTS.get(kind)
    try:
        array = None if found is None else np.array(flat, found.storage)
    except OverflowError:  # an int beyond 64 bits: refused, or exact in a float
        array = None
    if array is None or found is None:
        return _from_elements(flat, have, dtype).reshape(shape)
    return _fit(array if found is dtype else _cast(array.reshape(have), found, dtype), shape)


def _from_elements(flat: Sequence[Any], have: tuple[int, ...], dtype: DType) -> Array:
    out = np.empty(len(flat), dtype.storage)
    for i, item in enumerate(flat):
        try:
            out[i] = convert_scalar(item, dtype)
        except ConversionRefused as error:
            raise _located(error, have, i) from None
    return out


def _flatten(value: Sequence[Any], types: list[type]) -> tuple[Sequence[Any], tuple[int, ...], type]:
    """Return the elements in C order, the shape, and the one type of all elements (``object`` if there are several)."""
    flat: Sequence[Any] = value
    have: tuple[int, ...] = (len(value),)
    while kinds := set(types):
        if any(issubclass(k, np.ndarray) for k in kinds):  # by value: Python's scalars represent all element types
            flat = [_listed(x, have, i) if isinstance(x, np.ndarray) else x for i, x in enumerate(flat)]
        elif any(issubclass(k, (list, tuple)) for k in kinds):
            lengths = [len(x) if isinstance(x, (list, tuple)) else -1 for x in flat]
            if lengths.count(lengths[0]) != len(lengths) or len(have) == _MAX_DEPTH:
                _refuse_ragged(lengths, have)
            flat, have = list(chain.from_iterable(flat)), (*have, lengths[0])
        else:
            return flat, have, kinds.pop() if len(kinds) == 1 else object
        types = [*map(type, flat)]
    return flat, have, bool  # no elements


def _listed(array: Array, have: tuple[int, ...], i: int) -> object:
    try:
        _source_of(array, None)
    except ConversionRefused as error:
        raise _located(error, have, i) from None
    return array.tolist()


# --- Shapes and refusals -------------------------------------------------------------------------------------------


def _fit(own: Array, shape: tuple[int, ...]) -> Array:
    """Return ``own``, a new C-contiguous array, in that shape."""
    if own.shape == shape:
        return own
    if own.size != math.prod(shape):
        _check_count(own.shape, shape)
    return own.reshape(shape)


def _check_count(have: tuple[int, ...], shape: tuple[int, ...]) -> None:
    count, wanted = math.prod(have), math.prod(shape)
    if count != wanted:
        raise ShapeMismatch(
            f"the value has shape {have}, {count} element(s); the target has shape {shape}, {wanted} element(s)",
            cure=f"pass {wanted} element(s), or a scalar to fill the target",
            argument="value",
        )


def _located(error: ConversionRefused, have: tuple[int, ...], i: int) -> ConversionRefused:
    index = [int(k) for k in np.unravel_index(i, have)]
    return refusal(f"at index {index}: {error.what}", error.cure)


def _refuse_where(bad: Array, native: Array, source: DType, dtype: DType) -> None:
    """Refuse the first element that is ``bad``, if any: its own conversion gives the error text."""
    if not np.count_nonzero(bad):
        return
    i = int(bad.argmax())
    try:
        convert_scalar(native.reshape(-1)[i], dtype, source)
    except ConversionRefused as error:
        raise _located(error, native.shape, i) from None
    raise AssertionError(f"{source} to {dtype}: the array is refused at {i}, the element is not")


def _refuse_ragged(lengths: list[int], have: tuple[int, ...]) -> NoReturn:
    if len(have) == _MAX_DEPTH:
        raise refusal(f"the value is a list nested deeper than {_MAX_DEPTH}", "pass a NumPy array")
    i = next(k for k, n in enumerate(lengths) if n != lengths[0])
    first, other = (f"{n} elements" if n >= 0 else "no list" for n in (lengths[0], lengths[i]))
    what = f"the value is a ragged list: {first} at index {[0] * len(have)}, {other}"
    raise _located(refusal(what, "pad the rows to one length"), have, i)
