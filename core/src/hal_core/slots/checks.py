"""Checks of a task batch against a state: all problems are found before anything is written (G8)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .admission import AdmittedRequest
from .fields import SplitRole, StateConfig
from .host_table import FEW, TOKENS, HostSlotTable
from .layout import ADMISSION_ID
from .tasks import LEAVING, TaskBatch, TaskKind

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]


def is_sound(host_table: HostSlotTable, tasks: TaskBatch) -> bool:
    """Return True if ``tasks`` can surely be inserted.

    Decided without a loop for requests that enter free slots, or that stay and get more blocks; by a device's native
    code for any requests that enter or stay. False means that :func:`problems` must check, which may still find no
    problem.
    """
    if host_table.twin is not None and (tasks.all_new or tasks.more is not None):
        return host_table.twin.sound(tasks)
    if not tasks.all_new:
        return tasks.all_growing and _growing_are_sound(host_table, tasks)
    if len(tasks) <= FEW:
        return _few_are_sound(host_table, tasks)
    sizes, n, plain, request_row = host_table.sizes, len(tasks), tasks.plain, tasks.request_row
    chosen, admission_ids = set(plain["slots"]), set(request_row[:, ADMISSION_ID].tolist())
    if min(chosen) < 0 or max(chosen) >= sizes.num_slots or len(chosen) != n or len(admission_ids) != n:
        return False
    if not host_table.live.keys().isdisjoint(admission_ids) or host_table.admission_ids[tasks.slots].any():
        return False
    if (
        min(plain["num_scheduled_tokens"]) < 1
        or min(plain["num_computed_tokens"]) < 0
        or max(plain["block_counts"]) > sizes.max_blocks
    ):
        return False
    if (
        max(plain["num_computed_tokens"]) >= sizes.max_model_len
        or max(plain["num_scheduled_tokens"]) >= sizes.max_model_len
    ):
        return False  # the sum may exceed int32
    # If a request's config key is this state's, admission has checked that its tokens fit.
    end = tasks.num_computed_tokens + tasks.num_scheduled_tokens
    if (end > np.minimum(request_row[:, TOKENS], tasks.block_counts * sizes.block_size)).any():
        return False
    return not len(tasks.blocks) or int(tasks.blocks.min()) >= 0


def _few_are_sound(host_table: HostSlotTable, tasks: TaskBatch) -> bool:
    """Do the same for a few new requests, in plain Python.

    Without it an insertion of 1 request takes 30 % longer, of 8 requests 14 % (``python benchmarks/run.py few``, cpu
    device, medians of 800 in turn, 2026-11-22).
    """
    sizes, plain, live, holders = host_table.sizes, tasks.plain, host_table.live, host_table.requests
    slots, starts, lengths, counts = (
        plain["slots"],
        plain["num_computed_tokens"],
        plain["num_scheduled_tokens"],
        plain["block_counts"],
    )
    for at, request in enumerate(tasks.requests):
        slot, start, count = slots[at], starts[at], counts[at]
        end = start + lengths[at]
        if not 0 <= slot < sizes.num_slots or holders[slot] is not None or request.admission_id in live:
            return False
        if not 0 <= start < end <= request.total < sizes.max_model_len:
            return False
        if count > sizes.max_blocks or end > count * sizes.block_size or min(tasks.block_ids[at].tolist()) < 0:
            return False
    n = len(slots)
    return n == 1 or (len(set(slots)) == n and len({request.admission_id for request in tasks.requests}) == n)


def _growing_are_sound(host_table: HostSlotTable, tasks: TaskBatch) -> bool:
    """Check requests that get more blocks. Each must be the one in its slot, so it was admitted for these sizes.

    Without it more blocks for 1 request take 21 % longer, for 8 requests 10.5 % (as in ``_plan_few_growing``).
    """
    sizes, plain, holders = host_table.sizes, tasks.plain, host_table.requests
    slots, held = plain["slots"], host_table.blocks
    if len(set(slots)) != len(slots) or any(tasks.drafts):
        return False
    for slot, first, count, request, ids in zip(
        slots, plain["first_blocks"], plain["block_counts"], tasks.requests, tasks.block_ids, strict=True
    ):
        if not 0 <= slot < sizes.num_slots or holders[slot] is not request or held[slot] != first:
            return False
        if first + count > sizes.max_blocks or min(ids.tolist(), default=0) < 0:
            return False
    return True


def problems(host_table: HostSlotTable, tasks: TaskBatch) -> list[str]:
    """Return every problem of inserting ``tasks`` now, each as one sentence; empty if they can be inserted (G8)."""
    found: list[str] = []
    left: set[int] = set()
    used: set[int] = set()
    entered: set[int] = set()
    for at, row in enumerate(Row.of(tasks)):
        texts: list[str] = []
        if not 0 <= row.slot < host_table.sizes.num_slots:
            texts.append(f"slots go from 0 to {host_table.sizes.num_slots - 1}")
        elif row.slot in used or (row.kind in LEAVING and row.slot in left):
            texts.append(f"the batch already writes slot {row.slot}")
        elif row.kind in LEAVING:
            texts += _leaving(host_table, row)
            left.add(row.slot)
        else:
            used.add(row.slot)
            texts += _holding(host_table, row, left, entered)
            entered.add(row.request.admission_id)
            texts += _extents(host_table, row, tasks.block_ids[at])
        if texts:
            who = f"task {at} ({TaskKind(row.kind).name} {row.request.request_id!r} in slot {row.slot})"
            found += [f"{who}: {text}" for text in texts]
    return found


class Row(NamedTuple):
    """One task of a batch in plain numbers."""

    kind: int
    slot: int
    request: AdmittedRequest
    start: int
    length: int
    blocks: int
    first_block: int
    first_token: int
    drafts: tuple[int, ...]

    @classmethod
    def of(cls, tasks: TaskBatch) -> Iterator[Row]:
        """Yield the tasks in their order."""
        plain = tasks.plain
        kinds, slots, starts, lengths = (
            plain["kinds"],
            plain["slots"],
            plain["num_computed_tokens"],
            plain["num_scheduled_tokens"],
        )
        blocks, first_blocks, first_tokens = plain["block_counts"], plain["first_blocks"], plain["first_tokens"]
        return map(cls, kinds, slots, tasks.requests, starts, lengths, blocks, first_blocks, first_tokens, tasks.drafts)


def _leaving(host_table: HostSlotTable, row: Row) -> list[str]:
    pending = host_table.preempted if row.kind == TaskKind.PREEMPTED else host_table.aborted
    if host_table.admission_ids[row.slot] != row.request.admission_id:
        return ["the slot does not hold this request"]
    if row.slot in pending:
        return [f"{pending[row.slot][1]!r} left this slot and is not yet reported; save an output first"]
    return []


def _holding(host_table: HostSlotTable, row: Row, left: set[int], entered: set[int]) -> list[str]:
    slot, admission_id = row.slot, row.request.admission_id
    if row.kind in (TaskKind.PREFILL_CHUNK, TaskKind.MORE_BLOCKS):
        if host_table.admission_ids[slot] == admission_id and slot not in left:
            return []
        return ["the slot does not hold this request"]
    texts = []
    holder = host_table.requests[slot]
    if holder is not None and slot not in left:
        texts.append(f"the slot still holds {holder.request_id!r}; release, preempt or abort it first")
    if admission_id in entered or admission_id in host_table.live:
        texts.append("the request is already in a slot; admit it again to run it again")
    return texts


def _extents(host_table: HostSlotTable, row: Row, blocks: Ints) -> list[str]:
    """Check lengths and blocks of one task against the sizes and the request."""
    sizes, kind, slot, total = host_table.sizes, row.kind, row.slot, row.request.total
    texts = []
    end = row.start + row.length
    if total >= sizes.max_model_len:
        texts.append(f"{total} tokens do not fit {sizes.max_model_len}; the request was admitted for another state")
    if kind in (TaskKind.PREFILL, TaskKind.PREFILL_CHUNK) and not (row.start >= 0 and row.length >= 1 and end <= total):
        texts.append(f"tokens {row.start} to {end} of {total}")
    if kind == TaskKind.PREFILL_CHUNK and row.start != host_table.prefilled[slot]:
        texts.append(f"starts at token {row.start}, but {int(host_table.prefilled[slot])} are prefilled")
    have = 0 if kind in (TaskKind.PREFILL, TaskKind.REMOTE_PREFILL) else int(host_table.blocks[slot])
    if row.first_block != have:
        texts.append(f"blocks begin at entry {row.first_block}, but {have} are in use")
    if row.blocks and min(blocks.tolist()) < 0:
        texts.append(f"block {min(blocks.tolist())} is negative")
    count = have + row.blocks
    if count > sizes.max_blocks:
        texts.append(f"{count} blocks, but the table holds {sizes.max_blocks}")
    needed = total if kind == TaskKind.REMOTE_PREFILL else 0 if kind == TaskKind.MORE_BLOCKS else end
    if needed > count * sizes.block_size:
        texts.append(f"{needed} tokens need {-(-needed // sizes.block_size)} blocks, but the task has {count}")
    return texts + _handoff(row, sizes) if kind == TaskKind.REMOTE_PREFILL or row.drafts else texts


def _handoff(row: Row, sizes: StateConfig) -> list[str]:
    """Check first token and drafts, which only a handoff may have (G12)."""
    texts = []
    fit = sizes.max_draft_tokens if row.kind == TaskKind.REMOTE_PREFILL else 0
    if row.kind == TaskKind.REMOTE_PREFILL:
        if row.start != row.request.total:
            texts.append(
                f"keys and values of {row.start} of its {row.request.total} tokens are declared present; "
                f"bring its blocks over first, then give start={row.request.total}"
            )
        if row.request.role is SplitRole.PREFILL:
            texts.append("its role is PREFILL, which stops at the first token; hand it over as DECODE")
        if row.first_token < 0:
            texts.append("a handoff needs the first token")
        if row.request.total + 1 >= sizes.max_model_len or row.request.generated + 1 >= row.request.params.max_tokens:
            texts.append("the request has ended with its first token; no token is left to decode")
    if len(row.drafts) > fit:
        texts.append(f"{len(row.drafts)} drafts, but {fit} fit here")
    if any(not isinstance(token, int) or token < 0 for token in row.drafts):
        texts.append("drafts must be token ids")
    return texts
