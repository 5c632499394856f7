"""Rejection sampling: accepted drafts keep the target's distribution, but not the draws of plain decoding.

Leviathan, Kalman and Matias 2023, section 2.3: a draft ``x`` that was drawn with probability ``q(x)`` is accepted with
probability ``min(1, p(x) / q(x))``; else the token is drawn from the excess of ``p`` over ``q``. A draft without a
known distribution counts as certain: it is accepted with ``p(x)``, and else another token is drawn by ``p``. That keeps
the distribution too, for any source of drafts except the numbers that judge them. So drafts, acceptance and
replacements have their own streams of numbers (``philox``). At temperature 0, without draws, this equals comparing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .adjust import adjust
from .drawing import draw, kept
from .philox import ACCEPT, DRAFT, RESIDUAL, uniform
from .rows import Float32s, Float64s, Int64s, Sampled, SamplingRows
from .sampler import reported, sample, shaped

Weights = Int64s | None
"""The distribution of a draft: the weight of each token of the vocabulary, int64 ``[V]``; None: it is certain."""


def draw_drafts(logits: Float32s, rows: SamplingRows) -> tuple[Int64s, Int64s]:
    """Return a draft for each row, int64 ``[n]``, and the weights it was drawn from, int64 ``[n, V]``. Rows of
    temperature 0 take the best token, which alone has weight."""
    final = adjust(logits, rows)
    every = np.arange(len(final))
    tokens = final.argmax(axis=1).astype(np.int64, copy=False)
    draws = shaped(final, final[every, tokens], _warm(rows), every, DRAFT)
    weights, drawn = kept(draws), (rows.temperature > 0.0) & (rows.top_k != 1)
    tokens = np.where(drawn, draw(draws)[0], tokens)
    certain = np.zeros_like(weights)
    certain[every, tokens] = 1
    return tokens, np.where(drawn[:, None], weights, certain)


def sample_by_rejection(
    logits: Float32s, rows: SamplingRows, drafts: Int64s, weights: Sequence[Weights], *, logprobs: int | None
) -> Sampled:
    """Sample as :func:`hal_engine.sampling.sample`, but accept or replace the drafts in ``drafts`` int64 ``[n]`` (-1:
    none).

    A row's token equals its draft only if that is accepted. ``margins`` of such rows are 0, as the nearness of the
    decision is unknown.
    """
    plain = sample(logits, rows, logprobs=None)
    judged = (drafts >= 0) & (plain.tokens >= 0) & (rows.temperature > 0.0) & (rows.top_k != 1)
    at = np.flatnonzero(judged)
    tokens, margins = plain.tokens.copy(), plain.margins.copy()
    if len(at):
        final = adjust(logits, rows)
        best = final.max(axis=1)
        own = kept(shaped(final, best, rows, at)).astype(np.float64)
        own /= own.sum(axis=1, keepdims=True)
        tokens[at] = _judged(own, _shares(own, drafts[at], [weights[row] for row in at.tolist()]), rows, at, drafts[at])
        margins[at] = 0.0
    if logprobs is None:
        return Sampled(tokens, None, None, None, margins, plain.errors)
    usable = tokens >= 0
    with np.errstate(invalid="ignore"):
        ids, values, ranks = reported(logits, logits.max(axis=1), tokens, logprobs, usable)
    return Sampled(tokens, ids, values, ranks, margins, plain.errors)


def _judged(own: Float64s, other: Float64s, rows: SamplingRows, at: Int64s, drafts: Int64s) -> Int64s:
    """Return the token of each row: its draft, or one drawn from the excess of ``own`` over ``other``."""
    every = np.arange(len(at))
    seeds, positions = rows.seed[at], rows.position[at]
    accepted = uniform(seeds, positions, ACCEPT) * other[every, drafts] < own[every, drafts]
    left = np.maximum(own - other, 0.0)
    left[every, drafts] = 0.0  # exact for a refused draft, in spite of rounding
    running = left.cumsum(axis=1)
    target = uniform(seeds, positions, RESIDUAL) * running[:, -1]
    drawn = np.minimum((running <= target[:, None]).sum(axis=1), own.shape[1] - 1)
    tokens: Int64s = np.where(accepted | (running[:, -1] <= 0.0), drafts, drawn)
    return tokens


def _shares(own: Float64s, drafts: Int64s, weights: Sequence[Weights]) -> Float64s:
    """Return the probabilities with which the drafts were drawn, ``[n, V]``."""
    other = np.zeros_like(own)
    known: dict[int, Float64s] = {}
    for row, (draft, found) in enumerate(zip(drafts.tolist(), weights, strict=True)):
        if found is None:
            other[row, draft] = 1.0
        else:
            if id(found) not in known:
                known[id(found)] = found / found.sum()
            other[row] = known[id(found)]
    return other


def _warm(rows: SamplingRows) -> SamplingRows:
    """Return the rows with a temperature to divide by, where it is 0 and nothing is drawn."""
    return replace(rows, temperature=np.where(rows.temperature > 0.0, rows.temperature, np.float32(1.0)))
