"""Log-probabilities of the raw logits."""

from __future__ import annotations

import math

import numpy as np

from .ranking import best_ids
from .rows import Float32s, Int32s, Int64s
from .weights import run_weights, unit_bits


def log_probabilities(
    logits: Float32s, best: Float32s, tokens: Int64s, alternatives: int
) -> tuple[Int64s, Float32s, Int32s]:
    """Return ids and log-probabilities ``[n, alternatives + 1]`` and ranks ``[n]``; ``best``: each row's top logit,
    finite.

    ``log softmax(x) = x - max - log(sum(exp(x - max)))``, computed in float64, rounded to float32 at the end.
    """
    count, vocab = logits.shape
    bits = unit_bits(vocab)
    total = run_weights(logits, best, np.ones(count), bits, np.zeros(count, np.int64)).sum(axis=1)
    # math.log rather than np.log: the same in every version of NumPy.
    logs = np.array([math.log(t) for t in np.ldexp(total.astype(np.float64), -bits).tolist()])
    normalizer = best.astype(np.float64) + logs
    shown = min(alternatives, vocab)
    ids = np.full((count, alternatives + 1), -1, np.int64)
    values = np.zeros((count, alternatives + 1), np.float32)
    ids[:, 0] = tokens
    if shown:
        ids[:, 1 : shown + 1] = best_ids(logits, shown)
    raw = np.take_along_axis(logits, ids[:, : shown + 1], axis=1)
    values[:, : shown + 1] = raw.astype(np.float64) - normalizer[:, None]
    chosen = raw[:, :1]
    before = (logits > chosen) | ((logits == chosen) & (np.arange(vocab) < tokens[:, None]))
    ranks = (1 + np.count_nonzero(before, axis=1)).astype(np.int32)
    return ids, values, ranks
