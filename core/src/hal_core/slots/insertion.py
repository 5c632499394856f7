"""From a task batch to a write plan: plain NumPy, all fields of all requests at once, no device (G9 to G11).

A slot that is entered or left gets a whole packed record: its request's, or the empty slot's. Rows are written to the
request's own length and reset from there to the largest length written before. The ledger is read and left as it is;
the policy commits the batch once the device has taken the plan.

This is the hot path of ``insert_tasks``: it works on ``[row fields, requests]`` matrices, so that the number of NumPy
calls does not grow with either.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..memory.plan import WRITE, Buffer, Records, WritePlan
from .admission import empty_record
from .host_table import BLOCKS, FEW, TOKENS
from .tasks import TaskBatch, TaskKind

if TYPE_CHECKING:
    from .state import SlotState

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
Packed = np.ndarray[Any, np.dtype[np.void]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

PUT, ROW = struct.Struct("<i"), struct.Struct("<3q")


class _Writes:
    """Descriptors as an int64 matrix ``[n, 3]`` (dst, source, pattern << 32 | nbytes), and their payload."""

    def __init__(self) -> None:
        self.rows: list[Ints] = []
        self.pieces: list[Buffer] = []
        self.size = 0

    def copy(self, dst: Ints, nbytes: Ints | int, pieces: Sequence[Buffer]) -> None:
        """Copy the pieces, one after the other, in runs of ``nbytes`` to ``dst``."""
        rows = np.empty((len(dst), 3), np.int64)
        rows[:, 0], rows[:, 2] = dst, nbytes
        ends = rows[:, 2].cumsum() + self.size
        rows[:, 1] = ends - nbytes
        self.size = int(ends[-1])
        self.rows.append(rows)
        self.pieces += pieces

    def fill(self, dst: Ints, nbytes: Ints, cycles: Ints, pattern: Ints) -> None:
        """Fill ``nbytes`` at ``dst`` with the 8-byte cycles, elements of ``pattern`` bytes."""
        rows = np.empty((len(dst), 3), np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2] = dst, cycles, (pattern << 32) | nbytes
        self.rows.append(rows)

    def plan(self, state: SlotState, records: Records | None) -> WritePlan:
        """The plan; its writes never overlap, as each slot's fields are written once in a batch."""
        if not self.rows:
            return WritePlan(state.memory, np.zeros(0, WRITE), (), records)
        rows = self.rows[0] if len(self.rows) == 1 else np.concatenate(self.rows)
        return WritePlan(state.memory, rows.reshape(-1).view(WRITE), self.pieces, records)


def plan_insert(state: SlotState, tasks: TaskBatch) -> WritePlan:
    """The plan that puts ``tasks``, already checked, into their slots. Nothing is written or committed here."""
    if tasks.all_prefill and len(tasks) <= FEW:
        return _plan_few(state, tasks)
    if tasks.all_prefill:
        return _plan_prefill(state, tasks)
    return _plan_mixed(state, tasks, tasks.packed(state.layout))


def _plan_prefill(state: SlotState, tasks: TaskBatch) -> WritePlan:
    """New requests alone, all their rows in one ``[row fields, requests]`` matrix."""
    packed, place, n = tasks.packed(state.layout), state.record_places, len(tasks)
    slots, lengths, counts = tasks.slots, tasks.lengths, tasks.block_counts
    data = packed.view(np.uint8).reshape(n, -1)[:, place.begin :].copy()
    for at, values in zip(place.dynamic, (lengths, lengths, tasks.starts, counts), strict=True):
        data[:, at - place.begin : at - place.begin + 4] = values.view(np.uint8).reshape(n, 4)
    geometry = state.rows
    extents = packed["extents"].T.copy()
    extents[BLOCKS] = counts
    begin, nbytes = geometry.base + slots * geometry.stride, extents * geometry.size
    flat = nbytes.reshape(-1)
    chosen = flat.nonzero()[0]
    rows = np.empty((len(chosen), 3), np.int64)
    rows[:, 0], rows[:, 2] = begin.reshape(-1)[chosen], flat[chosen]
    rows[:, 1] = (flat.cumsum() - flat)[chosen]
    writes = _Writes()
    writes.rows.append(rows)
    parts = list(zip(*[request.rows for request in tasks.requests], strict=True))
    for row in np.flatnonzero(nbytes.any(axis=1)).tolist():
        if row == BLOCKS:
            writes.pieces.append(tasks.blocks.data.cast("B"))
        elif row == TOKENS:
            writes.pieces += parts[TOKENS]
        else:
            writes.pieces.append(b"".join(parts[row]))
    stale = state.ledger.extents[:, slots] - extents
    if stale.max() > 0:
        at = (stale > 0).nonzero()
        size = geometry.size[at[0], 0]
        writes.fill(begin[at] + nbytes[at], stale[at] * size, geometry.cycle[at[0]], size)
    return writes.plan(state, Records(slots, data, state.spread))


def _plan_few(state: SlotState, tasks: TaskBatch) -> WritePlan:
    """The same for a few new requests: for them most of a NumPy call is overhead, so plain Python is faster."""
    geometry, record, plain = state.rows, state.record_places, tasks.plain
    starts, lengths, counts = plain["starts"], plain["lengths"], plain["block_counts"]
    records: list[bytearray] = []
    pieces: list[Buffer] = []
    rows: list[bytes] = []
    source = 0
    for at, slot in enumerate(plain["slots"]):
        request, count, length = tasks.requests[at], counts[at], lengths[at]
        data = bytearray(request.packed)
        for place, value in zip(record.dynamic, (length, length, starts[at], count), strict=True):
            PUT.pack_into(data, place, value)
        records.append(data[record.begin :])
        written = state.ledger.extents[:, slot].tolist()
        for row, (base, stride, size, cycle) in enumerate(geometry.plain):
            used = count if row == BLOCKS else request.extents[row]
            dst, nbytes = base + slot * stride, used * size
            if nbytes:
                pieces.append(tasks.block_ids[at].tobytes() if row == BLOCKS else request.rows[row])
                rows.append(ROW.pack(dst, source, nbytes))
                source += nbytes
            if written[row] > used:
                rows.append(ROW.pack(dst + nbytes, cycle, (size << 32) | ((written[row] - used) * size)))
    joined = np.frombuffer(b"".join(records), np.uint8).reshape(len(tasks), -1)
    writes = np.frombuffer(b"".join(rows), WRITE)
    return WritePlan(state.memory, writes, pieces, Records(tasks.slots, joined, state.spread))


def _plan_mixed(state: SlotState, tasks: TaskBatch, packed: Packed) -> WritePlan:
    kinds, writes = tasks.kinds, _Writes()
    entering = ((kinds == TaskKind.PREFILL) | (kinds == TaskKind.HANDOFF)).nonzero()[0]
    leaving = (kinds >= TaskKind.PREEMPTED).nonzero()[0]
    growing = ((kinds == TaskKind.CHUNK) | (kinds == TaskKind.DECODE)).nonzero()[0]
    chunks = (kinds == TaskKind.CHUNK).nonzero()[0]
    records = _entering_records(state, tasks, packed, entering) if len(entering) else None
    left = leaving[~np.isin(tasks.slots[leaving], tasks.slots[entering])]
    if len(left):
        records = _with_empty(state, records, tasks.slots[left])
    if len(entering):
        _rows(state, writes, tasks, packed, entering)
    if len(growing):
        _grow(state, writes, tasks, growing)
    if len(chunks):
        for name in ("seq_lens_this_time", "seq_lens_encoder"):
            _scalars(state, writes, name, tasks.slots[chunks], tasks.lengths[chunks])
    for name, kind in (("last_preempted", TaskKind.PREEMPTED), ("last_aborted", TaskKind.ABORTED)):
        chosen = leaving[kinds[leaving] == kind]
        if len(chosen):
            _scalars(state, writes, name, tasks.slots[chosen], packed["record"]["request_serial"][chosen])
    return writes.plan(state, records)


def _entering_records(state: SlotState, tasks: TaskBatch, packed: Packed, chosen: Ints | None) -> Records:
    """The records of the requests that enter slots (None: of all tasks), completed by what insertion decides."""
    rows = packed["record"].copy() if chosen is None else packed["record"][chosen]
    take = slice(None) if chosen is None else chosen
    lengths = tasks.lengths[take]
    rows["seq_lens_this_time"] = lengths
    rows["seq_lens_encoder"] = lengths
    rows["seq_lens_decoder"] = tasks.starts[take]
    rows["blocks_num"] = tasks.block_counts[take]
    if chosen is not None:
        for at in (tasks.kinds[chosen] == TaskKind.HANDOFF).nonzero()[0].tolist():
            _hand_off(rows, at, tasks, int(chosen[at]))
    return Records(tasks.slots[take], rows.view(np.uint8).reshape(len(rows), -1), state.spread)


def _hand_off(rows: Packed, at: int, tasks: TaskBatch, task: int) -> None:
    """The decode role of a split: the prompt's KV is there, first token and drafts are given (G12)."""
    row, drafts = rows[at], tasks.drafts[task]
    row["seq_lens_encoder"] = 0
    row["seq_lens_decoder"] = row["prompt_lens"] + row["step_idx"]
    row["seq_lens_this_time"] = 1 + len(drafts)
    row["next_tokens"] = tasks.first_tokens[task]
    row["step_idx"] += 1
    row["draft_num"] = len(drafts)
    if drafts:
        rows["draft_tokens"].reshape(len(rows), -1)[at, : len(drafts)] = drafts


def _with_empty(state: SlotState, records: Records | None, slots: Ints) -> Records:
    """The records with those of empty slots after them."""
    empty = np.repeat(empty_record(state.layout), len(slots)).view(np.uint8).reshape(len(slots), -1)
    if records is None:
        return Records(slots.astype(np.int32), empty, state.spread)
    slots = np.concatenate([records.slots, slots])
    return Records(slots, np.concatenate([records.data, empty]), state.spread)


def _rows(state: SlotState, writes: _Writes, tasks: TaskBatch, packed: Packed, chosen: Ints | None) -> None:
    """Each entering request's own rows, and the reset of what earlier requests left behind them (G11)."""
    take = slice(None) if chosen is None else chosen
    slots = tasks.slots[take]
    extents = packed["extents"][take].T.copy()
    extents[BLOCKS] = tasks.block_counts[take]
    requests = list(tasks.requests) if chosen is None else [tasks.requests[at] for at in chosen.tolist()]
    token_rows = [request.rows[TOKENS] for request in requests]
    if chosen is not None:
        handoff = tasks.kinds[chosen] == TaskKind.HANDOFF
        extents[TOKENS] += handoff
        for at in handoff.nonzero()[0].tolist():
            token_rows[at] = bytes(token_rows[at]) + tasks.first_tokens[chosen[at]].tobytes()
    geometry = state.rows
    begin = geometry.base + slots * geometry.stride
    used = extents.any(axis=1)
    for row in np.flatnonzero(used).tolist():
        if row == BLOCKS:
            pieces: Sequence[Buffer] = _blocks_of(tasks, chosen)
        else:
            pieces = token_rows if row == TOKENS else [request.rows[row] for request in requests]
        writes.copy(begin[row], extents[row] * geometry.size[row, 0], pieces)
    stale = state.ledger.extents[:, slots] - extents
    kinds, columns = np.nonzero(stale > 0)
    if len(kinds):
        at, size = (kinds, columns), geometry.size[kinds, 0]
        writes.fill(begin[at] + extents[at] * size, stale[at] * size, geometry.cycle[kinds], size)


def _blocks_of(tasks: TaskBatch, chosen: Ints | None) -> list[Buffer]:
    """The KV block ids of the chosen tasks."""
    if chosen is None:
        return [ids.view(np.uint8) for ids in tasks.block_ids]
    return [tasks.block_ids[at].view(np.uint8) for at in chosen.tolist()]


def _grow(state: SlotState, writes: _Writes, tasks: TaskBatch, growing: Ints) -> None:
    """New entries of the block tables of requests that stay."""
    slots, counts = tasks.slots[growing], tasks.block_counts[growing]
    if counts.any():
        place = state.layout.fields["block_tables"]
        dst = place.offset + slots.astype(np.int64) * place.stride + tasks.first_blocks[growing] * np.int64(4)
        writes.copy(dst, counts * np.int64(4), _blocks_of(tasks, growing))
    _scalars(state, writes, "blocks_num", slots, state.ledger.blocks[slots] + counts)


def _scalars(state: SlotState, writes: _Writes, name: str, slots: Ints, values: Ints) -> None:
    """One scalar field of some slots."""
    place = state.layout.fields[name]
    data = np.ascontiguousarray(values, place.field.dtype.storage).view(np.uint8)
    writes.copy(place.offset + slots.astype(np.int64) * place.stride, place.stride, [data])
