"""Suffix: a request continues as after the longest earlier occurrence of its end, in itself or in other outputs.

Of all such places, the most frequent continuation is drafted, as long as enough of them agree (Oliaro et al. 2024, with
sorted contexts in place of trees). Outputs of finished requests are kept up to a number of tokens, and the oldest are
dropped first. This happens when a request leaves its slot, outside any proposal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .contexts import DEPTH, Places, Words, vote, words_of
from .host import Guess, HostProposer
from .proposer import Int64s, Setup

if TYPE_CHECKING:
    from hal_core import AdmittedRequest

SHARED_TOKENS = 131_072
"""Most tokens of outputs that are kept."""
LEAST_SHARED_MATCH = 2
"""Tokens of other outputs that must match: any single token occurs somewhere."""
LONG_MATCH = 8
"""With so many tokens matched in its own text, a request does not search other outputs."""
_ROOM = 256


class OwnText:
    """The tokens of one request, and the places in them that have a continuation."""

    __slots__ = ("_head", "_places", "_stop")

    def __init__(self, tokens: Int64s) -> None:
        self._lay(words_of(tokens))
        self._places.enter_all(self._head + 1, self._stop)

    def append(self, tokens: Sequence[int]) -> None:
        """Append new tokens of the request; the places before them have a continuation now."""
        if len(tokens) > self._head:
            former, moved = self._places.order, self._head
            self._lay(self._places.words[self._head : self._stop])
            moved = self._head - moved
            self._places.order.extend([place + moved for place in former])
        for token in tokens:
            self._places.enter(self._head)
            self._head -= 1
            self._places.put(self._head, token)

    def guess(self, drafts: Sequence[int], most: int) -> Guess:
        """Continue as most places of the longest match of the tokens' and ``drafts``' end did."""
        places, matched = self._places.find(self.context(drafts))
        if not matched:
            return Guess([])
        most = min(most, DEPTH)
        return vote([self._following(place, drafts, most) for place in sorted(places)], matched, most)

    def _following(self, place: int, drafts: Sequence[int], most: int) -> Sequence[int]:
        """Return the words after a place, the last one first: tokens, drafts, and the same again from the place on."""
        count = place - self._head
        if count >= most:
            return self._places.before(place, most)
        words = self._places.before(place, count)[::-1] + tuple(token + 1 for token in drafts)
        return (words * (most // len(words) + 1))[most - 1 :: -1]

    def context(self, drafts: Sequence[int]) -> bytearray:
        """Return the last tokens, followed by ``drafts``, as a search key."""
        return self._places.context(drafts, self._head, self._stop)

    def tokens(self) -> Int64s:
        """Return all of them, int64 ``[n]``."""
        tokens: Int64s = self._places.words[self._head : self._stop][::-1].astype(np.int64) - 1
        return tokens

    def _lay(self, words: Words) -> None:
        """Put the text at the end of new storage, with room for half as much again before it."""
        self._head = len(words) // 2 + _ROOM
        self._stop = self._head + len(words)
        self._places = Places(self._stop + DEPTH)
        self._places.words[self._head : self._stop] = words


class Shared:
    """Outputs of finished requests, up to a number of tokens; the oldest request is dropped first.

    ``tokens``: their number, :data:`DEPTH` more counted for each request; ``most``: the limit.
    """

    def __init__(self, most: int = SHARED_TOKENS) -> None:
        self.most, self.tokens = most, 0
        self._held: deque[tuple[int, int]] = deque()
        self._places = Places(2 * most + 1 + DEPTH)  # a ring, filled downwards; so large that an output is one piece
        self._head = len(self._places.words)

    def __len__(self) -> int:
        """Return the number of requests with outputs."""
        return len(self._held)

    def enter(self, output: Int64s) -> None:
        """Add a request's output, as much of its end as fits; skip one that is too short to continue."""
        output = output[-max(self.most - DEPTH, 0) :]
        size = len(output) + DEPTH
        if len(output) < 2 or size > self.most:
            return
        while self.tokens + size > self.most:
            self._evict()
        words = self._places.words
        first = (self._head if self._head - size > DEPTH else len(words)) - size
        stop = first + len(output)
        words[first - 1 : first + size] = 0
        words[first:stop] = words_of(output)
        self._places.enter_all(first + 1, stop)
        self._held.append((first, stop))
        self._head, self.tokens = first, self.tokens + size

    def guess(self, context: bytearray, most: int) -> Guess:
        """Continue as most outputs with the longest match of a text's end did."""
        places, matched = self._places.find(context)
        if matched < LEAST_SHARED_MATCH:
            return Guess([])
        head, size, most = self._head, len(self._places.words), min(most, DEPTH)
        latest_first = sorted(places, key=lambda place: (place - head) % size)
        return vote([self._places.before(place, most) for place in latest_first], matched, most)

    def _evict(self) -> None:
        first, stop = self._held.popleft()
        self._places.drop(first, stop)
        self.tokens -= stop - first + DEPTH


class Suffix(HostProposer[OwnText]):
    """The suffix proposer. ``shared_tokens``: most tokens of finished requests' outputs that are kept; 0: none."""

    def __init__(self, setup: Setup, shared_tokens: int = SHARED_TOKENS) -> None:
        super().__init__()
        self.shared = Shared(shared_tokens)
        self._prompts: dict[int, int] = {}

    def open(self, tokens: Int64s) -> OwnText:
        """Return the text of a request that enters with ``tokens``."""
        return OwnText(tokens)

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """Copy the tokens of a request. Raises :class:`InvalidValue` for an occupied slot."""
        super().enter(slot, request, tokens)
        self._prompts[slot] = request.prompt_len

    def guess(self, slot: int, drafts: Sequence[int], most: int) -> Guess:
        """Return the guess with the longer match, from the request's own text or the shared ones."""
        text = self.text(slot)
        own = text.guess(drafts, most)
        if own.matched >= LONG_MATCH or not len(self.shared):
            return own
        shared = self.shared.guess(text.context(drafts), most)
        return shared if (shared.matched, shared.score) > (own.matched, own.score) else own

    def leave(self, slot: int, *, finished: bool) -> None:
        """Forget the slot's tokens; share the output of a finished request."""
        prompt = self._prompts.pop(slot, 0)
        if finished and slot in self._texts:
            self.shared.enter(self.tokens(slot)[prompt:])
        super().leave(slot, finished=finished)

    def close(self) -> None:
        """Forget all."""
        super().close()
        self.shared = Shared(0)
