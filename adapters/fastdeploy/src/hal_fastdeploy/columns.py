"""The tasks of one call as columns, so that a tensor is written with one conversion for all of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from hal_core import SlotRuns

from .requests import DECODE, PREFILL, Task
from .values import INT32, INT64, Ints, Ragged


@dataclass(frozen=True, slots=True)
class Prefills:
    """The prefills among tasks with distinct slots. ``tokens``: prompt and output of each.

    Int64 ``[tasks]``: ``prompts``, the length of each prompt; ``starts``, ``lengths`` of the pieces that the next step
    runs; ``steps``, the generated tokens, 0 before the last piece.
    """

    tasks: Sequence[Task]
    slots: SlotRuns
    tokens: Ragged
    prompts: Ints
    starts: Ints
    lengths: Ints
    steps: Ints

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> Prefills:
        """Convert the tokens. Raises :class:`ValueError` for one that is no whole number."""
        rows: list[Any] = []
        for task in tasks:
            rows.append(task.request.prompt_token_ids)
            if task.total > task.prompt:
                rows.append(task.request.output_token_ids)
        columns = [[*map(attrgetter(name), tasks)] for name in ("slot", "total", "prompt", "start", "length", "step")]
        slots, totals, prompts, starts, lengths, steps = np.array(columns, np.int64)
        tokens = Ragged(Ragged.of(rows, INT64, "token_ids").values, totals)
        return cls(tasks, SlotRuns(slots), tokens, prompts, starts, lengths, steps)


@dataclass(frozen=True, slots=True)
class Round:
    """Tasks with distinct slots: prefills, tasks that bring block tables (``grown``: prefills too), leaving ones."""

    new: Prefills | None
    grown: SlotRuns
    blocks: Ragged
    left: SlotRuns

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> Round:
        """Convert tokens and blocks. Raises :class:`ValueError` for one that is no whole number."""
        new = [task for task in tasks if task.kind == PREFILL]
        grown = [*new, *(task for task in tasks if task.kind == DECODE)]
        left = [task.slot for task in tasks if task.kind not in (PREFILL, DECODE)]
        prefills = Prefills.of(new) if new else None
        slots = prefills.slots if prefills and len(grown) == len(new) else SlotRuns([task.slot for task in grown])
        blocks = Ragged.of([task.request.block_tables for task in grown], INT32, "block_tables")
        return cls(prefills, slots, blocks, SlotRuns(left))
