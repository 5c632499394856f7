"""Drawing one token a row: temperature, then top-k, top-p and min-p, then the inverse of the cumulative distribution.

The distribution is laid out in order of token ids. That order does not depend on the logits. If logits differ in their
last bits, the edges of the intervals move as little, and a draw changes only if u is that near an edge. In order of
probability two nearly equal tokens would swap whole intervals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .ranking import best_ids
from .rows import Float32s, Float64s, Int32s, Int64s
from .weights import RUN, run_weights, unit_bits, weights


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Rows to draw from: final logits ``[n, V]``, each row's largest, the parameters of the distribution, and u in [0,
    1)."""

    logits: Float32s
    best: Float32s
    temperature: Float32s
    top_k: Int32s
    top_p: Float32s
    min_p: Float32s
    u: Float64s

    def only(self, rows: Int64s) -> Draws:
        """Return some of the rows, in ascending order."""
        if len(rows) == len(self.u):
            return self
        return Draws(*(getattr(self, name)[rows] for name in self.__slots__))

    @property
    def least(self) -> Int64s:
        """The smallest weight that min-p keeps: it is relative to the best token, which weighs one unit."""
        unit = unit_bits(self.logits.shape[1])
        least: Int64s = np.ceil(np.ldexp(self.min_p.astype(np.float64), unit)).astype(np.int64)
        return least

    def weigh(self, logits: Float32s) -> Int64s:
        """Return weights of some of each row's logits."""
        return weights(logits, self.best, self.temperature.astype(np.float64), unit_bits(self.logits.shape[1]))

    def run_weights(self, least: Int64s) -> Int64s:
        """Return sums of the weights of each run of tokens, counting those of at least ``least``."""
        bits = unit_bits(self.logits.shape[1])
        return run_weights(self.logits, self.best, self.temperature.astype(np.float64), bits, least)


def draw(draws: Draws) -> tuple[Int64s, Float64s]:
    """Return tokens int64 ``[n]`` and their margins float64 ``[n]``."""
    count, vocab = draws.logits.shape
    tokens, margins = np.full(count, -1, np.int64), np.zeros(count)
    ordered = ((draws.top_k > 0) & (draws.top_k < vocab)) | (draws.top_p < 1.0)
    free = np.flatnonzero(~ordered)
    if len(free):
        tokens[free], margins[free] = _from_all(draws.only(free))
    pending = np.flatnonzero(ordered)
    untruncated = np.flatnonzero(ordered & ((draws.top_k == 0) | (draws.top_k >= vocab)))
    totals = np.zeros(count, np.int64)
    if len(untruncated):
        totals[untruncated] = draws.only(untruncated).run_weights(np.zeros(len(untruncated), np.int64)).sum(axis=1)
    for look in _looks(vocab):
        if not len(pending):
            break
        drawn, margin = _from_best(draws.only(pending), totals[pending], look)
        done = drawn >= 0
        tokens[pending[done]], margins[pending[done]] = drawn[done], margin[done]
        pending = pending[~done]
    return tokens, margins


def kept(draws: Draws) -> Int64s:
    """Return the weights of all tokens ``[n, V]``, 0 for tokens removed by top-k, top-p or min-p; :func:`draw` draws a
    token with its share of them."""
    vocab = draws.logits.shape[1]
    ids = best_ids(draws.logits, vocab)
    sizes = np.take_along_axis(draws.weigh(draws.logits), ids, axis=1)
    running = sizes.cumsum(axis=1)
    limit = np.where(draws.top_k > 0, np.minimum(draws.top_k, vocab), vocab).astype(np.int64)
    total = np.take_along_axis(running, limit[:, None] - 1, axis=1)
    shares = np.ceil(draws.top_p.astype(np.float64)[:, None] * total).astype(np.int64)
    last = np.minimum((running >= np.minimum(shares, total)).argmax(axis=1), limit - 1)
    sizes *= (np.arange(vocab) <= last[:, None]) & (sizes >= draws.least[:, None])
    found = np.empty_like(sizes)
    np.put_along_axis(found, ids, sizes, axis=1)
    return found


def _looks(vocab: int) -> Iterator[int]:
    """Yield how many of the best tokens to consider: 64 nearly always contain top-k and top-p; else 8 times as many."""
    look = 64
    while look < vocab:
        yield look
        look *= 8
    yield vocab


def _from_all(draws: Draws) -> tuple[Int64s, Float64s]:
    """Draw without top-k and top-p: first find the run of tokens that holds u, then the token in the run.

    Sums are exact, so this is the same as one running sum over all tokens.
    """
    count, vocab = draws.logits.shape
    least = draws.least
    sums = draws.run_weights(least)
    running = sums.cumsum(axis=1)
    total = running[:, -1]
    target = _target(draws.u, total)
    run = (running > target[:, None]).argmax(axis=1)
    rows = np.arange(count)
    ids = (run * RUN)[:, None] + np.arange(min(RUN, vocab))
    # Past the vocabulary the last token is repeated; u points before that.
    sizes = draws.weigh(draws.logits[rows[:, None], np.minimum(ids, vocab - 1)])
    sizes *= sizes >= least[:, None]
    before = running[rows, run] - sums[rows, run]
    at, margins = _pick(sizes, before, total, target, draws.u)
    return ids[rows, at], margins


def _from_best(draws: Draws, totals: Int64s, look: int) -> tuple[Int64s, Float64s]:
    """Draw with top-k or top-p from the ``look`` best tokens; a token of -1 means that they are too few.

    ``totals`` are the weights of all tokens, known if top-k keeps all. Top-p keeps the smallest set of best tokens
    whose share of the tokens kept by top-k is at least ``top_p``.
    """
    count, vocab = draws.logits.shape
    rows, least = np.arange(count), draws.least
    ids = best_ids(draws.logits, look)
    sizes = draws.weigh(np.take_along_axis(draws.logits, ids, axis=1))
    running = sizes.cumsum(axis=1)
    limit = np.where(draws.top_k > 0, np.minimum(draws.top_k, vocab), vocab).astype(np.int64)
    total = np.where(limit < vocab, running[rows, np.minimum(limit, look) - 1], totals)
    shares = draws.top_p.astype(np.float64) * total.astype(np.float64)
    enough = running >= np.minimum(np.ceil(shares).astype(np.int64), total)[:, None]
    complete = ((limit <= look) | (limit == vocab)) & enough.any(axis=1)
    sizes *= (np.arange(look) <= enough.argmax(axis=1)[:, None]) & (sizes >= least[:, None])
    order = ids.argsort(axis=1)
    ids, sizes = np.take_along_axis(ids, order, axis=1), np.take_along_axis(sizes, order, axis=1)
    left = sizes.sum(axis=1)
    at, margins = _pick(sizes, np.zeros(count, np.int64), left, _target(draws.u, left), draws.u)
    return np.where(complete, ids[rows, at], -1), margins


def _target(u: Float64s, total: Int64s) -> Int64s:
    """Return the weight, below ``total``, that ``u`` points at."""
    target: Int64s = np.minimum((u * total.astype(np.float64)).astype(np.int64), total - 1)
    return target


def _pick(sizes: Int64s, before: Int64s, total: Int64s, target: Int64s, u: Float64s) -> tuple[Int64s, Float64s]:
    """Return the index whose interval of the cumulative distribution holds ``target``, and u's distance to its nearer
    edge.

    ``before`` is the sum before the first index.
    """
    running = sizes.cumsum(axis=1) + before[:, None]
    places = (running > target[:, None]).argmax(axis=1)
    rows = np.arange(len(places))
    upper = running[rows, places]
    lower = upper - sizes[rows, places]
    margins = np.minimum(u - lower / total, upper / total - u)
    return places, np.maximum(margins, 0.0)
