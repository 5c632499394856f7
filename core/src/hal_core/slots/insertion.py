"""Conversion of a task batch to a write plan: all fields of all requests at once, no device (G9 to G11).

A slot that a request enters or leaves gets a whole packed record: the request's, or the empty slot's. Rows are written
to the request's own length and reset from there to the largest length written before. The host table is only read; the
policy commits the batch once the device has taken the plan.

This is the hot path of ``insert_tasks``. Writes are collected in plain Python, which is as fast as NumPy for 128
requests and several times faster for a few. They go field by field, so that a device can join writes of equal length.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..memory.plan import WRITE, Buffer, Records, WritePlan
from .admission import empty_record
from .companions import tasks_of_companion
from .geometry import reset_cycle
from .host_table import BLOCKS, TOKENS
from .layout import REQUEST_ROW, Placed
from .task import ENTERS, FEEDS, LEAVES, TRAITS, TaskKind
from .tasks import COLUMNS, TaskBatch

if TYPE_CHECKING:
    from .state import SlotState

Structured = np.ndarray[Any, np.dtype[np.void]]


def plan_insert(state: SlotState, tasks: TaskBatch) -> WritePlan:
    """Return the plan that writes the checked ``tasks`` into their slots, and into those of the state's companions.

    Neither device nor host table is changed here. The plan's writes never overlap, as each slot's fields are written
    once in a batch.
    """
    plan = _plan_state(state, tasks)
    for companion in state.companions:
        plan = plan.joined(_plan_state(companion, tasks_of_companion(companion, tasks)))
    return plan


class _Writes:
    """The writes of a plan as they are collected: copies and fills as int64 (dst, source, pattern_bytes << 32 |
    nbytes), and the bytes to copy."""

    __slots__ = ("copies", "fills", "pieces", "size")

    def __init__(self) -> None:
        self.copies: list[int] = []
        self.fills: list[int] = []
        self.pieces: list[Buffer] = []
        self.size = 0

    def copy(self, dst: int, data: Buffer) -> None:
        """Write bytes, at least one."""
        nbytes = len(data)
        self.copies += (dst, self.size, nbytes)
        self.pieces.append(data)
        self.size += nbytes

    def scalars(self, state: SlotState, name: str, slots: Sequence[int], values: Sequence[int]) -> None:
        """Write one scalar field of some slots."""
        place = state.layout.fields[name]
        for slot, value in zip(slots, values, strict=True):
            self.copy(place.offset + slot * place.stride, value.to_bytes(place.stride, "little"))

    def reset(self, place: Placed, slots: Sequence[int]) -> None:
        """Reset a field of some slots."""
        cycle, size = reset_cycle(place.field), place.field.dtype.itemsize
        for slot in slots:
            self.fills += (place.offset + slot * place.stride, cycle, size << 32 | place.stride)


def _plan_state(state: SlotState, tasks: TaskBatch) -> WritePlan:
    writes, kinds = _Writes(), tasks.plain["kinds"]
    traits = [TRAITS[kind] for kind in kinds]
    entering = [at for at, one in enumerate(traits) if one & ENTERS]
    records = _enter(state, writes, tasks, entering) if entering else None
    if len(entering) < len(kinds):
        staying = [at for at, one in enumerate(traits) if not one & (ENTERS | LEAVES)]
        _stay(state, writes, tasks, staying, [at for at in staying if traits[at] & FEEDS])
        if leaving := [at for at, one in enumerate(traits) if one & LEAVES]:
            records = _leave(state, writes, tasks, entering, leaving, records)
    descriptors = np.frombuffer(array("q", writes.copies + writes.fills), WRITE)
    return WritePlan(state.memory, descriptors, writes.pieces, records)


def _block_bytes(tasks: TaskBatch) -> list[Buffer]:
    """Return the bytes of each task's block ids."""
    view, end, pieces = memoryview(tasks.ints), 4 * len(tasks) * len(COLUMNS), []
    for count in tasks.plain["block_counts"]:
        begin, end = end, end + 4 * count
        pieces.append(view[begin:end])
    return pieces


def _enter(state: SlotState, writes: _Writes, tasks: TaskBatch, entering: list[int]) -> Records:
    """Return the records of the requests that enter slots, completed with values known at insertion, and write their
    rows with the reset of earlier requests' data (G11)."""
    plain, layout = tasks.plain, state.layout
    chosen: dict[str, list[int]] = plain
    requests: Sequence[Any] = tasks.requests
    blocks = _block_bytes(tasks)
    if len(entering) < len(tasks):
        chosen = {name: [column[at] for at in entering] for name, column in plain.items()}
        requests, blocks = [requests[at] for at in entering], [blocks[at] for at in entering]
    slots = np.array(chosen["slots"], np.int32)
    packed = b"".join([request.packed[REQUEST_ROW.itemsize :] for request in requests])
    records = np.frombuffer(bytearray(packed), layout.record_dtype)
    records["seq_lens_this_time"] = records["seq_lens_encoder"] = chosen["num_scheduled_tokens"]
    records["seq_lens_decoder"] = chosen["num_computed_tokens"]
    records["blocks_num"] = chosen["block_counts"]
    parts: list[Sequence[Buffer]] = list(zip(*[request.rows for request in requests], strict=True))
    parts[BLOCKS] = blocks
    parts[TOKENS] = _continue(records, tasks, entering, parts[TOKENS])
    written = state.host_table.row_lengths[:, slots].tolist()
    for (base, stride, size, cycle), pieces, lengths in zip(state.row_geometry, parts, written, strict=True):
        if not any(pieces) and not any(lengths):
            continue
        for slot, piece, length in zip(chosen["slots"], pieces, lengths, strict=True):
            dst, nbytes = base + slot * stride, len(piece)
            if nbytes:
                writes.copy(dst, piece)
            if (stale := length * size - nbytes) > 0:
                writes.fills += (dst + nbytes, cycle, size << 32 | stale)
    return Records(slots, _bytes_of(records), state.scatter_map)


def _bytes_of(records: Structured) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return records as bytes, uint8 ``[n, record bytes]``."""
    return records.view(np.uint8).reshape(len(records), -1)


def _continue(
    records: Structured, tasks: TaskBatch, entering: list[int], token_rows: Sequence[Buffer]
) -> Sequence[Buffer]:
    """Complete the records of requests that continue after a given first token; their prompt's KV is present (G12).

    Return the token rows, theirs with that token appended.
    """
    first_tokens, rows = tasks.plain["first_tokens"], list(token_rows)
    for at, task in enumerate(entering):
        if (token := first_tokens[task]) < 0:
            continue
        row, drafts = records[at], tasks.drafts[task]
        row["seq_lens_encoder"] = 0
        row["seq_lens_decoder"] = row["prompt_lens"] + row["step_idx"]
        row["seq_lens_this_time"] = 1 + len(drafts)
        row["next_tokens"] = token
        row["step_idx"] += 1
        row["draft_num"] = len(drafts)
        if drafts:
            records["draft_tokens"].reshape(len(records), -1)[at, : len(drafts)] = drafts
        rows[at] = bytes(rows[at]) + token.to_bytes(8, "little")
    return rows


def _stay(state: SlotState, writes: _Writes, tasks: TaskBatch, staying: list[int], fed: list[int]) -> None:
    """Write what requests get that stay in their slots: new entries of their block tables; ``fed``: those with a piece
    of their prompt."""
    plain, blocks, table = tasks.plain, _block_bytes(tasks), state.layout.fields["block_tables"]
    slots, firsts, counts = plain["slots"], plain["first_blocks"], plain["block_counts"]
    for at in staying:
        if counts[at]:
            writes.copy(table.offset + slots[at] * table.stride + firsts[at] * 4, blocks[at])
    writes.scalars(state, "blocks_num", [slots[at] for at in staying], [firsts[at] + counts[at] for at in staying])
    for name in ("seq_lens_this_time", "seq_lens_encoder") if fed else ():
        writes.scalars(state, name, [slots[at] for at in fed], [plain["num_scheduled_tokens"][at] for at in fed])


def _leave(
    state: SlotState,
    writes: _Writes,
    tasks: TaskBatch,
    entering: list[int],
    leaving: list[int],
    records: Records | None,
) -> Records | None:
    """Write which requests left, and return the records with those of the slots that are empty now."""
    slots, kinds = tasks.plain["slots"], tasks.plain["kinds"]
    for name, kind in (("last_preempted", TaskKind.PREEMPTED), ("last_aborted", TaskKind.ABORTED)):
        gone = [at for at in leaving if kinds[at] == kind]
        writes.scalars(state, name, [slots[at] for at in gone], [tasks.requests[at].admission_id for at in gone])
    taken = {slots[at] for at in entering}
    left = [slots[at] for at in leaving if slots[at] not in taken]
    return _with_empty(state, writes, records, left) if left else records


def _with_empty(state: SlotState, writes: _Writes, records: Records | None, slots: list[int]) -> Records | None:
    """Return the records with those of empty slots after them; if a field is kept, reset each other field
    separately."""
    if state.layout.keeps:
        for place in state.layout.fields.values():
            if place.field.record and not place.field.kept:
                writes.reset(place, slots)
        return records
    places, empty = np.array(slots, np.int32), _bytes_of(np.repeat(empty_record(state.layout), len(slots)))
    if records is not None:
        places, empty = np.concatenate([records.slots, places]), np.concatenate([records.data, empty])
    return Records(places, empty, state.scatter_map)
