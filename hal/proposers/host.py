"""What proposers on the host have in common: a copy of each request's tokens, kept up from what was delivered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from hal_core import InvalidValue

from .proposer import Fed, Int64s

if TYPE_CHECKING:
    from hal_core import AdmittedRequest


class Guess(NamedTuple):
    """Drafts, what they follow, and how many of them should be accepted.

    - ``drafts``: token ids in their order.
    - ``matched``: the last so many tokens of the request stood at the place that the drafts come from; 0: no drafts.
    - ``score``: the sum, over the drafts, of the share of such places at which the request went on so.
    """

    drafts: list[int]
    matched: int = 0
    score: float = 0.0


class Text(Protocol):
    """The tokens of one request, and where in them something stood before."""

    def append(self, tokens: Sequence[int]) -> None:
        """Take over tokens that the request was given."""

    def guess(self, drafts: Sequence[int], most: int) -> Guess:
        """At most ``most`` tokens (at least 1) that may follow the request's own and ``drafts``."""

    def tokens(self) -> Int64s:
        """All of them, int64 ``[n]``."""


class Extends(Protocol):
    """What can continue another proposer's drafts."""

    def guess(self, slot: int, drafts: Sequence[int], most: int) -> Guess:
        """At most ``most`` tokens (at least 1) that may follow what is known of a slot and ``drafts``."""


T = TypeVar("T", bound=Text)


class HostProposer(ABC, Generic[T]):
    """A proposer that looks at a request's tokens alone. Its copy of them equals ``token_ids`` on the device as of the
    last step that was observed. What a step gave is entered into a text when that is asked, as many are seldom."""

    wants_hidden = False

    def __init__(self) -> None:
        self._texts: dict[int, T] = {}
        self._waiting: dict[int, list[int]] = {}

    @abstractmethod
    def open(self, tokens: Int64s) -> T:
        """The text of a request that enters with ``tokens``."""

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """Copy the tokens of a request. Raises :class:`InvalidValue` for a slot that nobody left."""
        if slot in self._texts:
            raise InvalidValue(
                f"slot {slot} still has the tokens of another request",
                cure="call leave for the request that was in the slot, then enter",
                argument="slot",
            )
        self._texts[slot], self._waiting[slot] = self.open(tokens), []

    def observe(self, fed: Fed) -> None:
        """Take over what was accepted."""
        waiting = self._waiting
        for slot, accepted in zip(fed.slots, fed.accepted, strict=True):
            waiting[slot] += accepted.tolist()

    def propose(self, room: Mapping[int, int]) -> dict[int, list[int]]:
        """Drafts for each slot that has room and whose tokens say something."""
        drafts = {slot: self.guess(slot, (), most).drafts for slot, most in room.items() if most > 0}
        return {slot: tokens for slot, tokens in drafts.items() if tokens}

    def guess(self, slot: int, drafts: Sequence[int], most: int) -> Guess:
        """At most ``most`` tokens (at least 1) that may follow what is known of a slot and ``drafts``."""
        return self.text(slot).guess(drafts, most)

    def text(self, slot: int) -> T:
        """The text of the request in a slot, with all that it was given."""
        text = self._texts[slot]
        if waiting := self._waiting[slot]:
            text.append(waiting)
            self._waiting[slot] = []
        return text

    def tokens(self, slot: int) -> Int64s:
        """What is known of the request in a slot, int64 ``[n]``: a copy."""
        return np.concatenate([self._texts[slot].tokens(), np.array(self._waiting[slot], np.int64)])

    def leave(self, slot: int, *, finished: bool) -> None:
        """Forget the slot's tokens."""
        self._texts.pop(slot, None)
        self._waiting.pop(slot, None)

    def close(self) -> None:
        """Forget all."""
        self._texts.clear()
        self._waiting.clear()
