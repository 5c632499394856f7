"""n-gram: a request continues as after the last occurrence of its last three tokens (else two, else one).

The copy continues into its own drafts, so that periodic text is continued as long as there is room (prompt look-up;
Saxena 2023). The search time does not depend on the text's length: the places of a request's initial tokens are sorted
once, at 36 bytes a token, and each later token is added to three dictionaries.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from .host import Guess, HostProposer
from .proposer import Int64s, Setup

LONGEST = 3
"""Most tokens that are looked up."""
_BITS = 32


class NGrams:
    """The tokens of a request, and the last end of each n-gram that has a continuation."""

    __slots__ = ("_earlier", "_later", "_numbers", "_tokens")

    def __init__(self, tokens: Int64s) -> None:
        self._tokens = array("i", np.asarray(tokens, np.int32).tobytes())
        self._earlier = _Sorted(np.asarray(tokens[:-1], np.int64))
        self._numbers = self._earlier.follow([0], self._tokens[-LONGEST:])
        self._later: tuple[dict[int, int], ...] = tuple({} for _ in range(LONGEST))

    def append(self, tokens: Sequence[int]) -> None:
        """Append new tokens of the request; the n-grams before them have a continuation now."""
        known, numbers = self._tokens, self._numbers
        self._numbers = self._earlier.follow(numbers if len(tokens) < LONGEST else [0], tokens[-LONGEST:])
        for token in tokens:
            end, key = len(known) - 1, 0
            for n, ends in enumerate(self._later[: len(known)]):
                key |= known[end - n] << _BITS * n
                ends[key] = end
            known.append(token)

    def guess(self, drafts: Sequence[int], most: int) -> Guess:
        """Copy the tokens after the last occurrence of the longest n-gram at the end of the tokens and ``drafts``."""
        end, n = self._find(drafts)
        if not n:
            return Guess([])
        known = self._tokens
        found = known[end + 1 : end + 1 + most].tolist()
        found += drafts[: most - len(found)]
        period = len(known) + len(drafts) - 1 - end
        while len(found) < most:
            found.append(found[-period])
        return Guess(found, n, float(most))

    def tokens(self) -> Int64s:
        """Return all of them, int64 ``[n]``."""
        return np.array(self._tokens, np.int64)

    def _find(self, drafts: Sequence[int]) -> tuple[int, int]:
        """Return the last end of the longest n-gram at the end of the tokens and ``drafts``, and its n; 0 if none
        occurred."""
        tail: Sequence[int] = self._tokens[-LONGEST:]
        numbers = self._numbers
        if drafts:
            tail, numbers = [*tail, *drafts][-LONGEST:], self._earlier.follow(numbers, drafts)
        keys, key = [], 0
        for n, token in enumerate(reversed(tail)):
            key |= token << _BITS * n
            keys.append(key)
        for n in range(len(keys), 0, -1):
            end = self._later[n - 1].get(keys[n - 1], -1)
            if end < 0 and n < len(numbers):
                end = self._earlier.ends[n - 1][numbers[n]]
            if end >= 0:
                return end, n
        return -1, 0


class _Sorted:
    """The last end of each n-gram of some tokens: an n-gram is the number of the one before it, and a token.

    ``ends``: by n less one and the number of an n-gram, its last end.
    """

    __slots__ = ("_keys", "ends")

    def __init__(self, tokens: Int64s) -> None:
        self._keys: list[array[int]] = []
        self.ends: list[array[int]] = []
        numbers = np.zeros(len(tokens) + 1, np.int64)  # at first all tokens follow the one n-gram of no tokens
        for n in range(1, min(LONGEST, len(tokens)) + 1):
            keys = numbers[: len(numbers) - 1] << _BITS | tokens[n - 1 :]
            keys, latest, backward = np.unique(keys[::-1], return_index=True, return_inverse=True)
            numbers = backward[::-1]
            self._keys.append(array("q", keys.tobytes()))
            self.ends.append(array("i", (len(tokens) - 1 - latest).astype(np.int32).tobytes()))

    def follow(self, numbers: list[int], tokens: Sequence[int]) -> list[int]:
        """Return, by n from 0, the numbers of the n-grams at the end of a text that occur here, when ``tokens`` are
        appended to one with those of ``numbers`` at its end."""
        for token in tokens:
            found = [0]
            for number, keys in zip(numbers, self._keys, strict=False):
                key = number << _BITS | token
                at = bisect_left(keys, key)
                if at == len(keys) or keys[at] != key:
                    break  # longer ones do not occur either
                found.append(at)
            numbers = found
        return numbers


class NGram(HostProposer[NGrams]):
    """The n-gram proposer."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()

    def open(self, tokens: Int64s) -> NGrams:
        """Return the text of a request that enters with ``tokens``."""
        return NGrams(tokens)
