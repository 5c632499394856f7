"""The host's record of a state's drafts; :mod:`hal_core.slots.drafts` checks and writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidValue
from .tasks import TaskBatch, TaskKind

if TYPE_CHECKING:
    from .step import Step

Mirror = Mapping[str, np.ndarray[Any, Any]]
"""The output fields as of the last step whose output was taken, ``[slots, width]`` each."""


class DraftBook:
    """The host's record of a state's drafts.

    - ``step``: number of the last step that advanced the state, None before the first. ``handed`` is the last step
      whose drafts were set, ``saved`` the last one whose output was saved.
    - ``holders``: slot to admission id of the requests with drafts that no step has verified yet.
    - ``changed``: slots that a request has entered or left, or got a piece of its prompt, since that step.
    """

    __slots__ = ("changed", "handed", "holders", "saved", "step")

    def __init__(self) -> None:
        self.step: int | None = None
        self.handed: int | None = None
        self.saved: int | None = None
        self.holders: dict[int, int] = {}
        self.changed: set[int] = set()

    def follow(self, tasks: TaskBatch) -> None:
        """Record an inserted batch."""
        for kind, slot in zip(tasks.plain["kinds"], tasks.plain["slots"], strict=True):
            if kind != TaskKind.MORE_BLOCKS:  # more blocks do not affect drafts
                self.changed.add(slot)
                self.holders.pop(slot, None)

    def advanced(self, step: Step) -> None:
        """Record a step: all earlier drafts are verified or dropped."""
        self.step = step.number
        self.holders.clear()
        self.changed.clear()

    def check_update(self, mirror: Mirror, step: Step) -> None:
        """Refuse a plain step for slots whose drafts it would drop."""
        if step.speculative or not self.holders:
            return
        waiting = sorted(
            slot for slot, admission_id in self.holders.items() if not has_ended(mirror, slot, admission_id)
        )
        if waiting:
            raise InvalidValue(
                f"step {step.number} verifies no drafts, but slots {waiting} have some for it",
                cure="give Step(…, speculative=True), or set no drafts before a plain step",
                argument="step",
            )


def has_ended(mirror: Mirror, slot: int, admission_id: int) -> bool:
    """Return True if a taken output shows it. Until then a stopped slot simply does not run."""
    return bool(mirror["request_serial"][slot, 0] == admission_id and mirror["stop_flags"][slot, 0])
