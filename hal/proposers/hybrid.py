"""Hybrid: two proposers; the second, which looks tokens up and so costs next to nothing, where it does better.

Where the end of a request stood before at some length, and what the second said there held lately, its drafts are taken
and the first is not asked. Elsewhere the first drafts, and the second goes on from its drafts where they match.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from .adaptive import Acceptance
from .host import Extends
from .proposer import Drawn, Fed, Int64s, Proposer

if TYPE_CHECKING:
    from hal_core import AdmittedRequest

LEAST_MATCH = 3
"""Tokens that must match for the second proposer's word to count."""
TRUSTED = 0.7
"""Where so many of its drafts held lately, the second is taken in place of the first."""


@runtime_checkable
class Second(Proposer, Extends, Protocol):
    """A proposer that can go on from another's drafts: n-gram and suffix are such."""


class Hybrid:
    """Two proposers as one. ``first_most``: most drafts that the first is asked for; the second goes on from there."""

    def __init__(self, first: Proposer, second: Second, first_most: int) -> None:
        self.first, self.second, self.first_most = first, second, first_most
        self.wants_hidden = first.wants_hidden or second.wants_hidden
        self.draft_cost = float(getattr(first, "draft_cost", 0.0))
        self._trust: dict[int, Acceptance] = {}
        self._said: dict[int, list[int]] = {}

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """Both take the request."""
        self._trust[slot] = Acceptance()
        self.first.enter(slot, request, tokens)
        self.second.enter(slot, request, tokens)

    def observe(self, fed: Fed) -> None:
        """Compare what was delivered with what the second had said, whether that was fed or not."""
        for slot, accepted in zip(fed.slots, fed.accepted, strict=True):
            if len(accepted) and (said := self._said.pop(slot, None)):
                seen = min(len(said), len(accepted))
                right = next((i for i in range(seen) if said[i] != accepted[i]), seen)
                self._trust[slot].note(seen, right)
        self.first.observe(fed)
        self.second.observe(fed)

    def propose(self, room: Mapping[int, int]) -> dict[int, list[int]]:
        """Of each slot the drafts of the second where it is trusted, else those of the first and what it adds."""
        drafts: dict[int, list[int]] = {}
        asked: dict[int, int] = {}
        for slot, most in room.items():
            if most <= 0:
                continue
            guess = self.second.guess(slot, (), most)
            if guess.matched >= LEAST_MATCH:
                self._said[slot] = guess.drafts
                if self._trust[slot].rate(TRUSTED) >= TRUSTED:
                    drafts[slot] = guess.drafts
                    continue
            asked[slot] = min(most, self.first_most)
        for slot, first in self.first.propose(asked).items():
            tokens = first + self._more(slot, first, room[slot] - len(first))
            drafts[slot] = Drawn(tokens, first.weights) if isinstance(first, Drawn) else tokens
        return drafts

    def leave(self, slot: int, *, finished: bool) -> None:
        """Both forget the request."""
        self._trust.pop(slot, None)
        self._said.pop(slot, None)
        self.first.leave(slot, finished=finished)
        self.second.leave(slot, finished=finished)

    def close(self) -> None:
        """Close both."""
        self.first.close()
        self.second.close()

    def _more(self, slot: int, drafts: list[int], most: int) -> list[int]:
        if most <= 0:
            return []
        guess = self.second.guess(slot, drafts, most)
        return guess.drafts if guess.matched >= LEAST_MATCH else []
