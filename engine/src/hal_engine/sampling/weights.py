"""Softmax weights as whole numbers, so that no sum depends on its order, the NumPy version or the processor.

``np.exp`` and pairwise sums differ in the last bits between NumPy versions and vector units. Here the exponential
consists of single IEEE-754 operations and a table (argument reduction after Tang, "Table-driven implementation of the
exponential function in IEEE floating-point arithmetic", ACM TOMS 15, 1989) and is rounded to an int64; sums of these
are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal, localcontext
from functools import lru_cache
from itertools import product

import numpy as np

from .rows import Float32s, Float64s, Int64s

_STEPS = 256  # table entries for each halving
STEPS_PER_NAT = _STEPS / math.log(2.0)
_RATE = math.log(2.0) / _STEPS
# exp(-_RATE * r) for |r| <= 1/2: the next term of the series is below 2e-13.
_FIRST, _SECOND, _THIRD = -_RATE, _RATE**2 / 2.0, -(_RATE**3) / 6.0

RUN = 64  # tokens whose weights are summed at once
_BLOCK = 128 * RUN  # numbers processed at a time


def unit_bits(vocab: int) -> int:
    """Return the bits of the unit: the best token weighs ``2**unit_bits``, and a vocabulary of such weights sums to
    less than 2**62."""
    return min(50, 62 - vocab.bit_length())


@lru_cache(maxsize=8)
def _powers(bits: int) -> Float64s:
    """Return ``2 ** (bits - j / 256)`` down to a quarter, which rounds to a weight of 0."""
    with localcontext() as context:
        context.prec = 40
        fractions = [float(Decimal(2) ** (Decimal(-step) / _STEPS)) for step in range(_STEPS)]
    powers = np.array([math.ldexp(f, bits - half) for half in range(bits + 2) for f in fractions] + [0.25])
    powers.flags.writeable = False
    return powers


def _blocks(
    logits: Float32s, best: Float32s, temperature: Float64s, bits: int
) -> Iterator[tuple[slice, slice, Int64s]]:
    """Yield weights, block by block of rows and columns; each block is valid until the next one is taken.

    One block of scratch stays in the cache. Arrays of the logits' size would each be allocated from the system and
    freed again, which takes longer than the arithmetic.
    """
    count, vocab = logits.shape
    powers = _powers(bits)
    rate = STEPS_PER_NAT / temperature
    across = min(vocab, _BLOCK)
    down = max(1, min(count, _BLOCK // across))
    scratch = np.empty((3, down, across))
    places = np.empty((down, across), np.int64)
    for row, column in product(range(0, count, down), range(0, vocab, across)):
        rows, columns = slice(row, min(row + down, count)), slice(column, min(column + across, vocab))
        height, width = rows.stop - rows.start, columns.stop - columns.start
        steps, rounded, series = scratch[:, :height, :width]
        np.subtract(best[rows, None], logits[rows, columns], out=steps, dtype=np.float64)
        steps *= rate[rows, None]
        np.minimum(steps, float(len(powers) - 1), out=steps)
        np.rint(steps, out=rounded)
        steps -= rounded
        np.multiply(steps, _THIRD, out=series)
        for term in (_SECOND, _FIRST):
            series += term
            series *= steps
        series += 1.0
        place = places[:height, :width]
        place[...] = rounded
        np.take(powers, place, out=rounded, mode="clip")
        series *= rounded
        place[...] = np.rint(series, out=series)
        yield rows, columns, place


def weights(logits: Float32s, best: Float32s, temperature: Float64s, bits: int) -> Int64s:
    """Return ``exp((logits - best) / temperature)`` in units of ``2 ** -bits``, int64, shaped as ``logits`` ``[n,
    any]``.

    ``best`` is each row's largest logit, finite; ``temperature`` is above 0. The relative error is below 1e-12 or half
    a unit. A token less likely than the best by a factor of ``2 ** -(bits + 1)`` has weight 0.
    """
    weighed = np.empty(logits.shape, np.int64)
    for rows, columns, block in _blocks(logits, best, temperature, bits):
        weighed[rows, columns] = block
    return weighed


def run_weights(logits: Float32s, best: Float32s, temperature: Float64s, bits: int, least: Int64s) -> Int64s:
    """Return sums of the weights of each ``RUN`` tokens, int64 ``[n, ceil(V / RUN)]``; weights below ``least`` count as
    0."""
    count, vocab = logits.shape
    sums = np.empty((count, -(-vocab // RUN)), np.int64)
    bounded = bool(least.any())
    for rows, columns, block in _blocks(logits, best, temperature, bits):
        if bounded:
            block *= block >= least[rows, None]
        starts = np.arange(0, block.shape[1], RUN)
        at = columns.start // RUN
        np.add.reduceat(block, starts, axis=1, out=sums[rows, at : at + len(starts)])
    return sums
