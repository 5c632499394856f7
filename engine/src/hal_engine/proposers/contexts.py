"""Earlier occurrences of a text's end: places sorted by the tokens before them, the last token first.

That is the suffix array of the reversed text, cut at :data:`DEPTH` tokens. A place's sort key is known when its token
arrives, so a text grows by one insertion per token. The places of the longest match are adjacent, around where the text
itself would be inserted. A token takes 8 bytes (docs/decisions/24).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cache
from struct import Struct
from typing import Any

import numpy as np

from .host import Guess
from .proposer import Int64s

DEPTH = 24
"""Most tokens that are compared."""
MOST_PLACES = 16
"""Most places whose continuation is read."""
LEAST_SHARE = 0.1
"""Drafts end when the share of places with that continuation falls below it."""
REACH = 4
"""A match of n tokens gives at most this many times n drafts."""
WORD = 4
Words = np.ndarray[Any, np.dtype[np.uint32]]


class Places:
    """Reversed texts, as big-endian words of token id + 1, and places in them in sorted order.

    Bytes compare as the tokens do. :data:`DEPTH` words of 0 follow each text, after its first token.
    """

    __slots__ = ("order", "text", "words")

    def __init__(self, size: int) -> None:
        self.text = bytearray(WORD * size)
        self.words: Words = np.frombuffer(self.text, ">u4")
        self.order = array("i")

    def before(self, place: int, count: int) -> tuple[int, ...]:
        """Return the words before a place, which are those of the tokens that followed it."""
        return _words(count).unpack_from(self.text, WORD * (place - count))

    def put(self, place: int, token: int) -> None:
        """Put a token at a place."""
        self.text[WORD * place : WORD * place + WORD] = (token + 1).to_bytes(WORD)

    def context(self, drafts: Sequence[int], first: int, stop: int) -> bytearray:
        """Return the last tokens of a text from ``first`` to ``stop``, followed by ``drafts``, as a sort key."""
        known = self.text[WORD * first : WORD * min(first + DEPTH, stop)]
        return (bytearray(words_of(drafts[-DEPTH:]).tobytes()) + known)[: WORD * DEPTH] if drafts else known

    def find(self, context: bytearray) -> tuple[array[int], int]:
        """Return the places of the longest match of a text's end (a sample of the middle ones if there are many), and
        its length in tokens."""
        text, order, size = self.text, self.order, len(context)

        def key(place: int) -> bytearray:
            return text[WORD * place : WORD * place + size]

        at = bisect_left(order, context, key=key)
        lengths = [common(key(place), context) for place in order[max(at - 1, 0) : at + 1]]
        length = max(lengths, default=0)
        if not length:
            return array("i"), 0
        size, context = WORD * length, context[: WORD * length]
        low = bisect_left(order, context, max(at - MOST_PLACES // 2, 0), at, key=key)
        high = bisect_right(order, context, at, min(at + MOST_PLACES // 2, len(order)), key=key)
        return order[low:high], length

    def enter(self, place: int) -> None:
        """Insert one place."""
        self.order.insert(self._point(place, 0), place)

    def enter_all(self, first: int, stop: int) -> None:
        """Insert the places from ``first`` to ``stop`` at once."""
        windows = self.words[np.arange(first, stop)[:, None] + np.arange(DEPTH)]
        places = (first + np.argsort(windows.view(f"S{WORD * DEPTH}")[:, 0], kind="stable")).astype(np.int32)
        if not self.order:
            self.order = array("i", places.tobytes())
            return
        points, point = [], 0
        for place in places.tolist():
            point = self._point(place, point)
            points.append(point)
        there = np.frombuffer(self.order, np.int32)
        self.order = array("i", np.insert(there, points, places).tobytes())

    def _point(self, place: int, low: int) -> int:
        """Return a place's index in the order, which is not before ``low``."""
        text = self.text

        def key(place: int) -> bytearray:
            return text[WORD * place : WORD * (place + DEPTH)]

        return bisect_left(self.order, key(place), low, key=key)

    def drop(self, first: int, stop: int) -> None:
        """Remove the places from ``first`` to ``stop``."""
        there = np.frombuffer(self.order, np.int32)
        self.order = array("i", there[(there < first) | (there >= stop)].tobytes())


@cache
def _words(count: int) -> Struct:
    return Struct(f">{count}I")


def words_of(tokens: Sequence[int] | Int64s) -> Words:
    """Return tokens in reverse, as :class:`Places` stores them."""
    words: Words = (np.asarray(tokens, np.int64)[::-1] + 1).astype(">u4")
    return words


def common(one: bytearray, other: bytearray) -> int:
    """Return how many tokens both have in common at the beginning."""
    size = min(len(one), len(other))
    apart = int.from_bytes(one[:size]) ^ int.from_bytes(other[:size])
    return (size - (apart.bit_length() + 7) // 8) // WORD


def vote(places: Sequence[Sequence[int]], matched: int, most: int) -> Guess:
    """Continue as most of the places did, token by token, counting those that agree so far.

    ``places``: the continuation of each, in words, the last one first and 0 after the end. If two tokens are equally
    frequent, the one at the first of these places is taken.
    """
    drafts: list[int] = []
    score, share, most = 0.0, 1.0, min(most, REACH * matched)
    while len(drafts) < most:
        first, at = places[0], -1 - len(drafts)
        if len(places) == 1 or all(words == first for words in places):  # usually, at the latest after a token
            words = first[at : -most - 1 : -1]
            words = words[: words.index(0)] if 0 in words else words
            drafts += [word - 1 for word in words]
            score += share * len(words)
            break
        by_word: dict[int, list[Sequence[int]]] = {}
        for words in places:
            by_word.setdefault(words[at], []).append(words)
        by_word.pop(0, None)
        if not by_word:
            break
        word = max(by_word, key=lambda word: len(by_word[word]))
        share *= len(by_word[word]) / len(places)
        if share < LEAST_SHARE:
            break
        places = by_word[word]
        drafts.append(word - 1)
        score += share
    return Guess(drafts, matched, score) if drafts else Guess([])
