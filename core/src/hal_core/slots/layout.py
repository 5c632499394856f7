"""The layout of the slot table's fields in a state's one block of device memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np

from ..errors import InvalidValue
from ..memory.views import ByteRange
from .fields import GROUPS, HEADER_BYTES, ROW_FIELDS, STATE_TABLE, Field, StateConfig

ALIGNMENT = 64
"""Bytes; each field begins on a cache line, which is also the coarsest alignment that a vector copy needs."""

REQUEST_ROW = np.dtype(
    [
        ("row_lengths", np.int64, (len(ROW_FIELDS),)),
        ("admission_id", np.int64),
        ("config_key", np.int64),
        ("tokens_left", np.int64),
    ]
)
"""The part of each request that insertion reads: the lengths of its rows, in the order of ``ROW_FIELDS``, its admission
id, the sizes it was admitted for, and how many tokens this worker may still generate for it (1 for the role PREFILL).
All int64, so that a batch of them is a matrix."""
ADMISSION_ID = len(ROW_FIELDS)
CONFIG_KEY, TOKENS_LEFT = ADMISSION_ID + 1, ADMISSION_ID + 2
"""Columns of that matrix, after the lengths."""

BROADCAST_GROUPS = ("broadcast", "broadcast_speculative")


@dataclass(frozen=True, slots=True)
class Placed:
    """A field and its place: ``offset`` bytes into the block, ``width`` elements and ``stride`` bytes a slot."""

    field: Field
    offset: int
    width: int
    stride: int


@dataclass(frozen=True)
class StateLayout:
    """The layout of a state: each field's place, each group's byte range, and the digest that ranks compare (G14)."""

    sizes: StateConfig
    fields: MappingProxyType[str, Placed]
    groups: MappingProxyType[str, ByteRange]
    headers: MappingProxyType[str, ByteRange]
    nbytes: int

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that differ whenever sizes, fields, their order, types, places, groups or reset values differ
        (SHA-256). The source of a declared field's value is not included, as ranks get the same requests."""
        text = repr(self.sizes) + "".join(
            f"|{p.field.name}:{p.field.dtype.name}:{p.width}:{p.offset}:{sorted(p.field.groups)}"
            f":{p.field.reset!r}:{p.field.kept}"
            for p in self.fields.values()
        )
        return hashlib.sha256(text.encode()).digest()

    @cached_property
    def record_dtype(self) -> np.dtype[np.void]:
        """The packed record with a request's scalars and short rows, fields in table order, no padding."""
        return np.dtype(
            [
                (p.field.name, p.field.dtype.storage, (p.width,) if p.width > 1 else ())
                for p in self.fields.values()
                if p.field.record
            ]
        )

    @cached_property
    def param_fields(self) -> tuple[tuple[str, str], ...]:
        """The record's fields that hold a sampling parameter, each with its parameter's name."""
        return tuple((p.field.name, p.field.param) for p in self.fields.values() if p.field.record and p.field.param)

    @cached_property
    def declared(self) -> tuple[Placed, ...]:
        """The declared fields that take a value from the request."""
        return tuple(p for p in self.fields.values() if p.field.source is not None)

    @cached_property
    def keeps(self) -> bool:
        """Whether a field keeps its value when the request leaves its slot."""
        return any(p.field.kept for p in self.fields.values())

    @cached_property
    def extras(self) -> frozenset[str] | None:
        """The valid names in ``Request.extra``; None for any, since a field's function may read them."""
        if any(callable(p.field.source) for p in self.declared):
            return None
        return frozenset(p.field.name for p in self.declared)

    @cached_property
    def admission_dtype(self) -> np.dtype[np.void]:
        """The dtype of admission's result: the fields of :data:`REQUEST_ROW`, and the request's record."""
        return np.dtype([*REQUEST_ROW.descr, ("record", self.record_dtype)])

    @cached_property
    def config_key(self) -> int:
        """A number that differs if a request's rows or record would: in all sizes but ``num_slots`` and ``block_size``,
        and in the fields of the record, their reset values and sources."""
        sizes = replace(self.sizes, num_slots=1, block_size=1)
        sources = [p.field.source if isinstance(p.field.source, str) else id(p.field.source) for p in self.declared]
        text = f"{sizes!r}{self.record_dtype.descr}{sources}{[p.field.reset for p in self.fields.values()]}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)

    def place(self, name: str) -> Placed:
        """Return the place of a field. Raises :class:`InvalidValue` naming the existing fields."""
        try:
            return self.fields[name]
        except KeyError:
            raise InvalidValue(
                f"no field {name!r} in the state", cure=f"fields: {', '.join(self.fields)}", argument="field"
            ) from None


def lay_out(sizes: StateConfig, table: Sequence[Field] = STATE_TABLE, begin: int = 0) -> StateLayout:
    """Place ``table``, in order, into one block, starting at its byte ``begin``. Raises :class:`InvalidValue` if a
    group's fields are not adjacent."""
    placed: dict[str, Placed] = {}
    headers: dict[str, ByteRange] = {}
    at = begin
    for field in table:
        if field.name in placed:
            raise InvalidValue(f"field {field.name} is declared twice", argument="table")
        beginning = [group for group in BROADCAST_GROUPS if group in field.groups and group not in headers]
        if beginning:  # groups that begin with the same field share one header: a state sends one of them
            headers |= dict.fromkeys(beginning, ByteRange(at, HEADER_BYTES))
            at += HEADER_BYTES
        width = sizes.width(field.width)
        stride = width * field.dtype.itemsize
        placed[field.name] = Placed(field, at, width, stride)
        at += -(-stride * sizes.num_slots // ALIGNMENT) * ALIGNMENT
    groups = {group: _group_range(group, sizes, placed, headers) for group in GROUPS}
    return StateLayout(sizes, MappingProxyType(placed), MappingProxyType(groups), MappingProxyType(headers), at - begin)


def _group_range(group: str, sizes: StateConfig, placed: dict[str, Placed], headers: dict[str, ByteRange]) -> ByteRange:
    """Return the bytes of a group, including its header; its fields must be adjacent, as they are copied at once."""
    names = list(placed)
    inside = [name for name in names if group in placed[name].field.groups]
    if not inside:
        return ByteRange(0, 0)
    first, last = names.index(inside[0]), names.index(inside[-1])
    apart = [name for name in names[first:last] if name not in inside]
    if apart:
        raise InvalidValue(f"fields of group {group} are not adjacent: {apart} between them", argument="table")
    begin = headers[group].offset if group in headers else placed[inside[0]].offset
    end = placed[inside[-1]]
    return ByteRange(begin, end.offset + end.stride * sizes.num_slots - begin)
