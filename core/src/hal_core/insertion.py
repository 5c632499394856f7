"""From a task batch to a write plan: plain NumPy, field by field, no device (G9 to G11).

A slot that is entered or left gets a whole packed record: its request's, or the empty slot's. Rows are written to the
request's own length and reset from there to the largest length written before. The builder reads the ledger and
leaves it as it is; the policy commits the batch once the device has taken the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .plan import PlanBuilder, Records, WritePlan
from .requests import empty_record
from .tasks import TaskBatch, TaskKind

if TYPE_CHECKING:
    from .state import SlotState

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
Packed = np.ndarray[Any, np.dtype[np.void]]


def plan_insert(state: SlotState, tasks: TaskBatch) -> WritePlan:
    """The plan that puts ``tasks``, already checked, into their slots. Nothing is written or committed here."""
    packed = tasks.packed(state.layout.record_dtype)
    kinds = tasks.kinds
    builder = PlanBuilder(state.memory)
    entering = np.flatnonzero((kinds == TaskKind.PREFILL) | (kinds == TaskKind.HANDOFF))
    leaving = np.flatnonzero(kinds >= TaskKind.PREEMPTED)
    chunks = np.flatnonzero(kinds == TaskKind.CHUNK)
    growing = np.flatnonzero((kinds == TaskKind.CHUNK) | (kinds == TaskKind.DECODE))
    records = _records(state, tasks, packed, entering, leaving)
    if len(entering):
        _rows(state, builder, tasks, packed, entering)
    if len(tasks.blocks):
        _blocks(state, builder, tasks)
    if len(chunks):
        for name in ("seq_lens_this_time", "seq_lens_encoder"):
            _scalars(state, builder, name, tasks.slots[chunks], tasks.lengths[chunks])
    if len(growing):
        slots = tasks.slots[growing]
        _scalars(state, builder, "blocks_num", slots, state.ledger.blocks[slots] + tasks.block_counts[growing])
    for name, kind in (("last_preempted", TaskKind.PREEMPTED), ("last_aborted", TaskKind.ABORTED)):
        chosen = leaving[kinds[leaving] == kind]
        if len(chosen):
            _scalars(state, builder, name, tasks.slots[chosen], packed["request_serial"][chosen])
    return builder.build(records)


def _records(state: SlotState, tasks: TaskBatch, packed: Packed, entering: Ints, leaving: Ints) -> Records | None:
    """The records of all slots that are entered, and of those that are left and not entered again."""
    left = leaving[~np.isin(tasks.slots[leaving], tasks.slots[entering])] if len(leaving) else leaving
    if not len(entering) and not len(left):
        return None
    rows = packed[entering]
    lengths, handoff = tasks.lengths[entering], tasks.kinds[entering] == TaskKind.HANDOFF
    rows["seq_lens_this_time"] = lengths
    rows["seq_lens_encoder"] = lengths
    rows["seq_lens_decoder"] = tasks.starts[entering]
    rows["blocks_num"] = tasks.block_counts[entering]
    for at in np.flatnonzero(handoff).tolist():
        _hand_off(rows, at, tasks, int(entering[at]))
    slots = tasks.slots[entering]
    if len(left):
        rows = np.concatenate([rows, np.repeat(empty_record(state.layout), len(left))])
        slots = np.concatenate([slots, tasks.slots[left]])
    return Records(slots, rows.view(np.uint8).reshape(len(rows), -1), state.spread)


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


def _rows(state: SlotState, builder: PlanBuilder, tasks: TaskBatch, packed: Packed, entering: Ints) -> None:
    """Each request's own rows, and the reset of what earlier requests left behind them."""
    slots = tasks.slots[entering].astype(np.int64)
    requests = [tasks.requests[at] for at in entering.tolist()]
    rows = packed[entering]
    handoff = tasks.kinds[entering] == TaskKind.HANDOFF
    tokens = [request.tokens for request in requests]
    if handoff.any():
        first = tasks.first_tokens[entering]
        tokens = [np.append(t, first[i]) if handoff[i] else t for i, t in enumerate(tokens)]
    total = rows["prompt_lens"] + rows["step_idx"] + handoff
    _row(state, builder, "token_ids", slots, total, tokens)
    _row(state, builder, "block_tables", slots, tasks.block_counts[entering].astype(np.int64), None)
    stops, bad = rows["stop_seqs_num"].astype(np.int64), rows["bad_words_num"].astype(np.int64)
    _row(state, builder, "stop_seqs_len", slots, stops, [r.stop_seqs_len for r in requests])
    _row(state, builder, "stop_seqs", slots, stops * state.sizes.max_stop_length, [r.stop_seqs for r in requests])
    _row(state, builder, "bad_words", slots, bad, [r.bad_words for r in requests])


def _row(
    state: SlotState, builder: PlanBuilder, name: str, slots: Ints, lengths: Ints, data: list[Ints] | None
) -> None:
    """One row field of some slots: ``lengths`` elements of ``data`` each, then the reset value up to the old length."""
    place = state.layout.fields[name]
    size = place.field.dtype.itemsize
    begin = place.offset + slots * place.stride
    if data is not None and lengths.any():
        builder.copy(begin, lengths * size, np.concatenate(data).view(np.uint8))
    stale = state.ledger.lengths[name][slots] - lengths
    old = np.flatnonzero(stale > 0)
    if len(old):
        value = place.field.dtype.storage.type(place.field.reset)
        builder.fill(begin[old] + lengths[old] * size, stale[old] * size, value)


def _blocks(state: SlotState, builder: PlanBuilder, tasks: TaskBatch) -> None:
    """The new entries of every task's block table."""
    place = state.layout.fields["block_tables"]
    offsets = place.offset + tasks.slots.astype(np.int64) * place.stride + tasks.first_blocks * 4
    staying = tasks.kinds < TaskKind.PREEMPTED
    if staying.all():
        builder.copy(offsets, tasks.block_counts * np.int64(4), tasks.blocks.view(np.uint8))
        return
    kept = np.repeat(staying, tasks.block_counts)
    builder.copy(offsets[staying], tasks.block_counts[staying] * np.int64(4), tasks.blocks[kept].view(np.uint8))


def _scalars(state: SlotState, builder: PlanBuilder, name: str, slots: Ints, values: Ints) -> None:
    """One scalar field of some slots."""
    place = state.layout.fields[name]
    data = np.ascontiguousarray(values, place.field.dtype.storage).view(np.uint8)
    builder.copy(place.offset + slots.astype(np.int64) * place.stride, place.stride, data)
