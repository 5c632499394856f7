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
        self._reports = False  # whether a request so far has wanted log-probabilities
        self._last: PlannedStep | None = None  # of the same slots as the next one, if ``_known`` is unchanged
        self._known: tuple[bytes, bytes, set[int]] | None = None

    def plan(self, number: int, tasks: TaskBatch, ended: set[int]) -> PlannedStep:
        """Return the step after ``tasks``, which are inserted. ``ended``: slots whose requests are known to have
        ended."""
        if tasks.requests and not set(tasks.plain["kinds"]) <= _STAYING:
            self._last = None
            return self._planned(number, tasks, ended)
        table = self._state.host_table
        known = table.admission_ids.tobytes(), table.prefilled.tobytes(), set(ended)
        if self._last is None or known != self._known:
            self._last, self._known = self._planned(number, tasks, ended), known
            return self._last
        return PlannedStep(self._last.step.again(number), tasks, self._last.counts, self._last.decodes)

    def _planned(self, number: int, tasks: TaskBatch, ended: set[int]) -> PlannedStep:
        table, name, plain = self._state.host_table, self._state.name, tasks.plain
        left: list[int] = []
        fed: dict[int, int] = {}
        columns = plain["kinds"], plain["slots"], tasks.requests, plain["num_scheduled_tokens"]
        for kind, slot, request, length in zip(*columns, strict=True):
            if kind in LEAVING:
                left.append(slot)
            elif kind in ENTERING:
                logprobs = request.params.logprobs
                self._totals[slot], self._logprobs[slot] = request.total, -1 if logprobs is None else logprobs
                self._reports |= logprobs is not None
            if kind in FEEDING:
                fed[slot] = length
        runs = table.prefilled >= self._totals
        runs &= table.admission_ids != 0
        if fed or ended:
            runs[[*fed, *ended]] = False
        counts = np.zeros(len(runs), np.int32)
        counts[runs] = self._state.sizes.max_accept
        decodes = runs.copy() if fed or left else runs
        if fed:
            counts[[*fed]], runs[[*fed]] = [*fed.values()], True
        most = int(self._logprobs[runs].max(initial=-1)) if self._reports else -1
        if left:
            runs[left] = True
        places = runs.nonzero()[0]
        logprobs = None if most < 0 else most
        orders = {name: places.astype(np.int32)}
        step = Step(number, orders, speculative=self._state.speculative, group=self._group, logprobs=logprobs)
        counts, decodes = counts[places], decodes[places]
        counts.flags.writeable = decodes.flags.writeable = False
        return PlannedStep(step, tasks, counts, decodes)
