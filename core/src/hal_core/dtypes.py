"""The element types of hal: one small object a type, the same on every device and without its framework.

NumPy has no bfloat16 (the upper half of an IEEE 754 binary32: sign, 8 exponent bits, 7 fraction bits), so it is
stored as its uint16 pattern; every other type is stored as the NumPy type of its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from hal_core.errors import InvalidValue

Kind = Literal["bool", "int", "float"]


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
        return dtype_of, (self.name,)  # copies and unpickled objects are the one object again


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

DTYPES: Final = (
    *(BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64),
    *(FLOAT16, BFLOAT16, FLOAT32, FLOAT64),
)

# One table for everything that names a type: the object itself, its name alone and as a framework prints it, and
# the NumPy dtype. A NumPy uint16 is uint16; that it holds bfloat16 must be said by name.
_TYPES: Final[dict[Any, DType]] = {
    **{d: d for d in DTYPES},
    **{prefix + d.name: d for d in DTYPES for prefix in ("", "paddle.", "torch.")},
    **{d.storage: d for d in DTYPES if d.name != "bfloat16"},
}


def dtype_of(x: object) -> DType:
    """The :class:`DType` that ``x`` names: a DType, a NumPy dtype, or a name such as "int64", "paddle.int64" or
    "torch.bfloat16". Byte order is a matter of storage: a byte-swapped NumPy dtype names the same type.

    Raises :class:`InvalidValue` for anything else.
    """
    try:
        return _TYPES[x]
    except (KeyError, TypeError):  # TypeError: not hashable
        if isinstance(x, np.dtype) and x.name in _TYPES:
            return _TYPES[x.name]
    raise InvalidValue(
        f"{x!r} is no element type of hal",
        cure="use one of " + ", ".join(d.name for d in DTYPES) + ", or a NumPy dtype of that name",
        argument="dtype",
    )
