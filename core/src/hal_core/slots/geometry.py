"""Geometry of a layout's rows and records, as the numbers that an insertion plan uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .fields import ROW_FIELDS
from .layout import StateLayout

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]


@dataclass(frozen=True, slots=True)
class RowGeometry:
    """Places of the row fields, for plans: int64 ``[row fields, 1]`` each, in the order of ``ROW_FIELDS``.

    ``base`` and ``stride`` are bytes, ``size`` bytes per element; ``cycle`` (``[row fields]``) is the reset value
    repeated to 8 bytes; ``plain`` has the same four numbers of each row field as Python integers.
    """

    base: Ints
    stride: Ints
    size: Ints
    cycle: Ints
    plain: tuple[tuple[int, int, int, int], ...]

    @classmethod
    def of(cls, layout: StateLayout) -> RowGeometry:
        """Return the geometry of a layout's rows."""
        places = [layout.fields[name] for name in ROW_FIELDS]
        cycles = [p.field.dtype.storage.type(p.field.reset).tobytes() * (8 // p.field.dtype.itemsize) for p in places]
        plain = [
            (p.offset, p.stride, p.field.dtype.itemsize, int.from_bytes(cycle, "little", signed=True))
            for p, cycle in zip(places, cycles, strict=True)
        ]
        base, stride, size, cycle = np.array(plain, np.int64).T
        return cls(base[:, None], stride[:, None], size[:, None], cycle, tuple(plain))


DYNAMIC = ("seq_lens_this_time", "seq_lens_encoder", "seq_lens_decoder", "blocks_num")
"""Fields of a record (all int32) that depend on the moment of insertion."""


@dataclass(frozen=True, slots=True)
class RecordPlaces:
    """Byte offsets into packed requests: the begin of the record, and its ``DYNAMIC`` fields."""

    begin: int
    dynamic: tuple[int, ...]

    @classmethod
    def of(cls, layout: StateLayout) -> RecordPlaces:
        """Return the offsets in a layout's admission record."""
        packed, record = layout.admission_dtype.fields, layout.record_dtype.fields
        assert packed is not None
        assert record is not None
        begin = packed["record"][1]
        return cls(begin, tuple(begin + record[name][1] for name in DYNAMIC))
