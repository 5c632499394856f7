"""Drawing one token a row: temperature, then top-k, top-p and min-p, then the inverse of the cumulative distribution.

The distribution is laid out in order of token ids. That order is the same whatever the logits are, so when they differ
in their last bits the edges of the intervals move by as little, and a draw changes only when u lies that near an edge;
in order of probability two tokens nearly equal would swap whole intervals.
"""

from __future__ import annotations

import numpy as np

from .ranking import best_ids
from .rows import Bools, Float32s, Float64s, Int32s, Int64s
from .weights import unit_bits, weights

_FIRST_LOOK = 64  # tokens that hold top-k and top-p nearly always; where they do not, 8 times as many, and so on
_RUN = 64  # places in a run of the cumulative distribution


def draw(
    logits: Float32s,
    best: Float32s,
    temperature: Float32s,
    top_k: Int32s,
    top_p: Float32s,
    min_p: Float32s,
    u: Float64s,
) -> tuple[Int64s, Float64s]:
    """Tokens int64 ``[n]`` and their margins float64 ``[n]``, for ``u`` in [0, 1); ``best`` is each row's top logit."""
    count, vocab = logits.shape
    weighed = weights(logits, best, temperature.astype(np.float64))
    # Relative to the best token's weight, which is one unit.
    least = np.ceil(np.ldexp(min_p.astype(np.float64), unit_bits(vocab))).astype(np.int64)
    tokens, margins = np.empty(count, np.int64), np.empty(count)
    ordered = ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0)
    free = np.flatnonzero(~ordered)
    if len(free):
        kept = weighed if len(free) == count else weighed[free]
        if min_p[free].any():
            kept = np.where(kept >= least[free, None], kept, 0)
        tokens[free], margins[free] = _pick(kept, u[free])
    pending, look = np.flatnonzero(ordered), _FIRST_LOOK
    while len(pending):
        look = min(look, vocab)
        part = slice(None) if len(pending) == count else pending
        ids, kept, complete = _truncate(
            logits[part], weighed[part], top_k[pending], top_p[pending], least[pending], look
        )
        done = pending[complete]
        places, margins[done] = _pick(kept[complete], u[done])
        tokens[done] = ids[complete, places]
        pending, look = pending[~complete], look * 8
    return tokens, margins


def _truncate(
    logits: Float32s, weighed: Int64s, top_k: Int32s, top_p: Float32s, least: Int64s, look: int
) -> tuple[Int64s, Int64s, Bools]:
    """Of the ``look`` best tokens: ids in ascending order, weights (0: cut off), and which rows need no others.

    Top-p keeps the smallest set of best tokens whose share of what top-k left is at least ``top_p``.
    """
    vocab = logits.shape[1]
    ids = best_ids(logits, look)
    sizes = np.take_along_axis(weighed, ids, axis=1)
    running = sizes.cumsum(axis=1)
    limit = np.where(top_k > 0, np.minimum(top_k, vocab), vocab).astype(np.int64)
    among = running[np.arange(len(ids)), np.minimum(limit, look) - 1]
    total = np.where(limit < vocab, among, weighed.sum(axis=1))
    needed = np.minimum(np.ceil(top_p.astype(np.float64) * total.astype(np.float64)).astype(np.int64), total)
    enough = running >= needed[:, None]
    complete: Bools = ((limit <= look) | (limit == vocab)) & enough.any(axis=1)
    kept = (np.arange(look) <= enough.argmax(axis=1)[:, None]) & (sizes >= least[:, None])
    order = ids.argsort(axis=1)
    return (
        np.take_along_axis(ids, order, axis=1),
        np.take_along_axis(np.where(kept, sizes, 0), order, axis=1),
        complete,
    )


def _pick(sizes: Int64s, u: Float64s) -> tuple[Int64s, Float64s]:
    """The place whose interval of the cumulative distribution holds ``u``, and u's distance to its nearer edge.

    First the run of places that holds it, then the place in the run: sums are exact, so it is the same as one
    running sum over all.
    """
    width = sizes.shape[1]
    row, starts = np.arange(len(sizes)), np.arange(0, width, _RUN)
    sums = np.add.reduceat(sizes, starts, axis=1)
    running = sums.cumsum(axis=1)
    total = running[:, -1]
    target = np.minimum((u * total.astype(np.float64)).astype(np.int64), total - 1)[:, None]
    run = (running > target).argmax(axis=1)
    places = starts[run][:, None] + np.arange(min(_RUN, width))
    inside = np.where(places < width, sizes[row[:, None], np.minimum(places, width - 1)], 0)
    within = inside.cumsum(axis=1) + (running[row, run] - sums[row, run])[:, None]
    at = (within > target).argmax(axis=1)
    upper = within[row, at]
    lower = upper - inside[row, at]
    margins = np.minimum(u - lower / total, upper / total - u)
    return places[row, at], np.maximum(margins, 0.0)
