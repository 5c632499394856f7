"""Uniform numbers that depend only on a key and a counter: Philox4x32-10.

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011. It has no
state, so a preempted, resumed, moved or re-batched request draws the same numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .rows import Float64s, Int64s

Words = np.ndarray[Any, np.dtype[np.uint64]]

_ROUNDS = 10
_LOW = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([[0xD251_1F53], [0xCD9E_8D57]], np.uint64)
_BUMPS = np.array([[0x9E37_79B9], [0xBB67_AE85]], np.uint64) * np.arange(_ROUNDS, dtype=np.uint64)[:, None, None]


def philox4x32(counter: Words, key: Words) -> Words:
    """Apply ten rounds to ``counter`` ``[4, n]`` under ``key`` ``[2, n]``, each a 32-bit word held in uint64."""
    keys = (key + _BUMPS) & _LOW
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys:
        product = even * _MULTIPLIERS
        even, odd = (product[::-1] >> _HALF) ^ odd ^ round_key, product[::-1] & _LOW
    mixed = np.empty_like(counter)
    mixed[0::2], mixed[1::2] = even, odd
    return mixed


TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)
"""Independent streams of numbers: for drawing tokens; and, if drafts are accepted by rejection, for drawing drafts, for
accepting them, and for drawing their replacements."""


def uniform(seed: Int64s, position: Int64s, stream: int = TARGET) -> Float64s:
    """Return numbers in [0, 1) of 53 bits, float64 ``[n]``: the key is ``seed``, the counter is (``position``,
    ``stream``).

    The first two words make one number as in the 53-bit generator of Matsumoto and Nishimura (mt19937ar.c).
    """
    count = len(seed)
    counter = np.zeros((4, count), np.uint64)
    key = np.empty((2, count), np.uint64)
    for words, numbers in ((counter, position), (key, seed)):
        bits = numbers.astype(np.int64).view(np.uint64)
        words[0], words[1] = bits & _LOW, bits >> _HALF
    counter[2] = stream
    mixed = philox4x32(counter, key)
    high, low = mixed[0] >> np.uint64(5), mixed[1] >> np.uint64(6)
    bits = (high << np.uint64(26)) | low
    drawn: Float64s = bits.astype(np.float64) * 2.0**-53
    return drawn
