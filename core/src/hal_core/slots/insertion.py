"""Conversion of a task batch to a write plan: plain NumPy, all fields of all requests at once, no device (G9 to G11).

A slot that a request enters or leaves gets a whole packed record: the request's, or the empty slot's. Rows are written
to the request's own length and reset from there to the largest length written before. The host table is only read; the
policy commits the batch once the device has taken the plan.

This is the hot path of ``insert_tasks``. It works on ``[row fields, requests]`` matrices, so that the number of NumPy
calls does not grow with either.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..memory.plan import WRITE, Buffer, PlanBuilder, Records, WritePlan
from .admission import empty_record
from .companions import tasks_beside
from .host_table import BLOCKS, FEW, TOKENS
from .tasks import TaskBatch, TaskKind

if TYPE_CHECKING:
    from .state import SlotState

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

FEW_GROWING = 32
"""Up to this many requests that get more blocks are planned in plain Python: nearly every step of a decoder has
some."""
PUT, ROW = struct.Struct("<i"), struct.Struct("<3q")


def plan_insert(state: SlotState, tasks: TaskBatch) -> WritePlan:
    """Return the plan that writes the checked ``tasks`` into their slots, and into those of the state's companions.

    Neither device nor host table is changed here. The plan's writes never overlap, as each slot's fields are written
    once in a batch.
    """
    plan = _plan_state(state, tasks)
    for companion in state.companions:
        plan = plan.joined(_plan_state(companion, tasks_beside(companion, tasks)))
    return plan


def _plan_state(state: SlotState, tasks: TaskBatch) -> WritePlan:
    if tasks.all_prefill and len(tasks) <= FEW:
        return _plan_few(state, tasks)
    if tasks.all_growing and len(tasks) <= FEW_GROWING:
        return _plan_few_growing(state, tasks)
    writes = PlanBuilder(state.memory)
    if tasks.all_prefill:
        return writes.build(_enter(state, writes, tasks, None), disjoint=True)
    kinds = tasks.kinds
    entering = ((kinds == TaskKind.PREFILL) | (kinds == TaskKind.REMOTE_PREFILL)).nonzero()[0]
    leaving = (kinds >= TaskKind.PREEMPTED).nonzero()[0]
    growing = ((kinds == TaskKind.PREFILL_CHUNK) | (kinds == TaskKind.MORE_BLOCKS)).nonzero()[0]
    chunks = (kinds == TaskKind.PREFILL_CHUNK).nonzero()[0]
    records = _enter(state, writes, tasks, entering) if len(entering) else None
    left = leaving[~np.isin(tasks.slots[leaving], tasks.slots[entering])]
    if len(left):
        records = _with_empty(state, writes, records, tasks.slots[left])
    if len(growing):
        _grow(state, writes, tasks, growing)
    if len(chunks):
        for name in ("seq_lens_this_time", "seq_lens_encoder"):
            _scalars(state, writes, name, tasks.slots[chunks], tasks.num_scheduled_tokens[chunks])
    for name, kind in (("last_preempted", TaskKind.PREEMPTED), ("last_aborted", TaskKind.ABORTED)):
        chosen = leaving[kinds[leaving] == kind]
        if len(chosen):
            admission_ids = tasks.packed(state.layout)["record"]["request_serial"][chosen]
            _scalars(state, writes, name, tasks.slots[chosen], admission_ids)
    return writes.build(records, disjoint=True)


def _enter(state: SlotState, writes: PlanBuilder, tasks: TaskBatch, entering: Ints | None) -> Records:
    """Return the records of the requests that enter slots (None: of all tasks), completed with values known at
    insertion.

    Their rows, and the reset of earlier requests' data (G11), are added to ``writes``: all rows of all requests are one
    ``[row fields, requests]`` matrix.
    """
    packed, slots, lengths, starts = (
        tasks.packed(state.layout),
        tasks.slots,
        tasks.num_scheduled_tokens,
        tasks.num_computed_tokens,
    )
    counts, requests, place = tasks.block_counts, tasks.requests, state.record_places
    if entering is not None:
        packed, slots, lengths, starts = packed[entering], slots[entering], lengths[entering], starts[entering]
        counts, requests = counts[entering], tuple([requests[at] for at in entering.tolist()])
    n = len(slots)
    data = packed.view(np.uint8).reshape(n, -1)[:, place.begin :].copy()
    for at, values in zip(place.dynamic, (lengths, lengths, starts, counts), strict=True):
        data[:, at - place.begin : at - place.begin + 4] = values.view(np.uint8).reshape(n, 4)
    row_lengths = packed["row_lengths"].T.copy()
    row_lengths[BLOCKS] = counts
    parts: list[Sequence[Buffer]] = list(zip(*[request.rows for request in requests], strict=True))
    if entering is None:
        parts[BLOCKS] = [tasks.blocks.data.cast("B")]
    else:
        parts[BLOCKS] = [tasks.block_ids[at].tobytes() for at in entering.tolist()]
        parts[TOKENS] = _hand_off(state, tasks, entering, data, row_lengths, parts[TOKENS])
    geometry = state.rows
    begin, nbytes = geometry.base + slots * geometry.stride, row_lengths * geometry.size
    flat = nbytes.reshape(-1)
    some = flat.nonzero()[0]
    pieces: list[Buffer] = []
    for row in np.flatnonzero(nbytes.any(axis=1)).tolist():
        pieces += parts[row] if row == TOKENS else [b"".join(parts[row])]
    writes.runs(begin.reshape(-1)[some], flat[some], pieces)
    stale = state.host_table.row_lengths[:, slots] - row_lengths
    if stale.max() > 0:
        left = np.nonzero(stale > 0)
        size = geometry.size[left[0], 0]
        writes.fills(begin[left] + nbytes[left], stale[left] * size, geometry.cycle[left[0]], size)
    return Records(slots, data, state.scatter_map)


def _plan_few(state: SlotState, tasks: TaskBatch) -> WritePlan:
    """Do the same for a few new requests: most of a NumPy call is overhead for them, so plain Python is faster.

    Without it an insertion of 1 request takes 51 % longer, of 8 requests 18 % (``python benchmarks/run.py few``, cpu
    device, medians of 800 in turn, 2026-11-22).
    """
    geometry, record, plain = state.rows, state.record_places, tasks.plain
    starts, lengths, counts = plain["num_computed_tokens"], plain["num_scheduled_tokens"], plain["block_counts"]
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
        written = state.host_table.row_lengths[:, slot].tolist()
        for row, (base, stride, size, cycle) in enumerate(geometry.plain):
            used = count if row == BLOCKS else request.row_lengths[row]
            dst, nbytes = base + slot * stride, used * size
            if nbytes:
                pieces.append(tasks.block_ids[at].tobytes() if row == BLOCKS else request.rows[row])
                rows.append(ROW.pack(dst, source, nbytes))
                source += nbytes
            if written[row] > used:
                rows.append(ROW.pack(dst + nbytes, cycle, (size << 32) | ((written[row] - used) * size)))
    joined = np.frombuffer(b"".join(records), np.uint8).reshape(len(tasks), -1)
    writes = np.frombuffer(b"".join(rows), WRITE)
    return WritePlan(state.memory, writes, pieces, Records(tasks.slots, joined, state.scatter_map))


def _plan_few_growing(state: SlotState, tasks: TaskBatch) -> WritePlan:
    """Return new entries of the block tables of a few requests, in plain Python (as :func:`_grow`).

    Without it more blocks for 1 request take 3.6 times as long, for 8 requests 1.8 times (``python benchmarks/run.py
    few``, cpu device, medians of 150 in turn on a busy machine, 2026-11-23).
    """
    tables, numbers, plain = state.layout.fields["block_tables"], state.layout.fields["blocks_num"], tasks.plain
    pieces: list[Buffer] = []
    rows: list[bytes] = []
    source = 0
    for slot, first, count, ids in zip(
        plain["slots"], plain["first_blocks"], plain["block_counts"], tasks.block_ids, strict=True
    ):
        if count:
            pieces.append(ids.tobytes())
            rows.append(ROW.pack(tables.offset + slot * tables.stride + first * 4, source, count * 4))
        pieces.append(PUT.pack(first + count))
        rows.append(ROW.pack(numbers.offset + slot * numbers.stride, source + count * 4, 4))
        source += count * 4 + 4
    return WritePlan(state.memory, np.frombuffer(b"".join(rows), WRITE), pieces)


def _hand_off(
    state: SlotState, tasks: TaskBatch, entering: Ints, data: Bytes, row_lengths: Ints, tokens: Sequence[Buffer]
) -> list[Buffer]:
    """Complete requests with the decode role of a split: the prompt's KV is present, first token and drafts are given
    (G12).

    Completes ``data`` and ``row_lengths`` of such requests; returns the token rows, theirs with the first token
    appended.
    """
    rows, token_rows = data.view(state.layout.record_dtype)[:, 0], list(tokens)
    for at in (tasks.kinds[entering] == TaskKind.REMOTE_PREFILL).nonzero()[0].tolist():
        task = int(entering[at])
        row, drafts = rows[at], tasks.drafts[task]
        row["seq_lens_encoder"] = 0
        row["seq_lens_decoder"] = row["prompt_lens"] + row["step_idx"]
        row["seq_lens_this_time"] = 1 + len(drafts)
        row["next_tokens"] = tasks.first_tokens[task]
        row["step_idx"] += 1
        row["draft_num"] = len(drafts)
        if drafts:
            rows["draft_tokens"].reshape(len(rows), -1)[at, : len(drafts)] = drafts
        row_lengths[TOKENS, at] += 1
        token_rows[at] = bytes(token_rows[at]) + tasks.first_tokens[task].tobytes()
    return token_rows


def _with_empty(state: SlotState, writes: PlanBuilder, records: Records | None, slots: Ints) -> Records | None:
    """Return the records with those of empty slots after them; if a field is kept, reset each other field
    separately."""
    if state.layout.keeps:
        for place in state.layout.fields.values():
            if place.field.record and not place.field.kept:
                offsets = place.offset + slots.astype(np.int64) * place.stride
                writes.fill(offsets, place.stride, place.field.dtype.storage.type(place.field.reset))
        return records
    empty = np.repeat(empty_record(state.layout), len(slots)).view(np.uint8).reshape(len(slots), -1)
    if records is None:
        return Records(slots.astype(np.int32), empty, state.scatter_map)
    slots = np.concatenate([records.slots, slots])
    return Records(slots, np.concatenate([records.data, empty]), state.scatter_map)


def _grow(state: SlotState, writes: PlanBuilder, tasks: TaskBatch, growing: Ints) -> None:
    """Write new entries of the block tables of requests that stay."""
    slots, counts = tasks.slots[growing], tasks.block_counts[growing]
    if counts.any():
        place = state.layout.fields["block_tables"]
        dst = place.offset + slots.astype(np.int64) * place.stride + tasks.first_blocks[growing] * np.int64(4)
        writes.runs(dst, counts * np.int64(4), [tasks.block_ids[at].tobytes() for at in growing.tolist()])
    _scalars(state, writes, "blocks_num", slots, state.host_table.blocks[slots] + counts)


def _scalars(state: SlotState, writes: PlanBuilder, name: str, slots: Ints, values: Ints) -> None:
    """Write one scalar field of some slots."""
    place = state.layout.fields[name]
    data = np.ascontiguousarray(values, place.field.dtype.storage).view(np.uint8)
    writes.runs(place.offset + slots.astype(np.int64) * place.stride, place.stride, [data])
