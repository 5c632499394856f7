"""Acceptance of drafts, counted from the output of steps, whatever proposed them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hal_core import ENTERING, LEAVING

if TYPE_CHECKING:
    from hal_core import SlotState

    from .step_plan import PlannedStep


class Acceptance:
    """Counts of drafts.

    - ``drafted``: drafts that were fed; ``accepted``: tokens that a step gave a slot beyond its first one.
    - ``turns``: how often a slot that decodes was given tokens by a step.
    """

    def __init__(self, drafted: int = 0, accepted: int = 0, turns: int = 0) -> None:
        self.drafted, self.accepted, self.turns = drafted, accepted, turns
        self._waiting = np.zeros(0, np.int32)  # by slot: drafts that the next step feeds

    @property
    def tokens_a_turn(self) -> float:
        """Return the tokens that a step gives a decoding slot, on average; 0.0 before the first."""
        return (self.turns + self.accepted) / self.turns if self.turns else 0.0

    def count(self, planned: PlannedStep, state: SlotState) -> None:
        """Count a step that verified drafts, from its output."""
        mirror, places = state.mirror, planned.step.places[state.name]
        if not len(self._waiting):
            self._waiting = np.zeros(state.sizes.num_slots, np.int32)
        columns = (planned.tasks.plain["kinds"], planned.tasks.plain["slots"], planned.tasks.drafts)
        for kind, slot, drafts in zip(*columns, strict=True):
            if kind in ENTERING or kind in LEAVING:
                self._waiting[slot] = len(drafts)
        given = mirror["accept_num"].reshape(-1)[places] * planned.decodes
        ran = given > 0
        turns = int(ran.sum())
        self.turns += turns
        self.accepted += int(given.sum()) - turns
        self.drafted += int((self._waiting[places] * ran).sum())
        self._waiting = mirror["draft_num"].reshape(-1).copy()
