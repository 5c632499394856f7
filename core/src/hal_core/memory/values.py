"""Preparation of the value of ``async_set_value``: checked, converted, and independent of the caller's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ConversionRefused, InvalidValue, ShapeMismatch
from .convert import convert, convert_scalar
from .dtypes import ARRAY_TYPES, SCALAR_MAKERS, DType
from .foreign_tensors import host_elements
from .views import View

Array = np.ndarray[Any, Any]
Value = np.generic | Array | View
"""One element that fills, a C-contiguous array of the target's shape and storage dtype, or a view of memory on the same
device (G6). The array may be the caller's own memory: a hook has read it when it returns (G2)."""

_PLAIN = (bool, int, float, list, tuple, np.ndarray)


def host_array(value: object) -> tuple[Array, DType] | None:
    """Return a framework's host tensor as an array with its dtype (bfloat16 as uint16); None for plain values."""
    if isinstance(value, _PLAIN) or not hasattr(value, "numpy") or not hasattr(value, "dtype"):
        return None
    return host_elements(value)


def device_value(resolve: Callable[[object], View], value: object) -> View:
    """Return a view of a tensor on the device. Its error names the value, where ``resolve`` would name the target."""
    try:
        return resolve(value)
    except InvalidValue as error:
        error.argument = "value"
        raise


def prepare(target: View, value: object) -> Value:
    """Convert a host value for ``target`` by the rules of G6 (:mod:`hal_core.memory.convert`)."""
    maker = SCALAR_MAKERS.get((target.dtype, type(value)))  # most values are scalars of these types
    if maker is not None:
        return maker(value)
    if type(value) is np.ndarray and value.ndim and ARRAY_TYPES.get(value.dtype) is target.dtype:
        if value.size != target.size:
            return convert(value, target.dtype, target.shape)  # raises the error if it does not fit
        return np.ascontiguousarray(value).reshape(target.shape)
    element = convert_scalar(value, target.dtype)
    return convert(value, target.dtype, target.shape) if element is None else element


def prepare_array(target: View, value: Array, source: DType) -> Value:
    """Convert a framework's host tensor, whose dtype may be unknown to NumPy."""
    return convert(value, target.dtype, target.shape, source=source)


def prepare_on_device(target: View, value: View) -> View:
    """Check a value that is on the device: it must have the target's dtype and as many elements (G6)."""
    if value.dtype is not target.dtype:
        raise ConversionRefused(
            f"the device value has dtype {value.dtype.name}, the target {target.dtype.name}",
            cure="convert it on the device first; values there are not inspected",
            argument="value",
        )
    if value.size == target.size:
        return value
    raise ShapeMismatch(
        f"the device value has shape {value.shape}, the target {target.shape}",
        cure="give a value with as many elements as the target",
        argument="value",
    )
