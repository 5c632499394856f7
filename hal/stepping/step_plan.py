"""Plan of a step: its slots, and the most tokens that each feeds, known to the host before the step runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import ENTERING, FEEDING, LEAVING, Step, TaskBatch, TaskKind

if TYPE_CHECKING:
    from hal_core import Group, SlotState

Int32s = np.ndarray[Any, np.dtype[np.int32]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
_STAYING = {TaskKind.MORE_BLOCKS}
"""Kinds of tasks that do not change which slots decode."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """A step before it runs, for ``n`` slots. While the previous step is in flight, this is all the host knows.

    - ``step``: its number and its order: the slots that may run, and the slots that were left, ascending. A slot whose
      request ended in the previous step does not run, because the device sees its ``stop_flags``.
    - ``tasks``: the tasks inserted before it.
    - ``counts`` int32 ``[n]``: most tokens that each slot feeds, in that order: its piece of the prompt exactly, or its
      next token and as many drafts as there is room for; 0 for a slot that was left.
    - ``decodes`` bool ``[n]``: whether a slot feeds its next token and drafts, instead of a piece of a prompt.
    """

    step: Step
    tasks: TaskBatch
    counts: Int32s
    decodes: Bools

    @property
    def tokens(self) -> int:
        """Most tokens that the step feeds, all slots together."""
        return int(self.counts.sum())


class StepPlanner:
    """Plans the steps of one state from its host table, without waiting for the device."""

    def __init__(self, state: SlotState, group: Group) -> None:
        self._state, self._group = state, group
        self._totals = np.zeros(state.sizes.num_slots, np.int64)  # by slot: tokens of its request left to prefill
        self._logprobs = np.full(state.sizes.num_slots, -1, np.int64)
        self._last: PlannedStep | None = None  # of the same slots as the next one, if ``_known`` is unchanged
        self._known: tuple[bytes, bytes, set[int]] | None = None

    def plan(self, number: int, tasks: TaskBatch, ended: set[int]) -> PlannedStep:
        """Return the step after ``tasks``, which are inserted. ``ended``: slots whose requests are known to have
        ended."""
        table = self._state.host_table
        known = table.admission_ids.tobytes(), table.prefilled.tobytes(), set(ended)
        alike = not tasks.requests or set(tasks.plain["kinds"]) <= _STAYING
        if alike and known == self._known and self._last is not None:
            return PlannedStep(self._last.step.again(number), tasks, self._last.counts, self._last.decodes)
        made = self._planned(number, tasks, ended)
        made.counts.flags.writeable = made.decodes.flags.writeable = False
        self._last, self._known = made if alike else None, known
        return made

    def _planned(self, number: int, tasks: TaskBatch, ended: set[int]) -> PlannedStep:
        fed = np.zeros(len(self._totals), np.int32)
        left: list[int] = []
        columns = (tasks.plain["kinds"], tasks.plain["slots"], tasks.requests, tasks.plain["num_scheduled_tokens"])
        for kind, slot, request, length in zip(*columns, strict=True):
            if kind in LEAVING:
                left.append(slot)
            elif kind in ENTERING:
                logprobs = request.params.logprobs
                self._totals[slot], self._logprobs[slot] = request.total, -1 if logprobs is None else logprobs
            if kind in FEEDING:
                fed[slot] = length
        table, name = self._state.host_table, self._state.name
        decodes = (table.admission_ids != 0) & (table.prefilled >= self._totals) & (fed == 0)
        decodes[list(ended)] = False
        fed[decodes] = self._state.sizes.max_accept
        runs = fed > 0
        most = int(self._logprobs[runs].max(initial=-1))
        runs[left] = True
        places = np.flatnonzero(runs)
        order = places.astype(np.int32)
        logprobs = None if most < 0 else most
        step = Step(number, {name: order}, speculative=self._state.speculative, group=self._group, logprobs=logprobs)
        return PlannedStep(step, tasks, fed[places], decodes[places])
