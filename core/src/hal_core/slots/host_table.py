"""The host's table of a slot state: the request in each slot, its prefilled tokens, the lengths of its rows.

It records the host's decisions, not the device's progress, so it never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, Protocol

import numpy as np

from .admission import AdmittedRequest
from .fields import ROW_FIELDS, StateConfig
from .task import ENTERS, FEEDS, LEAVES, TRAITS, TaskKind
from .tasks import TaskBatch

BLOCKS, TOKENS = ROW_FIELDS.index("block_tables"), ROW_FIELDS.index("token_ids")
"""Columns of the table with the lengths of these two rows."""
PREFILLED, SLOT_ADMISSION, BLOCKS_HELD = range(len(ROW_FIELDS), len(ROW_FIELDS) + 3)
"""Columns of the table after the lengths: ``prefilled``, ``admission_ids``, ``blocks``, which a slot holds."""
WIDTH = BLOCKS_HELD + 1
Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
_ROW = Struct(f"={WIDTH}q")


class Twin(Protocol):
    """The native twin of a host table: a device's own code that checks and books requests that enter or stay, in the
    same memory, in place of the core's Python."""

    def sound(self, tasks: TaskBatch) -> bool:
        """Return True only if :func:`hal_core.slots.checks.problems` finds no problem, the requests were admitted for
        these sizes, and none leaves."""

    def commit(self, tasks: TaskBatch) -> bool:
        """Commit a batch as :meth:`HostSlotTable.commit` does; False, with nothing done, if a request leaves."""


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
    - ``twin``: the device's native code that does the same to this table (:class:`Twin`), if it has such code.
    """

    def __init__(self, sizes: StateConfig) -> None:
        n = sizes.num_slots
        self.sizes = sizes
        self.requests: list[AdmittedRequest | None] = [None] * n
        self.table = np.zeros((n, WIDTH), np.int64)
        self._bytes = self.table.data.cast("B")  # the same, quick to read and write in plain Python
        self._cells = self._bytes.cast("q")
        self.row_lengths = self.table[:, : len(ROW_FIELDS)].T
        self.prefilled, self.admission_ids, self.blocks = self.table[:, PREFILLED:].T
        self.live: dict[int, int] = {}
        self.preempted: dict[int, tuple[int, str]] = {}
        self.aborted: dict[int, tuple[int, str]] = {}
        self.twin: Twin | None = None

    def commit(self, tasks: TaskBatch) -> None:
        """Book the requests of an insertion in their slots."""
        if self.twin is not None and self.twin.commit(tasks):
            return
        plain = tasks.plain
        traits = [TRAITS[kind] for kind in plain["kinds"]]
        for at, slot in enumerate(plain["slots"]):
            if traits[at] & LEAVES:  # first, as another request may enter the slot
                request = tasks.requests[at]
                leaving = self.preempted if plain["kinds"][at] == TaskKind.PREEMPTED else self.aborted
                leaving[slot] = (request.admission_id, request.request_id)
                self.release([slot])
        starts, lengths, counts = plain["num_computed_tokens"], plain["num_scheduled_tokens"], plain["block_counts"]
        columns = plain["slots"], traits, tasks.requests, starts, lengths, counts, plain["first_tokens"]
        for slot, trait, request, start, length, count, first_token in zip(*columns, strict=True):
            if trait & ENTERS:
                self._enter(slot, request, start + length, count, given=first_token >= 0)
            elif not trait & LEAVES:
                self._stay(slot, count, length if trait & FEEDS else 0)

    def _enter(self, slot: int, request: AdmittedRequest, end: int, count: int, *, given: bool) -> None:
        """Book a request that enters a slot, with its tokens prefilled to ``end``; ``given``: with its first token."""
        bad, stop_lengths, stops, _, tokens = request.row_lengths
        if given:  # after all of its tokens
            end, tokens = tokens, tokens + 1
        self.requests[slot] = request
        self.live[request.admission_id] = slot
        row = (bad, stop_lengths, stops, count, tokens, end, request.admission_id, count)
        _ROW.pack_into(self._bytes, slot * _ROW.size, *row)

    def _stay(self, slot: int, count: int, length: int) -> None:
        """Book more blocks, and tokens that are prefilled, for the request in a slot."""
        cells, at = self._cells, slot * WIDTH
        cells[at + BLOCKS_HELD] += count
        cells[at + BLOCKS] = max(cells[at + BLOCKS], cells[at + BLOCKS_HELD])
        cells[at + PREFILLED] += length

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
