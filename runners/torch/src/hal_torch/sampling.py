"""Sampling on the device, as in ``hal_engine.sampling`` on the host: the same tokens from the same float32 logits.

Weights are whole numbers there and here, so no sum depends on its order. The exponential is torch's own, in float64,
which moves the edges of intervals by 1e-12 at most. No call waits for the device, and every shape is known in advance,
so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch
from hal_engine.sampling.weights import unit_bits
from torch import Tensor

from .adjusting import adjust

if TYPE_CHECKING:
    from hal_core import SamplingParams

_LOW = 0xFFFF_FFFF
_MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
_BUMPS = (0x9E37_79B9, 0xBB67_AE85)
_ROUNDS = 10

GREEDY, DRAWN, TRUNCATED = range(3)
"""How the tokens of a step are chosen at most: the best one; a draw from all; a draw after top-k or top-p."""
TROUBLES = (
    "",
    "its logits, or its keys and values, hold NaN or infinity",
    "all its logits are -inf",
    "every token is masked: its bad words and, below min_tokens, its end and stop tokens leave none to sample",
)
"""Meanings of the codes of :class:`Chosen`; 0: no error."""

Fields = Mapping[str, Tensor]
"""The state's fields by name: ``[n]`` of one number a slot, else ``[n, width]``."""


@dataclass(frozen=True, slots=True)
class Want:
    """Most that the requests of a step need: ``draw`` is :data:`GREEDY`, :data:`DRAWN` or :data:`TRUNCATED`;
    ``adjusts``: penalties, bad words or a least length; ``logprobs``: log-probabilities."""

    draw: int = GREEDY
    adjusts: bool = False
    logprobs: bool = False

    @classmethod
    def of(cls, params: SamplingParams) -> Want:
        """Return the needs of one request."""
        draw = GREEDY
        if params.temperature > 0 and params.top_k != 1:
            draw = TRUNCATED if params.top_k > 0 or params.top_p < 1 else DRAWN
        penalized = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        adjusts = penalized or bool(params.bad_words) or params.min_tokens > 0
        return _WANTS[draw, adjusts, params.logprobs is not None]

    def __or__(self, other: Want) -> Want:
        """Return the joint needs of two."""
        return Want(max(self.draw, other.draw), self.adjusts or other.adjusts, self.logprobs or other.logprobs)


_KINDS = product((GREEDY, DRAWN, TRUNCATED), (False, True), (False, True))
_WANTS = {kind: Want(*kind) for kind in _KINDS}
"""Requests share these, so that those of a step are told apart by identity: a hash of a dataclass is slow."""


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """One token a row of logits: int64 ``[n]``, and ``codes`` uint8 ``[n]``, with errors as in :data:`TROUBLES`."""

    tokens: Tensor
    codes: Tensor


def choose(logits: Tensor, want: Want, fields: Fields) -> Chosen:
    """Choose one token a row of float32 ``[n, vocab]``. A row's result depends on that row alone."""
    top = logits.amax(1)
    final = adjust(logits, fields) if want.adjusts else logits
    best, tokens = final.amax(1), final.argmax(1)
    codes = torch.where(best > float("-inf"), 0, 3)
    codes = torch.where(top == float("-inf"), 2, codes)
    codes = torch.where(torch.isnan(top) | (top == float("inf")), 1, codes)
    if want.draw != GREEDY:
        warm = (fields["temperature"] > 0) & (fields["top_k"] != 1)
        # Rows that are not sampled, or cannot be, are computed as well, from harmless numbers.
        sound = torch.where((codes == 0)[:, None], final, 0.0)
        shares = weights(sound, torch.where(warm, fields["temperature"], 1.0))
        if want.draw == TRUNCATED:
            shares = truncate(shares, sound, fields["top_k"], fields["top_p"])
        least = torch.ceil(fields["min_p"].double() * 2.0 ** unit_bits(logits.shape[1])).long()
        shares = torch.where(shares >= least[:, None], shares, 0)
        tokens = torch.where(warm, draw(shares, uniform(fields["seed"], fields["step_idx"])), tokens)
    return Chosen(tokens, codes.to(torch.uint8))


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Numbers in [0, 1) of 53 bits, float64 ``[n]``, from int64 ``[n]``: Philox4x32-10, the key is ``seed``, the
    counter ``position``, as :func:`hal_engine.sampling.philox.uniform`. Products of two words wrap in int64 to their
    bits."""
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
    bits = ((counter[0] >> 5) << 26) | (counter[1] >> 6)
    return bits.double() * 2.0**-53


def weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """int64 ``[n, vocab]``: each token's share of a draw; the best one weighs ``2**unit_bits``."""
    scaled = (logits - logits.amax(1, keepdim=True).double()) / temperature.double()[:, None]
    return torch.round(torch.exp(scaled) * 2.0 ** unit_bits(logits.shape[1])).long()


def order(logits: Tensor) -> Tensor:
    """Ids in descending order of their logits, int64 ``[n, vocab]``; of equal logits the lower id is first."""
    return torch.sort(logits + 0.0, dim=1, descending=True, stable=True).indices  # -0 and 0 are one


def truncate(shares: Tensor, logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """``shares`` with 0 for all but the ``top_k`` best tokens (0: all), and of these for all but the smallest set of
    best ones whose share is at least ``top_p``."""
    vocab = shares.shape[1]
    ids = order(logits)
    sizes = shares.gather(1, ids)
    running = sizes.cumsum(1)
    limit = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab).long()
    total = running.gather(1, limit[:, None] - 1)
    enough = torch.minimum(torch.ceil(top_p.double()[:, None] * total.double()).long(), total)
    return torch.zeros_like(shares).scatter(1, ids, torch.where(running - sizes < enough, sizes, 0))


def draw(shares: Tensor, u: Tensor) -> Tensor:
    """int64 ``[n]``: the token whose interval of the cumulative distribution, in order of ids, holds ``u``."""
    running = shares.cumsum(1)
    total = running[:, -1]
    target = torch.minimum((u * total.double()).long(), total - 1)
    return (running <= target[:, None]).sum(1)


def log_probabilities(logits: Tensor, tokens: Tensor, wanted: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the raw logits: ids int64 and values float32 ``[n, count + 1]``, ranks int32 ``[n]``.

    Column 0 is the token's, the further ones those of the best tokens, as many as ``wanted`` ``[n]``; unused ones are
    -1 and -inf. A row that wants none, below 0, has its token and rank alone, and one without a token, -1, is empty.
    """
    vocab, shown = logits.shape[1], min(count, logits.shape[1])
    there = tokens >= 0
    logits, tokens = torch.where(there[:, None], logits, 0.0), tokens.clamp(min=0)
    total = weights(logits, torch.ones_like(logits[:, 0])).sum(1)
    scale = torch.log(total.double() * 2.0 ** -unit_bits(vocab))
    normalizer = logits.amax(1).double() + scale
    ids = torch.cat([tokens[:, None], order(logits)[:, :shown]], 1)
    raw = logits.gather(1, ids)
    values = (raw.double() - normalizer[:, None]).float()
    column = torch.arange(shown + 1, device=logits.device)
    used = there[:, None] & (column <= wanted[:, None])
    before = (logits > raw[:, :1]) | ((logits == raw[:, :1]) & (torch.arange(vocab, device=logits.device) < ids[:, :1]))
    ranks = torch.where(there, 1 + before.sum(1), 0).int()
    ids = torch.where(used | ((column == 0) & there[:, None]), ids, -1)
    values = torch.where(used, values, float("-inf"))
    rest = (len(ids), count - shown)
    return torch.cat([ids, ids.new_full(rest, -1)], 1), torch.cat([values, values.new_full(rest, -torch.inf)], 1), ranks
