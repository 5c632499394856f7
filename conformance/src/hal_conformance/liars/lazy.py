"""Liars about tensors of a framework whose memory is not their elements."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from hal_core.memory.dtypes import dtype_of

from . import Patch, liar


class TakesStorage(Patch):
    """Base: the memory of some host tensors is read as it is."""

    seam = "elements of a host tensor"

    @classmethod
    def takes(cls, tensor: Any) -> bool:  # noqa: ANN401 (a framework's)
        """Return whether this one is."""
        raise NotImplementedError

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Read the memory."""

        def elements(tensor: Any, argument: str = "value") -> Any:  # noqa: ANN401 (an array and its type)
            if hasattr(tensor, "data_ptr") and cls.takes(tensor):
                dtype = dtype_of(str(tensor.dtype))
                address, count = tensor.data_ptr(), tensor.numel()
                raw = np.ctypeslib.as_array((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address))
                return raw.view(dtype.storage).reshape(tensor.shape).copy(), dtype
            return true(tensor, argument)

        return elements


@liar(6, "a tensor that is lazily negated is written as its memory is", seen="torch: z.conj().imag")
class NegativeBitIgnored(TakesStorage):
    """data_ptr() is all that is asked."""

    @classmethod
    def takes(cls, tensor: Any) -> bool:  # noqa: ANN401 (a framework's)
        """Those."""
        return bool(tensor.is_neg())


@liar(6, "a sparse or quantized tensor is written as the memory of its values")
class LayoutIgnored(TakesStorage):
    """No look at the layout."""

    @classmethod
    def takes(cls, tensor: Any) -> bool:  # noqa: ANN401 (a framework's)
        """Those."""
        return bool(str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_nested)
