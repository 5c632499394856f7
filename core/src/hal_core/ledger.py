"""The host's ledger of a slot state: which request is in which slot, how far it is prefilled, how long its rows are.

It says what the host has decided, not what the device has done, so it never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .fields import ROW_FIELDS, Sizes
from .requests import AdmittedRequest, SplitRole
from .tasks import LEAVING, TaskBatch, TaskKind

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
Records = np.ndarray[Any, np.dtype[np.void]]


class Ledger:
    """Arrays of one entry a slot, and the requests in the slots.

    - ``requests``: the admitted request in each slot, or None.
    - ``serials`` int64: its serial, 0 where the slot is free.
    - ``prefilled`` int64: tokens whose KV the tasks inserted so far have asked for.
    - ``blocks`` int64: entries of the block table in use.
    - ``lengths``: row field to int64: the largest length written since the row was last reset (G11), in elements.
    - ``preempted``, ``aborted``: slot to ``(serial, request id)`` of what left and no output has reported yet.
    """

    def __init__(self, sizes: Sizes) -> None:
        n = sizes.slots
        self.sizes = sizes
        self.requests: list[AdmittedRequest | None] = [None] * n
        self.serials = np.zeros(n, np.int64)
        self.prefilled = np.zeros(n, np.int64)
        self.blocks = np.zeros(n, np.int64)
        self.lengths = {name: np.zeros(n, np.int64) for name in ROW_FIELDS}
        self.preempted: dict[int, tuple[int, str]] = {}
        self.aborted: dict[int, tuple[int, str]] = {}

    def commit(self, tasks: TaskBatch, packed: Records) -> None:
        """Take over what an insertion has put into the slots; ``packed`` are the tasks' records."""
        kinds, slots = tasks.kinds, tasks.slots
        for at in np.flatnonzero(kinds >= TaskKind.PREEMPTED).tolist():
            slot, request = int(slots[at]), tasks.requests[at]
            leaving = self.preempted if kinds[at] == TaskKind.PREEMPTED else self.aborted
            leaving[slot] = (request.serial, request.request_id)
            self._free(slot)
        entering = np.flatnonzero((kinds == TaskKind.PREFILL) | (kinds == TaskKind.HANDOFF))
        if len(entering):
            self._enter(tasks, packed, entering)
        staying = np.flatnonzero((kinds == TaskKind.CHUNK) | (kinds == TaskKind.DECODE))
        if len(staying):
            at = slots[staying]
            self.blocks[at] += tasks.block_counts[staying]
            self.lengths["block_tables"][at] = np.maximum(self.lengths["block_tables"][at], self.blocks[at])
            self.prefilled[at] += np.where(kinds[staying] == TaskKind.CHUNK, tasks.lengths[staying], 0)

    def _enter(self, tasks: TaskBatch, packed: Records, entering: Ints) -> None:
        at, rows = tasks.slots[entering], packed[entering]
        for slot, index in zip(at.tolist(), entering.tolist(), strict=True):
            self.requests[slot] = tasks.requests[index]
        handoff = tasks.kinds[entering] == TaskKind.HANDOFF
        total = rows["prompt_lens"] + rows["step_idx"]
        self.serials[at] = rows["request_serial"]
        self.prefilled[at] = np.where(handoff, total, tasks.starts[entering] + tasks.lengths[entering])
        self.blocks[at] = tasks.block_counts[entering]
        lengths = self.lengths
        lengths["block_tables"][at] = tasks.block_counts[entering]
        lengths["token_ids"][at] = total + handoff
        lengths["bad_words"][at] = rows["bad_words_num"]
        lengths["stop_seqs_len"][at] = rows["stop_seqs_num"]
        lengths["stop_seqs"][at] = rows["stop_seqs_num"].astype(np.int64) * self.sizes.max_stop_length

    def appended(self, slots: Ints, most: int) -> None:
        """Account for a step that may append up to ``most`` tokens to ``token_ids`` of these slots."""
        lengths = self.lengths["token_ids"]
        lengths[slots] = np.minimum(lengths[slots] + most, self.sizes.max_tokens)

    def reported(self, slots: Sequence[int]) -> None:
        """Forget what left these slots: an output that names them was put on its way."""
        for slot in slots:
            self.preempted.pop(slot, None)
            self.aborted.pop(slot, None)

    def release(self, slots: Sequence[int]) -> None:
        """Free slots whose requests have ended."""
        for slot in slots:
            self._free(slot)

    def _free(self, slot: int) -> None:
        self.requests[slot], self.serials[slot] = None, 0
        self.blocks[slot], self.prefilled[slot] = 0, 0

    def role(self, slot: int) -> SplitRole:
        """The split role of the request in a slot."""
        request = self.requests[slot]
        return SplitRole.MIXED if request is None else request.role


def is_sound(ledger: Ledger, tasks: TaskBatch, packed: Records) -> bool:
    """True when ``tasks`` can surely go in: the common case, decided without a loop.

    False means that :func:`problems` has to look; it may still find nothing (a slot that is left and entered
    in one batch).
    """
    sizes, kinds, slots = ledger.sizes, tasks.kinds, tasks.slots
    n = len(tasks)
    if n == 0:
        return True
    if int(slots.min()) < 0 or int(slots.max()) >= sizes.slots or len(set(slots.tolist())) != n:
        return False
    serials, held = packed["request_serial"], ledger.serials[slots]
    entering = (kinds == TaskKind.PREFILL) | (kinds == TaskKind.HANDOFF)
    leaving = kinds >= TaskKind.PREEMPTED
    if bool(np.where(entering, held != 0, held != serials).any()) or np.isin(serials[entering], ledger.serials).any():
        return False
    if len(set(serials.tolist())) != n or (leaving.any() and (ledger.preempted or ledger.aborted)):
        return False
    total = packed["prompt_lens"] + packed["step_idx"]
    blocks = np.where(entering, 0, ledger.blocks[slots])
    end = np.where(kinds == TaskKind.HANDOFF, total, tasks.starts + tasks.lengths)
    feeding = (kinds == TaskKind.PREFILL) | (kinds == TaskKind.CHUNK)
    have = blocks + tasks.block_counts
    wrong = (
        (total >= sizes.max_tokens)
        | (feeding & ((tasks.starts < 0) | (tasks.lengths < 1) | (end > total)))
        | ((kinds == TaskKind.CHUNK) & (tasks.starts != ledger.prefilled[slots]))
        | (tasks.first_blocks != blocks)
        | (have > sizes.max_blocks)
        | ((kinds != TaskKind.DECODE) & (end > have * sizes.block_size))
        | ((kinds == TaskKind.HANDOFF) & (tasks.first_tokens < 0))
    )
    if bool((wrong & ~leaving).any()) or (len(tasks.blocks) and int(tasks.blocks.min()) < 0):
        return False
    return not any(tasks.drafts)


def problems(ledger: Ledger, tasks: TaskBatch) -> list[str]:
    """Everything that forbids inserting ``tasks`` now, each as one sentence; empty when they may go in (G8)."""
    found: list[str] = []
    left: set[int] = set()
    used: set[int] = set()
    entered: set[int] = set()
    starts = np.cumsum(tasks.block_counts) - tasks.block_counts
    for at, (kind, slot, request) in enumerate(
        zip(tasks.kinds.tolist(), tasks.slots.tolist(), tasks.requests, strict=True)
    ):
        who = f"task {at} ({TaskKind(kind).name} {request.request_id!r} in slot {slot}): "
        if not 0 <= slot < ledger.sizes.slots:
            found.append(f"{who}slots go from 0 to {ledger.sizes.slots - 1}")
            continue
        if slot in used or (kind in LEAVING and slot in left):
            found.append(f"{who}the batch already writes slot {slot}")
        elif kind in LEAVING:
            found += [who + text for text in _leaving(ledger, kind, slot, request)]
            left.add(slot)
        else:
            used.add(slot)
            found += [who + text for text in _holding(ledger, kind, slot, request, left, entered)]
            entered.add(request.serial)
            blocks = tasks.blocks[starts[at] : starts[at] + tasks.block_counts[at]]
            found += [who + text for text in _extents(ledger, tasks, at, blocks)]
    return found


def _leaving(ledger: Ledger, kind: int, slot: int, request: AdmittedRequest) -> list[str]:
    pending = ledger.preempted if kind == TaskKind.PREEMPTED else ledger.aborted
    if ledger.serials[slot] != request.serial:
        return ["the slot does not hold this request"]
    if slot in pending:
        return [f"{pending[slot][1]!r} left this slot and is not reported yet; save an output first"]
    return []


def _holding(
    ledger: Ledger, kind: int, slot: int, request: AdmittedRequest, left: set[int], entered: set[int]
) -> list[str]:
    if kind in (TaskKind.CHUNK, TaskKind.DECODE):
        if ledger.serials[slot] == request.serial and slot not in left:
            return []
        return ["the slot does not hold this request"]
    texts = []
    holder = ledger.requests[slot]
    if holder is not None and slot not in left:
        texts.append(f"the slot still holds {holder.request_id!r}; release, preempt or abort it first")
    if request.serial in entered or bool((ledger.serials == request.serial).any()):
        texts.append("the request is in a slot already; admit it again to run it again")
    return texts


def _extents(ledger: Ledger, tasks: TaskBatch, at: int, blocks: Ints) -> list[str]:
    """Lengths, blocks and drafts of one task against the sizes and the request."""
    sizes, kind, slot, request = ledger.sizes, int(tasks.kinds[at]), int(tasks.slots[at]), tasks.requests[at]
    start, length, first = int(tasks.starts[at]), int(tasks.lengths[at]), int(tasks.first_blocks[at])
    texts, total, drafts = [], request.total, tasks.drafts[at]
    if total >= sizes.max_tokens:
        texts.append(f"{total} tokens do not fit {sizes.max_tokens}; it was admitted for another state")
    if kind in (TaskKind.PREFILL, TaskKind.CHUNK) and not (start >= 0 and length >= 1 and start + length <= total):
        texts.append(f"tokens {start} to {start + length} of {total}")
    if kind == TaskKind.CHUNK and start != ledger.prefilled[slot]:
        texts.append(f"starts at token {start}, but {int(ledger.prefilled[slot])} are prefilled")
    have = 0 if kind in (TaskKind.PREFILL, TaskKind.HANDOFF) else int(ledger.blocks[slot])
    if first != have:
        texts.append(f"blocks begin at entry {first}, but {have} are in use")
    if len(blocks) and int(blocks.min()) < 0:
        texts.append(f"block {int(blocks.min())} is negative")
    count = have + len(blocks)
    if count > sizes.max_blocks:
        texts.append(f"{count} blocks, the table holds {sizes.max_blocks}")
    needed = {TaskKind.HANDOFF: total, TaskKind.DECODE: 0}.get(TaskKind(kind), start + length)
    if needed > count * sizes.block_size:
        texts.append(f"{needed} tokens need {-(-needed // sizes.block_size)} blocks, has {count}")
    if kind == TaskKind.HANDOFF and int(tasks.first_tokens[at]) < 0:
        texts.append("a handoff needs the first token")
    if len(drafts) > (sizes.max_draft if kind == TaskKind.HANDOFF else 0):
        texts.append(f"{len(drafts)} drafts, but {sizes.max_draft if kind == TaskKind.HANDOFF else 0} fit here")
    if any(not isinstance(token, int) or token < 0 for token in drafts):
        texts.append("drafts must be token ids")
    return texts
