"""Geometry of a layout's rows and records, as the numbers that an insertion plan uses."""

from __future__ import annotations

from .fields import ROW_FIELDS, Field
from .layout import StateLayout

DYNAMIC = ("seq_lens_this_time", "seq_lens_encoder", "seq_lens_decoder", "blocks_num")
"""Fields of a record (all int32) that depend on the moment of insertion."""
Rows = tuple[tuple[int, int, int, int], ...]
"""Of each row field, in the order of ``ROW_FIELDS``: base and stride in bytes, bytes per element, and the reset value
repeated to 8 bytes."""


def geometry_of_rows(layout: StateLayout) -> Rows:
    """Return base, stride, bytes per element and reset value of each row field of a layout."""
    places = [layout.fields[name] for name in ROW_FIELDS]
    return tuple([(p.offset, p.stride, p.field.dtype.itemsize, reset_cycle(p.field)) for p in places])


def reset_cycle(field: Field) -> int:
    """Return a field's reset value, repeated to 8 bytes, as a signed number."""
    dtype = field.dtype
    cycle = dtype.storage.type(field.reset).tobytes() * (8 // dtype.itemsize)
    return int.from_bytes(cycle, "little", signed=True)
