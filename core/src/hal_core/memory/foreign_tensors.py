"""Tensors of frameworks: checks of their memory layout, and the elements of a host tensor.

No view can describe some tensors: sparse, nested and quantized ones, and torch's whose memory holds the negative or the
conjugate of their elements. They are resolved on the host, or refused with their kind.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..errors import InvalidValue
from .dtypes import BFLOAT16, DType, dtype_of

Tensor = Any
"""A tensor of Paddle or torch."""
HOST_OF_TORCH = "cpu"
"""torch's name of host memory, as the type of a tensor's device."""


def check_plain(tensor: Tensor, argument: str) -> None:
    """Raise :class:`InvalidValue` for a tensor whose shape and strides do not give the places of its elements."""
    if hasattr(tensor, "is_nested") and hasattr(tensor, "layout"):
        _check_torch(tensor, argument)
    elif hasattr(tensor, "is_dense") and hasattr(tensor, "_is_initialized"):
        if not tensor.is_dense():
            raise _refused("sparse", "give tensor.to_dense()", argument)
        if not tensor._is_initialized() and 0 not in tensor.shape:
            raise _refused("without memory", "it was freed; give a live one", argument)


def check_resolved(tensor: Tensor, argument: str) -> None:
    """Check as :func:`check_plain`, and refuse torch's lazy tensors, whose memory holds other values than their
    elements."""
    check_plain(tensor, argument)
    for method, bit in (("is_neg", "neg"), ("is_conj", "conj")):
        if hasattr(tensor, method) and getattr(tensor, method)():
            raise _refused(f"lazy: torch's {bit} bit is set", f"give tensor.resolve_{bit}()", argument)


def _check_torch(tensor: Tensor, argument: str) -> None:
    if tensor.is_nested:
        raise _refused("nested", "give tensor.to_padded_tensor(padding), or its parts one by one", argument)
    layout = str(tensor.layout).removeprefix("torch.")
    if layout != "strided":
        raise _refused(f"of layout {layout}", "give tensor.to_dense()", argument)
    if tensor.is_quantized:
        raise _refused("quantized", "give tensor.dequantize(), or tensor.int_repr()", argument)


def _refused(kind: str, cure: str, argument: str) -> InvalidValue:
    return InvalidValue(f"the tensor is {kind}", cure=cure, argument=argument)


def host_elements(tensor: Tensor, argument: str = "value") -> tuple[np.ndarray[Any, Any], DType]:
    """Return a host tensor's elements as an array (bfloat16 as uint16), and their dtype; it may share the tensor's
    memory.

    :raises InvalidValue: for a tensor of torch's on another device (Paddle copies its own to the host), or one that no
        array can describe.
    """
    check_plain(tensor, argument)
    dtype = dtype_of(str(tensor.dtype))
    if hasattr(tensor, "is_nested"):
        tensor = _torch_values(tensor, dtype, argument)
    values = np.asarray(tensor.numpy())
    return values.view(dtype.storage) if dtype is BFLOAT16 else values, dtype


def _torch_values(tensor: Tensor, dtype: DType, argument: str) -> Tensor:
    """Return a torch tensor on which ``numpy()`` works."""
    if tensor.device.type != HOST_OF_TORCH:
        what = f"the tensor is on {tensor.device}, which is not the opened device"
        raise InvalidValue(what, cure="give tensor.cpu(), or open the device that holds it", argument=argument)
    if tensor.numel() and tensor.data_ptr() == 0:
        raise InvalidValue("the tensor has no memory", cure="give one with values", argument=argument)
    resolved = tensor.detach().resolve_conj().resolve_neg()
    return resolved.view(sys.modules["torch"].int16) if dtype is BFLOAT16 else resolved
