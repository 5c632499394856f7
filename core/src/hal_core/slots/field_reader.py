"""A state's fields read from copied bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..memory.views import ByteRange
    from .layout import StateLayout


def fields_of(layout: StateLayout, slots: int, part: ByteRange) -> np.dtype[np.void]:
    """Return the fields entirely within ``part``, ``[slots, width]`` each, as one NumPy structure of its size, so that
    one view covers all of them."""
    inside = {
        name: (place.field.dtype.storage, (slots, place.width), place.offset - part.offset)
        for name, place in layout.fields.items()
        if part.offset <= place.offset and place.offset + place.stride * slots <= part.end
    }
    if not inside:
        return np.dtype([])
    kinds = [(storage, shape) for storage, shape, _ in inside.values()]
    offsets = [offset for _, _, offset in inside.values()]
    return np.dtype({"names": list(inside), "formats": kinds, "offsets": offsets, "itemsize": part.nbytes})


class CopiedFields(Mapping[str, np.ndarray[Any, Any]]):
    """The fields of one NumPy record by name."""

    def __init__(self, record: np.void) -> None:
        self._record = record

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        try:
            found: np.ndarray[Any, Any] = self._record[name]
        except ValueError:
            raise KeyError(name) from None
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._record.dtype.names or ())

    def __len__(self) -> int:
        return len(self._record.dtype.names or ())
