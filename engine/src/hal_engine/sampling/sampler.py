"""The sampler, called once a step for all rows. A row's result depends only on that row, bit for bit.

In this order:

1. raw logits: NaN or +inf make the row an error; log-probabilities are taken here.
2. repetition penalty over prompt and generated tokens, then frequency and presence penalties over generated tokens.
3. masks: bad words; while ``position < min_tokens`` also end tokens and stop sequences of one token. (A longer stop
   sequence may occur earlier; the update of the state ignores it below ``min_tokens``.) Since penalties are finite,
   masks before or after them are equivalent.
4. temperature 0, or top_k 1: the best token, of equal ones the lowest id.
5. otherwise temperature, top-k, top-p, min-p (relative to the best token), and a draw (``drawing``) whose u depends
   only on seed and position (``philox``).
"""

from __future__ import annotations

import numpy as np
from hal_core import InvalidValue

from .adjust import adjust
from .drawing import Draws, draw
from .logprobs import log_probabilities
from .philox import TARGET, uniform
from .rows import Bools, Float32s, Float64s, Int32s, Int64s, Sampled, SamplingRows


def sample(logits: Float32s, rows: SamplingRows, *, logprobs: int | None) -> Sampled:
    """Sample one token for each row of ``logits``, float32 ``[n, V]``, which are as before at the end.

    ``logprobs`` is the largest number of alternatives requested by any row, None for no log-probabilities. A row that
    cannot be sampled is reported in ``Sampled.errors``. Raises :class:`InvalidValue` only for the caller's errors:
    shapes, dtype, a row with penalties but no tokens.
    """
    _check(logits, rows, logprobs)
    every = np.arange(len(logits))
    with np.errstate(invalid="ignore"):  # rows with NaN are detected here, and reported
        final = adjust(logits, rows)
        final = final if final.flags.writeable else final.copy()
        tokens = final.argmax(axis=1).astype(np.int64, copy=False)  # of a row with NaN, its first one
        best = final[every, tokens]
        top = best if final is logits else logits.max(axis=1)
        usable = np.isfinite(top) & (best > -np.inf)
    errors = {} if usable.all() else {row: _trouble(logits[row]) for row in np.flatnonzero(~usable).tolist()}
    drawn = usable & (rows.temperature > 0.0) & (rows.top_k != 1)
    margins = np.zeros(len(logits))
    if drawn.any():
        _draw(final, best, rows, drawn, tokens, margins)
    if not drawn.all():
        _gaps(final, best, tokens, usable & ~drawn, margins)
    tokens[~usable] = -1
    if logprobs is None:
        return Sampled(tokens, None, None, None, margins, errors)
    ids, values, ranks = reported(logits, top, tokens, logprobs, usable)
    return Sampled(tokens, ids, values, ranks, margins, errors)


def _check(logits: Float32s, rows: SamplingRows, logprobs: int | None) -> None:
    count = len(rows.temperature)
    if logits.ndim != 2 or len(logits) != count or logits.shape[1] == 0 or logits.dtype != np.float32:
        raise InvalidValue(
            f"{logits.dtype} {list(logits.shape)} for {count} rows",
            cure=f"give float32 [{count}, vocabulary]",
            argument="logits",
        )
    if logprobs is not None and logprobs < 0:
        raise InvalidValue(f"{logprobs}", cure="give None or a count of at least 0", argument="logprobs")


def _trouble(logits: Float32s) -> str:
    """Return why a row cannot be sampled."""
    unusable = np.flatnonzero(np.isnan(logits) | (logits == np.inf))
    if len(unusable):
        first = int(unusable[0])
        return (
            f"{len(unusable)} of its {len(logits)} logits are NaN or +inf, the first {logits[first]} of token {first}"
        )
    if not np.isfinite(logits).any():
        return "all its logits are -inf"
    return "every token is masked: its bad words and, below min_tokens, its end and stop tokens leave none to sample"


def shaped(final: Float32s, best: Float32s, rows: SamplingRows, at: Int64s, stream: int = TARGET) -> Draws:
    """Return some of the rows, by number, prepared for a draw; ``stream``: of the drawing numbers."""
    every = len(at) == len(final)
    return Draws(
        final if every else final[at],
        best[at],
        rows.temperature[at],
        rows.top_k[at],
        rows.top_p[at],
        rows.min_p[at],
        uniform(rows.seed[at], rows.position[at], stream),
    )


def _draw(final: Float32s, best: Float32s, rows: SamplingRows, drawn: Bools, tokens: Int64s, margins: Float64s) -> None:
    at = np.flatnonzero(drawn)
    tokens[at], margins[at] = draw(shaped(final, best, rows, at))


def _gaps(final: Float32s, best: Float32s, tokens: Int64s, greedy: Bools, margins: Float64s) -> None:
    """Set the margins of greedy rows."""
    at = np.flatnonzero(greedy)
    final[at, tokens[at]] = -np.inf
    second = (final if len(at) == len(final) else final[at]).max(axis=1)
    final[at, tokens[at]] = best[at]
    margins[at] = best[at].astype(np.float64) - second


def reported(
    logits: Float32s, top: Float32s, tokens: Int64s, logprobs: int, usable: Bools
) -> tuple[Int64s, Float32s, Int32s]:
    """Return ids, log-probabilities and ranks of the rows' tokens; see :class:`Sampled`."""
    if usable.all():
        return log_probabilities(logits, top, tokens, logprobs)
    ids = np.full((len(logits), logprobs + 1), -1, np.int64)
    values, ranks = np.zeros(ids.shape, np.float32), np.zeros(len(logits), np.int32)
    at = np.flatnonzero(usable)
    ids[at], values[at], ranks[at] = log_probabilities(logits[at], top[at], tokens[at], logprobs)
    return ids, values, ranks
