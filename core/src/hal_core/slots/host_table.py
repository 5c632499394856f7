"""The host's table of a slot state: the request in each slot, its prefilled tokens, the lengths of its rows.

It records the host's decisions, not the device's progress, so it never waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .admission import AdmittedRequest
from .fields import ROW_FIELDS, SplitRole, StateConfig
from .layout import ADMISSION_ID
from .tasks import TaskBatch, TaskKind

FEW = 8
"""Up to this many new requests are planned, checked and booked in plain Python; benchmarks/few.py measures the gain."""
BLOCKS, TOKENS = ROW_FIELDS.index("block_tables"), ROW_FIELDS.index("token_ids")
PREFILLED, SLOT_ADMISSION, HELD = range(len(ROW_FIELDS), len(ROW_FIELDS) + 3)
"""Columns of the table after the lengths: ``prefilled``, ``admission_ids``, ``blocks``."""
Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
Records = np.ndarray[Any, np.dtype[np.void]]


class Twin(Protocol):
    """A device's native version of the checks and the booking of requests that enter or stay, over the same table."""

    def sound(self, tasks: TaskBatch) -> bool:
        """Return True only if :func:`hal_core.slots.checks.problems` finds no problem and the requests were admitted
        for these sizes. The batch has a ``more`` that is not None."""

    def commit(self, tasks: TaskBatch) -> None:
        """Commit such a batch as :meth:`HostSlotTable.commit` does."""


class HostSlotTable:
    """Arrays with one entry per slot, and the requests in the slots.

    - ``table`` int64 ``[slots, 8]``: the arrays below are its columns, so that an insertion reads and writes all of
      them at once: five ``row_lengths``, ``prefilled``, ``admission_ids``, ``blocks``.
    - ``requests``: the admitted request in each slot, or None.
    - ``admission_ids`` int64: its admission id, 0 if the slot is free.
    - ``prefilled`` int64: tokens whose KV was requested by the tasks inserted so far.
    - ``blocks`` int64: entries of the block table in use.
    - ``live``: admission id to slot, for every request in a slot.
    - ``row_lengths`` int64 ``[row fields, slots]``, in the order of ``ROW_FIELDS``: the largest length, in elements,
      that was written since the row was last reset (G11).
    - ``preempted``, ``aborted``: slot to ``(admission_id, request id)`` of requests that left and that no output has
      reported yet.
    - ``twin``: checks and books requests that enter or stay in native code, if the state's device has such code.
    """

    def __init__(self, sizes: StateConfig) -> None:
        n = sizes.num_slots
        self.sizes = sizes
        self.requests: list[AdmittedRequest | None] = [None] * n
        self.table = np.zeros((n, HELD + 1), np.int64)
        self.row_lengths = self.table[:, : len(ROW_FIELDS)].T
        self.prefilled, self.admission_ids, self.blocks = self.table[:, PREFILLED:].T
        self.live: dict[int, int] = {}
        self.preempted: dict[int, tuple[int, str]] = {}
        self.aborted: dict[int, tuple[int, str]] = {}
        self.twin: Twin | None = None

    def commit(self, tasks: TaskBatch) -> None:
        """Book the requests of an insertion in their slots."""
        if self.twin is not None and (tasks.all_new or tasks.more is not None):
            self.twin.commit(tasks)
            return
        if tasks.all_prefill and len(tasks) <= FEW:
            self._enter_few(tasks)
            return
        if tasks.all_prefill:
            self._enter(tasks, None)
            return
        if tasks.all_growing:
            self._grow(tasks.slots, tasks.block_counts)
            return
        kinds, slots = tasks.kinds, tasks.slots
        for at in np.flatnonzero(kinds >= TaskKind.PREEMPTED).tolist():
            slot, request = int(slots[at]), tasks.requests[at]
            leaving = self.preempted if kinds[at] == TaskKind.PREEMPTED else self.aborted
            leaving[slot] = (request.admission_id, request.request_id)
            self.release([slot])
        entering = np.flatnonzero((kinds == TaskKind.PREFILL) | (kinds == TaskKind.REMOTE_PREFILL))
        if len(entering):
            self._enter(tasks, entering)
        staying = np.flatnonzero((kinds == TaskKind.PREFILL_CHUNK) | (kinds == TaskKind.MORE_BLOCKS))
        if len(staying):
            at = slots[staying]
            self._grow(at, tasks.block_counts[staying])
            self.prefilled[at] += np.where(
                kinds[staying] == TaskKind.PREFILL_CHUNK, tasks.num_scheduled_tokens[staying], 0
            )

    def _grow(self, slots: Ints, counts: Ints) -> None:
        """Book more blocks of requests that stay."""
        self.blocks[slots] += counts
        self.row_lengths[BLOCKS, slots] = np.maximum(self.row_lengths[BLOCKS, slots], self.blocks[slots])

    def _enter(self, tasks: TaskBatch, entering: Ints | None) -> None:
        """Book the entering tasks; None: all tasks, without handoffs."""
        request_row, slots, counts, ends = (
            tasks.request_row,
            tasks.slots,
            tasks.block_counts,
            tasks.num_computed_tokens + tasks.num_scheduled_tokens,
        )
        requests: Sequence[AdmittedRequest] = tasks.requests
        if entering is not None:
            request_row, slots, counts, ends = request_row[entering], slots[entering], counts[entering], ends[entering]
            requests = [requests[at] for at in entering.tolist()]
        rows, places = np.empty((len(slots), HELD + 1), np.int64), slots.tolist()
        rows[:, :PREFILLED] = request_row[:, :ADMISSION_ID]
        rows[:, BLOCKS] = rows[:, HELD] = counts
        rows[:, PREFILLED], rows[:, SLOT_ADMISSION] = ends, request_row[:, ADMISSION_ID]
        if entering is not None:
            handoff = tasks.kinds[entering] == TaskKind.REMOTE_PREFILL
            rows[handoff, PREFILLED] = rows[handoff, TOKENS]
            rows[:, TOKENS] += handoff
        self.table[slots] = rows
        self.live.update(zip(request_row[:, ADMISSION_ID].tolist(), places, strict=True))
        deque(map(self.requests.__setitem__, places, requests), maxlen=0)

    def _enter_few(self, tasks: TaskBatch) -> None:
        """Do the same for a few new requests, without NumPy calls that would be all overhead.

        Without it an insertion of 1 request takes 21 % longer, of 8 requests 11 % (``python benchmarks/run.py few``,
        cpu device, medians of 800 in turn, 2026-11-22).
        """
        plain = tasks.plain
        starts, lengths, counts = plain["num_computed_tokens"], plain["num_scheduled_tokens"], plain["block_counts"]
        for at, slot in enumerate(plain["slots"]):
            request, count = tasks.requests[at], counts[at]
            self.requests[slot] = request
            self.live[request.admission_id] = slot
            bad, stop_lengths, stops, _, tokens = request.row_lengths
            end = starts[at] + lengths[at]
            self.table[slot] = (bad, stop_lengths, stops, count, tokens, end, request.admission_id, count)

    def appended(self, slots: Ints, most: int) -> None:
        """Book a step that may append up to ``most`` tokens to ``token_ids`` of these slots."""
        row, slots = self.row_lengths[TOKENS], slots.astype(np.intp)  # otherwise NumPy releases the GIL
        row[slots] = np.minimum(row[slots] + most, self.sizes.max_model_len)

    def reported(self, slots: Sequence[int]) -> None:
        """Forget the requests that left these slots, as a started output reports them."""
        for slot in slots:
            self.preempted.pop(slot, None)
            self.aborted.pop(slot, None)

    def release(self, slots: Sequence[int]) -> None:
        """Free slots whose requests have ended or left."""
        for slot in slots:
            request = self.requests[slot]
            if request is not None:
                del self.live[request.admission_id]
                self.requests[slot] = None
        places = np.array(slots, np.intp)
        for column in (self.prefilled, self.admission_ids, self.blocks):
            column[places] = 0  # one by one: for all at once NumPy releases the GIL

    def role(self, slot: int) -> SplitRole:
        """Return the split role of the request in a slot."""
        request = self.requests[slot]
        return SplitRole.MIXED if request is None else request.role
