"""Liars about NaNs that are converted from type to type: a payload is lost, and an infinity is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..harness.bits import to_bfloat16
from . import Patch, liar

Array = np.ndarray[Any, Any]


class Converts(Patch):
    """Base: arrays of floats whose NaNs are converted by their bits."""

    seam = "conversion of a value"

    @classmethod
    def nans(cls, value: Array, name: str) -> Array | None:
        """Return the words that these NaNs become in the type of that name; None: as they should."""
        raise NotImplementedError

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Convert, and put the NaNs over it."""

        def prepare(target: Any, value: Any) -> Any:  # noqa: ANN401 (the core's)
            out = true(target, value)
            if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or not isinstance(out, np.ndarray):
                return out
            flat = value.reshape(-1).astype(value.dtype.newbyteorder("="))
            places = np.flatnonzero(np.isnan(flat))
            if (
                len(places)
                and len(flat) == out.size
                and (found := cls.nans(flat[places], target.dtype.name)) is not None
            ):
                out = out.copy()
                out.reshape(-1).view(found.dtype)[places] = found
            return out

        return prepare


@liar(6, "a NaN becomes bfloat16 by the rounding of numbers", seen="kernels that add 0x7fff and shift")
class NaNsAreRounded(Converts):
    """A payload in the lower half is rounded away, one of all ones is carried into the sign."""

    @classmethod
    def nans(cls, value: Array, name: str) -> Array | None:
        """Round the words."""
        if name != "bfloat16" or value.dtype != np.float32:
            return None
        return to_bfloat16(value.view(np.uint32))


@liar(6, "of a double's NaN the upper bits are kept, whatever is left of its payload")
class NaNsAreCut(Converts):
    """A conversion by shifts for special values."""

    @classmethod
    def nans(cls, value: Array, name: str) -> Array | None:
        """Shift the words."""
        if name != "float32" or value.dtype != np.float64:
            return None
        bits = value.view(np.uint64)
        sign = (bits >> np.uint64(63)) << np.uint64(31)
        cut: Array = (sign | np.uint64(0x7F800000) | ((bits >> np.uint64(29)) & np.uint64(0x7FFFFF))).astype(np.uint32)
        return cut
