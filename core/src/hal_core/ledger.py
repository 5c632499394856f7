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

FEW = 4
"""Up to so many tasks are faster checked one by one."""
BLOCKS, TOKENS = ROW_FIELDS.index("block_tables"), ROW_FIELDS.index("token_ids")
Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
Records = np.ndarray[Any, np.dtype[np.void]]


class Ledger:
    """Arrays of one entry a slot, and the requests in the slots.

    - ``requests``: the admitted request in each slot, or None.
    - ``serials`` int64: its serial, 0 where the slot is free.
    - ``prefilled`` int64: tokens whose KV the tasks inserted so far have asked for.
    - ``blocks`` int64: entries of the block table in use.
    - ``live``: serial to slot, for every request in a slot.
    - ``extents`` int64 ``[row fields, slots]``, in the order of ``ROW_FIELDS``: the largest length, in elements, that
      was written since the row was last reset (G11); ``lengths`` gives its rows by name.
    - ``preempted``, ``aborted``: slot to ``(serial, request id)`` of what left and no output has reported yet.
    """

    def __init__(self, sizes: Sizes) -> None:
        n = sizes.slots
        self.sizes = sizes
        self.requests: list[AdmittedRequest | None] = [None] * n
        self.serials = np.zeros(n, np.int64)
        self.prefilled = np.zeros(n, np.int64)
        self.blocks = np.zeros(n, np.int64)
        self.live: dict[int, int] = {}
        self.extents = np.zeros((len(ROW_FIELDS), n), np.int64)
        self.lengths = {name: self.extents[row] for row, name in enumerate(ROW_FIELDS)}
        self.preempted: dict[int, tuple[int, str]] = {}
        self.aborted: dict[int, tuple[int, str]] = {}

    def commit(self, tasks: TaskBatch, packed: Records) -> None:
        """Take over what an insertion has put into the slots; ``packed`` are the tasks' records."""
        kinds, slots = tasks.kinds, tasks.slots
        if int(kinds.max()) == TaskKind.PREFILL:
            self._enter(tasks, packed, None)
            return
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
            self.extents[BLOCKS, at] = np.maximum(self.extents[BLOCKS, at], self.blocks[at])
            self.prefilled[at] += np.where(kinds[staying] == TaskKind.CHUNK, tasks.lengths[staying], 0)

    def _enter(self, tasks: TaskBatch, packed: Records, entering: Ints | None) -> None:
        """Take over the entering tasks; None: all tasks, and none is a handoff."""
        take = slice(None) if entering is None else entering
        at, counts = tasks.slots[take], tasks.block_counts[take]
        requests = list(tasks.requests) if entering is None else [tasks.requests[i] for i in entering.tolist()]
        for slot, request in zip(at.tolist(), requests, strict=True):
            self.requests[slot] = request
            self.live[request.serial] = slot
        extents = packed["extents"][take].T
        self.extents[:, at] = extents
        self.extents[BLOCKS, at] = counts
        self.serials[at] = [request.serial for request in requests]
        self.blocks[at] = counts
        self.prefilled[at] = tasks.starts[take] + tasks.lengths[take]
        if entering is not None:
            handoff = tasks.kinds[entering] == TaskKind.HANDOFF
            self.extents[TOKENS, at] += handoff
            self.prefilled[at[handoff]] = extents[TOKENS][handoff]

    def appended(self, slots: Ints, most: int) -> None:
        """Account for a step that may append up to ``most`` tokens to ``token_ids`` of these slots."""
        row = self.extents[TOKENS]
        row[slots] = np.minimum(row[slots] + most, self.sizes.max_tokens)

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
        request = self.requests[slot]
        if request is not None:
            del self.live[request.serial]
        self.requests[slot], self.serials[slot] = None, 0
        self.blocks[slot], self.prefilled[slot] = 0, 0

    def role(self, slot: int) -> SplitRole:
        """The split role of the request in a slot."""
        request = self.requests[slot]
        return SplitRole.MIXED if request is None else request.role


def is_sound(ledger: Ledger, tasks: TaskBatch, packed: Records) -> bool:
    """True when ``tasks`` can surely go in: requests that enter free slots, decided without a loop.

    False means that :func:`problems` has to look, which may still find nothing.
    """
    sizes, slots = ledger.sizes, tasks.slots
    n = len(tasks)
    if n <= FEW or int(tasks.kinds.max()) != TaskKind.PREFILL or any(tasks.drafts):
        return False
    if int(slots.min()) < 0 or int(slots.max()) >= sizes.slots or len(set(slots.tolist())) != n:
        return False
    serials = {request.serial for request in tasks.requests}
    if len(serials) != n or not ledger.live.keys().isdisjoint(serials) or ledger.serials[slots].any():
        return False
    total, counts, starts = packed["extents"][:, TOKENS], tasks.block_counts, tasks.starts
    end = starts + tasks.lengths
    if int(total.max()) >= sizes.max_tokens or int(counts.max()) > sizes.max_blocks or int(tasks.lengths.min()) < 1:
        return False
    if bool((end > total).any()) or bool((end > counts * sizes.block_size).any()) or int(starts.min()) < 0:
        return False
    return not tasks.first_blocks.any() and (len(tasks.blocks) == 0 or int(tasks.blocks.min()) >= 0)


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
        texts: list[str] = []
        if not 0 <= slot < ledger.sizes.slots:
            texts.append(f"slots go from 0 to {ledger.sizes.slots - 1}")
        elif slot in used or (kind in LEAVING and slot in left):
            texts.append(f"the batch already writes slot {slot}")
        elif kind in LEAVING:
            texts += _leaving(ledger, kind, slot, request)
            left.add(slot)
        else:
            used.add(slot)
            texts += _holding(ledger, kind, slot, request, left, entered)
            entered.add(request.serial)
            blocks = tasks.blocks[starts[at] : starts[at] + tasks.block_counts[at]]
            texts += _extents(ledger, tasks, at, blocks)
        found += [f"task {at} ({TaskKind(kind).name} {request.request_id!r} in slot {slot}): {t}" for t in texts]
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
    if request.serial in entered or request.serial in ledger.live:
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
    if kind == TaskKind.HANDOFF:
        if int(tasks.first_tokens[at]) < 0:
            texts.append("a handoff needs the first token")
        if total + 1 >= sizes.max_tokens or request.generated + 1 >= request.params.max_tokens:
            texts.append("the request has ended with its first token; there is nothing left to decode")
    if len(drafts) > (sizes.max_draft if kind == TaskKind.HANDOFF else 0):
        texts.append(f"{len(drafts)} drafts, but {sizes.max_draft if kind == TaskKind.HANDOFF else 0} fit here")
    if any(not isinstance(token, int) or token < 0 for token in drafts):
        texts.append("drafts must be token ids")
    return texts
