"""The base of proposers on the host: a copy of each request's tokens, updated with delivered ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from hal_core import InvalidValue

from .proposer import Fed, Int64s, Proposer

if TYPE_CHECKING:
    from hal_core import AdmittedRequest


class Guess(NamedTuple):
    """Drafts, the length of their match, and their expected acceptance.

    - ``drafts``: token ids in their order.
    - ``matched``: how many of the request's last tokens occurred before the place of the drafts; 0: no drafts.
    - ``score``: the sum, over the drafts, of the share of such places with that continuation.
    """

    drafts: list[int]
    matched: int = 0
    score: float = 0.0


class Text(Protocol):
    """The tokens of one request, with a search for earlier occurrences."""

    def append(self, tokens: Sequence[int]) -> None:
        """Append new tokens of the request."""

    def guess(self, drafts: Sequence[int], most: int) -> Guess:
        """Return at most ``most`` tokens (at least 1) that may follow the request's own and ``drafts``."""

    def tokens(self) -> Int64s:
        """Return all of them, int64 ``[n]``."""


@runtime_checkable
class Extends(Proposer, Protocol):
    """A proposer that can continue another proposer's drafts: n-gram and suffix can."""

    def guess(self, slot: int, drafts: Sequence[int], most: int) -> Guess:
        """Return at most ``most`` tokens (at least 1) that may follow a slot's known tokens and ``drafts``."""


T = TypeVar("T", bound=Text)


class HostProposer(ABC, Generic[T]):
    """A proposer that uses only a request's tokens. Its copy of them equals ``token_ids`` on the device as of the last
    observed step. A step's tokens are added to a text when it is next queried, as many texts rarely are."""

    wants_hidden = False

    def __init__(self) -> None:
        self._texts: dict[int, T] = {}
        self._waiting: dict[int, list[int]] = {}

    @abstractmethod
    def open(self, tokens: Int64s) -> T:
        """Return the text of a request that enters with ``tokens``."""

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """Copy the tokens of a request. Raises :class:`InvalidValue` for an occupied slot."""
        if slot in self._texts:
            raise InvalidValue(
                f"slot {slot} still has the tokens of another request",
                cure="call leave for the request that was in the slot, then enter",
                argument="slot",
            )
        self._texts[slot], self._waiting[slot] = self.open(tokens), []

    def observe(self, fed: Fed) -> None:
        """Append the accepted tokens."""
        waiting = self._waiting
        for slot, accepted in zip(fed.slots, fed.accepted, strict=True):
            waiting[slot] += accepted.tolist()

    def propose(self, room: Mapping[int, int]) -> dict[int, list[int]]:
        """Return drafts for each slot with room and a match."""
        drafts = {slot: self.guess(slot, (), most).drafts for slot, most in room.items() if most > 0}
        return {slot: tokens for slot, tokens in drafts.items() if tokens}

    def guess(self, slot: int, drafts: Sequence[int], most: int) -> Guess:
        """Return at most ``most`` tokens (at least 1) that may follow a slot's known tokens and ``drafts``."""
        return self.text(slot).guess(drafts, most)

    def text(self, slot: int) -> T:
        """Return the text of the request in a slot, with all its tokens."""
        text = self._texts[slot]
        if waiting := self._waiting[slot]:
            text.append(waiting)
            self._waiting[slot] = []
        return text

    def tokens(self, slot: int) -> Int64s:
        """Return the known tokens of the request in a slot, int64 ``[n]``: a copy."""
        return np.concatenate([self._texts[slot].tokens(), np.array(self._waiting[slot], np.int64)])

    def leave(self, slot: int, *, finished: bool) -> None:
        """Forget the slot's tokens."""
        self._texts.pop(slot, None)
        self._waiting.pop(slot, None)

    def close(self) -> None:
        """Forget all."""
        self._texts.clear()
        self._waiting.clear()
