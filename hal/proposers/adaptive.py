"""How many drafts are worth their rows: fewer, or none, where few were accepted lately.

Decided from delivered tokens alone, so that a run does the same again, on every rank and at any speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .proposer import Fed, Int64s, Proposer

if TYPE_CHECKING:
    from hal_core import AdmittedRequest

STEP_COST = 0.1
"""What it costs a step to have any drafts, in parts of the step."""
FIRST_RATE = 0.5
"""The chance of a draft before anything is known."""
FIRST_PAUSE, LONGEST_PAUSE = 4, 64
"""Steps from one trial to the next of requests whose drafts are not worth it: powers of 2, so that trials of several
requests fall on the same steps."""
_FADE = 0.85
"""What earlier steps count, less by this with each step."""
_DOUBT = 2.0
"""So many drafts of all requests stand beside those of the one."""
_LEARN = 0.05


class Acceptance:
    """How often a request's drafts were accepted lately."""

    __slots__ = ("_accepted", "_tested")

    def __init__(self) -> None:
        self._accepted = self._tested = 0.0

    def note(self, drafted: int, accepted: int) -> None:
        """Take over a step: of ``drafted`` drafts the first ``accepted`` were right, and one more was looked at."""
        self._accepted = self._accepted * _FADE + accepted
        self._tested = self._tested * _FADE + min(accepted + 1, drafted)

    def rate(self, general: float) -> float:
        """The chance that a draft is accepted when those before it are, from 0 to 1; ``general``: that of all."""
        return (self._accepted + _DOUBT * general) / (self._tested + _DOUBT)


def row_cost(requests: int, step_rows: int) -> float:
    """What one row more costs in a step of so many requests, in parts of what the step costs each of them.

    ``step_rows``: as in :class:`Setup`. A row next to nothing where requests are few, and near 1 where they are many.
    """
    return requests / (requests + step_rows)


def worthwhile(rate: float, most: int, cost: float) -> tuple[int, float]:
    """How many of ``most`` drafts are accepted with a chance that is worth their ``cost``; what they gain beyond it."""
    chance, count, gain = rate, 0, 0.0
    while count < most and chance > cost:
        count, gain, chance = count + 1, gain + chance - cost, chance * rate
    return count, gain


class _Slot:
    """A request's acceptance, the drafts that it has now, and the steps between its trials."""

    __slots__ = ("acceptance", "drafted", "pause")

    def __init__(self) -> None:
        self.acceptance, self.drafted, self.pause = Acceptance(), 0, FIRST_PAUSE


class Adaptive:
    """Any proposer, asked for no more drafts than are worth it.

    Where they are not, a request tries some now and then, ever less often: at a step whose number its pause divides,
    which doubles then, until drafts are worth it again. What is known of a request stands beside what drafts of all
    were worth lately, so that those that begin learn from those that run.

    ``step_rows``: as in :class:`Setup`. A proposer that says ``draft_cost`` (what one draft takes it, in parts of a
    step: a run of a model's layer, say) is asked for a draft only where that is worth it too. ``name``: what the
    proposer is called.
    """

    def __init__(self, inner: Proposer, step_rows: int, name: str = "") -> None:
        self.name = name or type(inner).__name__
        self.inner, self.wants_hidden, self._step_rows = inner, inner.wants_hidden, step_rows
        self._draft_cost = float(getattr(inner, "draft_cost", 0.0))
        self._slots: dict[int, _Slot] = {}
        self._general, self._steps = FIRST_RATE, 0

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """Begin with what drafts of all requests are worth."""
        self._slots[slot] = _Slot()
        self.inner.enter(slot, request, tokens)

    def observe(self, fed: Fed) -> None:
        """Learn from the drafts of each slot that was given tokens: from those that were fed, where that is told."""
        for place, (number, accepted) in enumerate(zip(fed.slots, fed.accepted, strict=True)):
            slot = self._slots[number]
            if fed.drafted is not None:
                slot.drafted = fed.drafted[place]
            if slot.drafted and len(accepted):
                self._learn(slot, min(len(accepted) - 1, slot.drafted))
        self.inner.observe(fed)

    def propose(self, room: Mapping[int, int]) -> dict[int, list[int]]:
        """As the proposer does, in as much room as is worthwhile."""
        self._steps += 1
        cost = self._draft_cost + row_cost(len(room), self._step_rows) if room else 0.0
        wanted, gains = {}, 0.0
        for number, most in room.items():
            wanted[number], gain = worthwhile(self._slots[number].acceptance.rate(self._general), most, cost)
            gains += gain
        drafting = gains >= STEP_COST * len(room)
        asked = {number: self._most(self._slots[number], count, drafting) for number, count in wanted.items()}
        drafts = self.inner.propose({number: min(count, room[number]) for number, count in asked.items() if count})
        for number, tokens in drafts.items():
            self._slots[number].drafted = len(tokens)
        return drafts

    def leave(self, slot: int, *, finished: bool) -> None:
        """Forget the request."""
        self._slots.pop(slot, None)
        self.inner.leave(slot, finished=finished)

    def close(self) -> None:
        """Close the proposer."""
        self.inner.close()

    def _most(self, slot: _Slot, count: int, drafting: bool) -> int:
        """How many drafts a request is to have in a step that is worth drafts, or is not."""
        if drafting and count:
            slot.pause = FIRST_PAUSE
            return count
        if self._steps % slot.pause:
            return 0
        slot.pause = min(2 * slot.pause, LONGEST_PAUSE)
        return max(count, 1)

    def _learn(self, slot: _Slot, right: int) -> None:
        slot.acceptance.note(slot.drafted, right)
        self._general += _LEARN * (right / min(right + 1, slot.drafted) - self._general)
        slot.drafted = 0
