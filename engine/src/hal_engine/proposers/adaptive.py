"""The number of drafts that is worth its rows: fewer, or none, if few were accepted lately.

It depends only on delivered tokens, so a run repeats exactly, on every rank and at any speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .proposer import Fed, Int64s, Proposer

if TYPE_CHECKING:
    from hal_core import AdmittedRequest

STEP_COST = 0.1
"""Cost of having any drafts in a step, as a fraction of the step."""
FIRST_RATE = 0.5
"""The initial acceptance rate of a draft."""
FIRST_PAUSE, LONGEST_PAUSE = 4, 64
"""Steps from one trial to the next of requests whose drafts are not worth their cost: powers of 2, so that trials of
several requests fall on the same steps."""
_FADE = 0.85
"""The weight of earlier steps is multiplied by this with each step."""
_DOUBT = 2.0
"""Weight of all requests' drafts beside those of the one request, in drafts."""
_LEARN = 0.05


class Acceptance:
    """A request's recent acceptance rate."""

    __slots__ = ("_accepted", "_tested")

    def __init__(self) -> None:
        self._accepted = self._tested = 0.0

    def note(self, drafted: int, accepted: int) -> None:
        """Record a step: of ``drafted`` drafts the first ``accepted`` were right, and one more was tested."""
        self._accepted = self._accepted * _FADE + accepted
        self._tested = self._tested * _FADE + min(accepted + 1, drafted)

    def rate(self, general: float) -> float:
        """Return the chance, 0 to 1, that a draft is accepted if those before it are; ``general``: that of all
        requests."""
        return (self._accepted + _DOUBT * general) / (self._tested + _DOUBT)


def row_cost(requests: int, step_rows: int) -> float:
    """Return the cost of one more row in a step of so many requests, as a fraction of the step's cost per request.

    ``step_rows``: as in :class:`Setup`. The cost is near 0 for few requests, and near 1 for many.
    """
    return requests / (requests + step_rows)


def worthwhile(rate: float, most: int, cost: float) -> tuple[int, float]:
    """Return how many of ``most`` drafts have an acceptance worth their ``cost``, and their gain beyond it."""
    chance, count, gain = rate, 0, 0.0
    while count < most and chance > cost:
        count, gain, chance = count + 1, gain + chance - cost, chance * rate
    return count, gain


class _Slot:
    """A request's acceptance, its current drafts, and the steps between its trials."""

    __slots__ = ("acceptance", "drafted", "pause")

    def __init__(self) -> None:
        self.acceptance, self.drafted, self.pause = Acceptance(), 0, FIRST_PAUSE


class Adaptive:
    """Wrapper of any proposer that requests no more drafts than are worth their cost.

    If drafts are not worth it, a request tries some ever less often, until they are worth it again: a trial happens at
    steps whose number its pause divides, and doubles the pause. A request's rate is combined with the recent rate of
    all drafts, so that new requests profit from running ones.

    ``step_rows``: as in :class:`Setup`. If a proposer has ``draft_cost`` (the cost of one draft as a fraction of a
    step, such as a run of a model's layer), a draft must be worth that too. ``name``: the proposer's name.
    """

    def __init__(self, inner: Proposer, step_rows: int, name: str = "") -> None:
        self.name = name or type(inner).__name__
        self.inner, self.wants_hidden, self._step_rows = inner, inner.wants_hidden, step_rows
        self._draft_cost = float(getattr(inner, "draft_cost", 0.0))
        self._slots: dict[int, _Slot] = {}
        self._general, self._steps = FIRST_RATE, 0

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """Start with the rate of all requests' drafts."""
        self._slots[slot] = _Slot()
        self.inner.enter(slot, request, tokens)

    def observe(self, fed: Fed) -> None:
        """Learn from the drafts of each slot with new tokens: from those that were fed, if known."""
        for place, (number, accepted) in enumerate(zip(fed.slots, fed.accepted, strict=True)):
            slot = self._slots[number]
            if fed.drafted is not None:
                slot.drafted = fed.drafted[place]
            if slot.drafted and len(accepted):
                self._learn(slot, min(len(accepted) - 1, slot.drafted))
        self.inner.observe(fed)

    def propose(self, room: Mapping[int, int]) -> dict[int, list[int]]:
        """Propose as the proposer does, in as much room as is worthwhile."""
        self._steps += 1
        cost = self._draft_cost + row_cost(len(room), self._step_rows) if room else 0.0
        wanted, gains = {}, 0.0
        for number, most in room.items():
            wanted[number], gain = worthwhile(self._slots[number].acceptance.rate(self._general), most, cost)
            gains += gain
        drafting = gains >= STEP_COST * len(room)
        limits = {number: self._most(self._slots[number], count, drafting) for number, count in wanted.items()}
        drafts = self.inner.propose({number: min(count, room[number]) for number, count in limits.items() if count})
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
        """Return how many drafts a request gets in a step that is worth drafts (``drafting``), or is not."""
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
