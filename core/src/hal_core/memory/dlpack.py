"""DLPack capsules over views, for other libraries without a copy, in the layout of DLPack's C header.

DLPack 1.0, ``dlpack.h``: a managed tensor is a ``DLTensor`` (data, device, axes, dtype, shape, strides, byte offset), a
pointer for its producer, and a deleter. A capsule holds its address, under a name that the consumer changes. Consumers
without a version get the layout from before 1.0, which NumPy treats as read-only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .dtypes import DType

DLPACK_CPU: Final = 1
"""``kDLCPU``"""
DLPACK_CUDA: Final = 2
"""``kDLCUDA``"""
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6}
"""``DLDataTypeCode``"""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_out: dict[int, tuple[Any, ...]] = {}
"""Objects needed by capsules and their tensors, by the address of the managed tensor, until it is deleted."""


def _forget(managed: int) -> None:
    _out.pop(managed, None)


def _drop(capsule: int) -> None:
    """Drop the tensor of a deleted capsule if no consumer has taken it."""
    for name in (_NAME, _VERSIONED):
        if _is_valid(capsule, name):
            _out.pop(_pointer(capsule, name), None)


_delete, _destroy = _Deleter(_forget), _Deleter(_drop)
_NAME: Final = b"dltensor"
_VERSIONED: Final = b"dltensor_versioned"
_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Deleter)(("PyCapsule_New", _api))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))


def code_of(dtype: DType) -> int:
    """Return the ``DLDataTypeCode`` of a type."""
    name = dtype.name.rstrip("0123456789")
    return _CODES[name]


def capsule(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: DType,
    device: tuple[int, int],
    keep: object,
    *,
    versioned: bool = False,
) -> object:
    """Return a capsule over device memory.

    :param address: of the first element.
    :param strides: in elements, one for each of ``shape``.
    :param device: ``(DLDeviceType, index)``.
    :param keep: kept alive until the consumer releases the memory.
    :param versioned: in the layout of DLPack 1.0, for a consumer that supports it.
    """
    axes = (ctypes.c_int64 * len(shape))(*shape)
    steps = (ctypes.c_int64 * len(shape))(*strides)
    tensor = _Tensor(address, *device, len(shape), code_of(dtype), dtype.itemsize * 8, 1, axes, steps, 0)
    managed = _Versioned(1, 0, None, _delete, 0, tensor) if versioned else _Managed(tensor, None, _delete)
    place = ctypes.addressof(managed)
    _out[place] = (managed, axes, steps, keep)
    made: object = _new(place, _VERSIONED if versioned else _NAME, _destroy)
    return made
