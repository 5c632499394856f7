"""How many drafts are worth their rows: fewer, or none, where few were accepted lately.

Decided from delivered tokens alone, so that a run does the same again, on every rank and at any speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .proposer import Fed, Int64s, Proposer

if TYPE_CHECKING:
    from hal_core import AdmittedRequest

WORTH = 0.2
"""A draft is made while the chance that it is accepted is at least this: what one more row costs, in steps."""
_FADE = 0.85
"""What earlier steps count, less by this with each step."""
_DOUBT = 2.0
"""So many drafts of experience in general stand beside those of the request."""
_FIRST_RATE = 0.8
_LEARN = 0.02
LONGEST_PAUSE = 64
"""Most steps without drafts before another is tried."""


class Acceptance:
    """How often a request's drafts were accepted lately; at first, what drafts in general were."""

    __slots__ = ("_accepted", "_general", "_tested")

    def __init__(self, general: float = _FIRST_RATE) -> None:
        self._general, self._accepted, self._tested = general, 0.0, 0.0

    def note(self, drafted: int, accepted: int) -> None:
        """Take over a step: of ``drafted`` drafts the first ``accepted`` were right, and one more was looked at."""
        self._accepted = self._accepted * _FADE + accepted
        self._tested = self._tested * _FADE + min(accepted + 1, drafted)

    @property
    def rate(self) -> float:
        """The chance that a draft is accepted when those before it are, from 0 to 1."""
        return (self._accepted + _DOUBT * self._general) / (self._tested + _DOUBT)

    def worthwhile(self, most: int) -> int:
        """How many of ``most`` drafts are worth their rows."""
        rate, chance, count = self.rate, 1.0, 0
        while count < most and (chance := chance * rate) >= WORTH:
            count += 1
        return count


class _Slot:
    """A request's acceptance, the drafts that it has now, and its steps until a draft is tried again."""

    __slots__ = ("acceptance", "drafted", "pause", "wait")

    def __init__(self, general: float) -> None:
        self.acceptance = Acceptance(general)
        self.drafted, self.pause, self.wait = 0, 1, 0


class Adaptive:
    """Any proposer, asked for no more drafts than are worth it.

    A request whose drafts are not is given none, but for a single one now and then: after 1, 2, 4, … steps, at most
    :data:`LONGEST_PAUSE`, until one is accepted.
    """

    def __init__(self, inner: Proposer) -> None:
        self.inner, self.wants_hidden = inner, inner.wants_hidden
        self._slots: dict[int, _Slot] = {}
        self._general = _FIRST_RATE

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """Begin with what drafts in general were worth."""
        self._slots[slot] = _Slot(self._general)
        self.inner.enter(slot, request, tokens)

    def observe(self, fed: Fed) -> None:
        """Learn from the drafts of each slot that was given tokens."""
        for number, accepted in zip(fed.slots, fed.accepted, strict=True):
            if len(accepted):
                self._learn(self._slots[number], len(accepted) - 1)
        self.inner.observe(fed)

    def propose(self, room: Mapping[int, int]) -> dict[int, list[int]]:
        """As the proposer does, in as much room as is worthwhile."""
        asked = {slot: self._most(self._slots[slot], most) for slot, most in room.items() if most > 0}
        drafts = self.inner.propose({slot: most for slot, most in asked.items() if most})
        for slot, tokens in drafts.items():
            self._slots[slot].drafted = len(tokens)
        return drafts

    def leave(self, slot: int, *, finished: bool) -> None:
        """Forget the request."""
        self._slots.pop(slot, None)
        self.inner.leave(slot, finished=finished)

    def close(self) -> None:
        """Close the proposer."""
        self.inner.close()

    def _learn(self, slot: _Slot, right: int) -> None:
        if not slot.drafted:
            slot.wait -= 1
            return
        drafted, slot.drafted = slot.drafted, 0
        right = min(right, drafted)
        slot.acceptance.note(drafted, right)
        self._general += _LEARN * (right / min(right + 1, drafted) - self._general)
        slot.pause = 1 if right else min(2 * slot.pause, LONGEST_PAUSE)
        slot.wait = slot.pause

    @staticmethod
    def _most(slot: _Slot, most: int) -> int:
        worthwhile = slot.acceptance.worthwhile(most)
        return worthwhile or int(slot.wait <= 0)
