"""Checks of a task batch against a state: all problems are found before anything is written (G8)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .admission import AdmittedRequest
from .fields import SplitRole, StateConfig
from .host_table import HostSlotTable
from .task import CONTINUES, ENTERS, FEEDS, LEAVES, TRAITS, TaskKind
from .tasks import TaskBatch


def problems(host_table: HostSlotTable, tasks: TaskBatch) -> list[str]:
    """Return every problem of inserting ``tasks`` now, each as one sentence; empty if they can be inserted (G8)."""
    found: list[str] = []
    left: set[int] = set()
    used: set[int] = set()
    entered: set[int] = set()
    num_slots = host_table.sizes.num_slots
    bad_blocks = len(tasks.blocks) > 0 and int(np.minimum.reduce(tasks.blocks)) < 0
    for at, row in enumerate(Row.of(tasks)):
        slot, traits = row.slot, TRAITS[row.kind]
        if not 0 <= slot < num_slots:
            texts = [f"slots go from 0 to {num_slots - 1}"]
        elif slot in used or (traits & LEAVES and slot in left):
            texts = [f"the batch already writes slot {slot}"]
        elif traits & LEAVES:
            texts = _leaving(host_table, row)
            left.add(slot)
        else:
            used.add(slot)
            texts = _holding(host_table, row, traits, left, entered) + _extents(host_table, row, traits)
            entered.add(row.request.admission_id)
            if bad_blocks and (lowest := min(tasks.block_ids[at].tolist(), default=0)) < 0:
                texts.append(f"block {lowest} is negative")
        if texts:
            who = f"task {at} ({TaskKind(row.kind).name} {row.request.request_id!r} in slot {slot})"
            found += [f"{who}: {text}" for text in texts]
    return found


class Row(NamedTuple):
    """One task of a batch in plain numbers."""

    request: AdmittedRequest
    drafts: tuple[int, ...]
    kind: int
    slot: int
    start: int
    length: int
    blocks: int
    first_block: int
    first_token: int
    draft_count: int

    @classmethod
    def of(cls, tasks: TaskBatch) -> Iterator[Row]:
        """Yield the tasks in their order."""
        return map(cls, tasks.requests, tasks.drafts, *tasks.plain.values())


def _leaving(host_table: HostSlotTable, row: Row) -> list[str]:
    pending = host_table.preempted if row.kind == TaskKind.PREEMPTED else host_table.aborted
    if not _holds(host_table, row):
        return ["the slot does not hold this request"]
    if row.slot in pending:
        return [f"{pending[row.slot][1]!r} left this slot and is not yet reported; save an output first"]
    return []


def _holds(host_table: HostSlotTable, row: Row) -> bool:
    holder = host_table.requests[row.slot]
    return holder is not None and holder.admission_id == row.request.admission_id


def _holding(host_table: HostSlotTable, row: Row, traits: int, left: set[int], entered: set[int]) -> list[str]:
    slot, admission_id = row.slot, row.request.admission_id
    if not traits & ENTERS:
        if _holds(host_table, row) and slot not in left:
            return []
        return ["the slot does not hold this request"]
    texts = []
    holder = host_table.requests[slot]
    if holder is not None and slot not in left:
        texts.append(f"the slot still holds {holder.request_id!r}; release, preempt or abort it first")
    if admission_id in entered or admission_id in host_table.live:
        texts.append("the request is already in a slot; admit it again to run it again")
    return texts


def _extents(host_table: HostSlotTable, row: Row, traits: int) -> list[str]:
    """Check lengths and blocks of one task against the sizes and the request."""
    texts: list[str] = []
    sizes = host_table.sizes
    slot, start, total = row.slot, row.start, row.request.total
    have, needed, end = 0 if traits & ENTERS else int(host_table.blocks[slot]), 0, start + row.length
    count = have + row.blocks
    if total >= sizes.max_model_len:
        texts.append(f"{total} tokens do not fit {sizes.max_model_len}; the request was admitted for another state")
    if traits & FEEDS:
        needed = end
        if not (start >= 0 and row.length >= 1 and end <= total):
            texts.append(f"tokens {start} to {end} of {total}")
        if not traits & ENTERS and start != host_table.prefilled[slot]:
            texts.append(f"starts at token {start}, but {int(host_table.prefilled[slot])} are prefilled")
    if row.first_block != have:
        texts.append(f"blocks begin at entry {row.first_block}, but {have} are in use")
    if count > sizes.max_blocks:
        texts.append(f"{count} blocks, but the table holds {sizes.max_blocks}")
    if traits & CONTINUES:
        needed = total
        texts += _continuing(row, sizes)
    elif row.first_token != -1:
        texts.append(f"first token {row.first_token}, which only a REMOTE_PREFILL has")
    if needed > count * sizes.block_size:
        texts.append(f"{needed} tokens need {-(-needed // sizes.block_size)} blocks, but the task has {count}")
    if row.drafts:
        fit = sizes.max_draft_tokens if traits & CONTINUES else 0
        if row.draft_count > fit:
            texts.append(f"{row.draft_count} drafts, but {fit} fit here")
        if min(row.drafts) < 0:
            texts.append("drafts must be token ids")
    return texts


def _continuing(row: Row, sizes: StateConfig) -> list[str]:
    """Check a request that continues after a given first token (G12)."""
    texts, request = [], row.request
    if row.start != request.total:
        texts.append(
            f"keys and values of {row.start} of its {request.total} tokens are declared present; "
            f"bring its blocks over first, then give num_computed_tokens={request.total}"
        )
    if request.role is SplitRole.PREFILL:
        texts.append("its role is PREFILL, which stops at the first token; hand it over as DECODE")
    if row.first_token < 0:
        texts.append("a REMOTE_PREFILL needs the first token")
    if request.total + 1 >= sizes.max_model_len or request.generated + 1 >= request.params.max_tokens:
        texts.append("the request has ended with its first token; no token is left to decode")
    return texts
