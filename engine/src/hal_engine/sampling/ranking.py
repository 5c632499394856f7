"""The best tokens of each row, in descending order of logits, equal logits by ascending id."""

from __future__ import annotations

import numpy as np

from .rows import Float32s, Int64s

_ID_BITS = 0xFFFF_FFFF
_BLOCK = 8192  # numbers processed at a time: they stay in the cache


def best_ids(logits: Float32s, count: int) -> Int64s:
    """Return ids of the ``count`` best tokens of each row, int64 ``[n, count]``; no NaN, ``count`` at most V.

    Logit and id form one 64-bit key, so keys are distinct, and a partial selection, which breaks ties arbitrarily, has
    one possible result.
    """
    rows, vocab = logits.shape
    ids = np.empty((rows, count), np.int64)
    last = np.arange(_ID_BITS, _ID_BITS - vocab, -1, dtype=np.int64)
    group = max(1, _BLOCK // vocab)
    for start in range(0, rows, group):
        part = logits[start : start + group] + np.float32(0.0)  # makes -0 equal to 0
        bits = part.view(np.int32)
        bits ^= (bits >> 31) & np.int32(0x7FFF_FFFF)  # ordered as the floats are
        keys = bits.astype(np.int64)
        keys <<= 32
        keys |= last
        if count < vocab:
            keys.partition(vocab - count, axis=1)
            keys = keys[:, vocab - count :]
        keys.sort(axis=1)
        ids[start : start + group] = _ID_BITS - (keys[:, ::-1] & _ID_BITS)
    return ids
