"""Hybrid: two proposers. The second, a nearly free look-up of tokens, is used if it does better.

If the end of a request has a long earlier occurrence, and the second's recent predictions were right, its drafts are
used without the first. Otherwise the first drafts, and the second continues its drafts where they match.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .adaptive import Acceptance
from .host import Extends
from .proposer import Drawn, Fed, Int64s, Proposer

if TYPE_CHECKING:
    from hal_core import AdmittedRequest

LEAST_MATCH = 3
"""Tokens that must match for the second proposer's prediction to count."""
TRUSTED = 0.7
"""If this share of its drafts was right lately, the second replaces the first."""


class Hybrid:
    """Two proposers as one. ``first_most``: most drafts of the first; the second continues them."""

    def __init__(self, first: Proposer, second: Extends, first_most: int) -> None:
        self.first, self.second, self.first_most = first, second, first_most
        self.wants_hidden = first.wants_hidden or second.wants_hidden
        self.draft_cost = float(getattr(first, "draft_cost", 0.0))
        self._trust: dict[int, Acceptance] = {}
        self._predicted: dict[int, list[int]] = {}

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """Give the request to both."""
        self._trust[slot] = Acceptance()
        self.first.enter(slot, request, tokens)
        self.second.enter(slot, request, tokens)

    def observe(self, fed: Fed) -> None:
        """Compare delivered tokens with the second's predictions, fed or not."""
        for slot, accepted in zip(fed.slots, fed.accepted, strict=True):
            if len(accepted) and (predicted := self._predicted.pop(slot, None)):
                seen = min(len(predicted), len(accepted))
                right = next((i for i in range(seen) if predicted[i] != accepted[i]), seen)
                self._trust[slot].note(seen, right)
        self.first.observe(fed)
        self.second.observe(fed)

    def propose(self, room: Mapping[int, int]) -> dict[int, list[int]]:
        """Return for each slot the drafts of the trusted second, else those of the first and the second's
        continuation."""
        drafts: dict[int, list[int]] = {}
        limits: dict[int, int] = {}
        for slot, most in room.items():
            if most <= 0:
                continue
            guess = self.second.guess(slot, (), most)
            if guess.matched >= LEAST_MATCH:
                self._predicted[slot] = guess.drafts
                if self._trust[slot].rate(TRUSTED) >= TRUSTED:
                    drafts[slot] = guess.drafts
                    continue
            limits[slot] = min(most, self.first_most)
        for slot, first in self.first.propose(limits).items():
            tokens = first + self._more(slot, first, room[slot] - len(first))
            drafts[slot] = Drawn(tokens, first.weights) if isinstance(first, Drawn) else tokens
        return drafts

    def leave(self, slot: int, *, finished: bool) -> None:
        """Let both forget the request."""
        self._trust.pop(slot, None)
        self._predicted.pop(slot, None)
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
