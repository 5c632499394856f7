"""Sampling on the device: the draw of ``hal.sampling`` (temperature, top-p, seed), so the tokens are the cpu device's.

Weights are whole numbers there and here, so no sum depends on its order; the exponential is torch's own, in float64,
which moves the edges of intervals by 1e-12 at most. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.sampling.weights import unit_bits

_LOW = 0xFFFF_FFFF
_MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
_BUMPS = (0x9E37_79B9, 0xBB67_AE85)
_ROUNDS = 10

GREEDY, DRAWN, TRUNCATED = range(3)
"""What some request of a step needs at most: the best token; a draw from all; a draw from the best, by top-p."""


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Numbers in [0, 1) of 53 bits, float64 ``[n]``, from int64 ``[n]``: Philox4x32-10, the key is ``seed``, the
    counter ``position``, as :func:`hal.sampling.philox.uniform`. Products of two words wrap in int64 to their bits."""
    counter = [position & _LOW, (position >> 32) & _LOW, torch.zeros_like(position), torch.zeros_like(position)]
    key = [seed & _LOW, (seed >> 32) & _LOW]
    for number in range(_ROUNDS):
        even, odd = counter[0::2], counter[1::2]
        product = [word * multiplier for word, multiplier in zip(even, _MULTIPLIERS, strict=True)]
        keys = [(word + bump * number) & _LOW for word, bump in zip(key, _BUMPS, strict=True)]
        counter = [
            ((product[1] >> 32) & _LOW) ^ odd[0] ^ keys[0],
            product[1] & _LOW,
            ((product[0] >> 32) & _LOW) ^ odd[1] ^ keys[1],
            product[0] & _LOW,
        ]
    whole = ((counter[0] >> 5) << 26) | (counter[1] >> 6)
    return whole.double() * 2.0**-53


def weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """int64 ``[n, vocab]``: each token's share of a draw; the best one weighs ``2**unit_bits``."""
    scaled = (logits - logits.amax(1, keepdim=True).double()) / temperature.double()[:, None]
    return torch.round(torch.exp(scaled) * 2.0 ** unit_bits(logits.shape[1])).long()


def truncate(shares: Tensor, logits: Tensor, top_p: Tensor) -> Tensor:
    """``shares`` with 0 for all but the smallest set of best tokens whose share is at least ``top_p``; of equal logits
    the lower id is the better."""
    order = torch.sort(logits + 0.0, dim=1, descending=True, stable=True).indices  # -0 and 0 are one
    sizes = shares.gather(1, order)
    running = sizes.cumsum(1)
    total = running[:, -1:]
    limit = torch.minimum(torch.ceil(top_p.double()[:, None] * total.double()).long(), total)
    return torch.zeros_like(shares).scatter(1, order, sizes * (running - sizes < limit))


def draw(shares: Tensor, u: Tensor) -> Tensor:
    """int64 ``[n]``: the token whose interval of the cumulative distribution, in order of ids, holds ``u``."""
    running = shares.cumsum(1)
    total = running[:, -1]
    target = torch.minimum((u * total.double()).long(), total - 1)
    return (running <= target[:, None]).sum(1)


def sample(logits: Tensor, kind: int, rows: dict[str, Tensor]) -> Tensor:
    """One token a row of float32 ``[n, vocab]``, int64 ``[n]``; -1 where a logit is NaN or +inf, or all are -inf.

    :param kind: what some row needs at most; :data:`GREEDY`, :data:`DRAWN` or :data:`TRUNCATED`.
    :param rows: the state's ``temperature``, ``top_p``, ``seed`` and ``step_idx``, ``[n]`` each.
    """
    best, tokens = logits.amax(1), logits.argmax(1)
    if kind != GREEDY:
        warm = rows["temperature"] > 0
        # Rows that are not drawn, or cannot be, are computed as well, of numbers that make no trouble.
        shares = weights(torch.nan_to_num(logits), torch.where(warm, rows["temperature"], 1.0))
        if kind == TRUNCATED:
            shares = truncate(shares, logits, rows["top_p"])
        tokens = torch.where(warm, draw(shares, uniform(rows["seed"], rows["step_idx"])), tokens)
    return torch.where(torch.isfinite(best), tokens, -1)
