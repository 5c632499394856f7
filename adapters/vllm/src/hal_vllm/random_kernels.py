"""Seeded noise: vLLM's random integers bit for bit, in int64 arithmetic, as torch has no unsigned one everywhere."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hal_core import Unavailable

from .launching import kernel

LOW = 0xFFFF_FFFF
DRAFTING = 1 << 30
"""Added to positions of draws for drafts."""


def _mixed(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """One round of MurmurHash3 over 32 bits."""
    key = key * 0xCC9E2D51 & LOW
    key = (key << 15 | key >> 17) & LOW
    state = state ^ key * 0x1B873593 & LOW
    state = (state << 13 | state >> 19) & LOW
    return state * 5 + 0xE6546B64 & LOW


def murmur3(seed: torch.Tensor, pos: torch.Tensor, offset: torch.Tensor, domain: int = 0) -> torch.Tensor:
    """MurmurHash3 of seed (64 bits), position and offset (32): uint32 in int64, of the broadcast shape."""
    state = torch.full_like(seed, domain)
    for key in (seed & LOW, seed >> 32 & LOW, pos & LOW):
        state = _mixed(state, key)
    state = _mixed(state, offset) ^ 16
    state = (state ^ state >> 16) * 0x85EBCA6B & LOW
    state = (state ^ state >> 13) * 0xC2B2AE35 & LOW
    return state ^ state >> 16


def gumbel_noise(seed: torch.Tensor, pos: torch.Tensor, offset: torch.Tensor, *, fp64: bool) -> torch.Tensor:
    """Gumbel noise, float32 or float64, of the broadcast shape."""
    bits = murmur3(seed, pos, offset)
    if fp64:
        high = murmur3(seed, pos, offset, 0x9E3779B9)
        uniform = ((high << 21 | bits >> 11).double() + 0.5) * 2.0**-53
        uniform = torch.where(uniform == 1.0, uniform - 2.0**-53, uniform)
        return -(-uniform.log()).log()
    uniform = (bits >> 16).float() * 2.0**-16 + ((bits & 0xFFFF).float() + 0.5) * 2.0**-32
    series = torch.full_like(uniform, 1.0 / 8.0)  # log(1 - u) near 0, as log1p differs between devices
    for term in range(7, 0, -1):
        series = 1.0 / term + uniform * series
    direct = (1.0 - uniform).clamp(min=2.0**-24).log()
    return -(-torch.where(uniform < 0.25, -uniform * series, direct)).log()


def _noised(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    pos: torch.Tensor,
    *,
    fp64: bool,
    scaled: bool = False,
) -> torch.Tensor:
    """Return float logits with the noise of requests whose temperature is not 0; ``rows`` -1: no request."""
    real, at = rows >= 0, rows.clamp(min=0)
    heat = torch.where(real, temperature[at].float(), 0.0)[:, None]
    warm = heat != 0
    if scaled:
        logits = torch.where(warm, logits / torch.where(warm, heat, 1.0), logits)
    logits = logits.double() if fp64 else logits
    if logits.device.type == "cpu" and not bool(warm.any()):
        return logits
    seed = torch.where(real, seeds[at], 0)[:, None]
    columns = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(warm, logits + gumbel_noise(seed, pos.long()[:, None], columns, fp64=fp64), logits)


def gumbel_argmax(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    pos: torch.Tensor,
    *,
    fp64: bool,
) -> torch.Tensor:
    """Return a token drawn from each row of float logits, int64; the best one at temperature 0."""
    return _noised(logits, rows, temperature, seeds, pos, fp64=fp64).argmax(-1)


def philox_uniform(seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return Philox 4x32-10 of a 64-bit seed and an offset as float32 in (0, 1), as Triton draws it."""
    zeros = torch.zeros_like(seed)
    counters = [offset.long() & LOW, offset.long() >> 32 & LOW, zeros, zeros]
    low, high = seed & LOW, seed >> 32 & LOW
    for _ in range(10):
        even_high, even_low = _product(counters[0], 0xD2511F53)
        odd_high, odd_low = _product(counters[2], 0xCD9E8D57)
        counters = [odd_high ^ counters[1] ^ low, odd_low, even_high ^ counters[3] ^ high, even_low]
        low, high = low + 0x9E3779B9 & LOW, high + 0xBB67AE85 & LOW
    signed = torch.where(counters[0] > 0x7FFF_FFFF, LOW - counters[0], counters[0])  # -x - 1 of a negative int32 x
    return (signed.float() * 4.6566127342e-10).clamp(min=4.6566127342e-10)


def _product(values: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and the low 32 bits of uint32 values times a factor."""
    upper, lower = (values >> 16) * factor, (values & 0xFFFF) * factor
    high = upper + (lower >> 16)
    return high >> 16, (high << 16 | lower & 0xFFFF) & LOW


@kernel(
    "sample.gumbel",
    "local_argmax_ptr local_argmax_stride local_max_ptr local_max_stride logits_cache_ptr "
    "logits_cache_stride_0 logits_cache_stride_1 logits_cache_col_ptr logits_cache_source_ptr "
    "logits_cache_source_stride logits_ptr logits_stride expanded_idx_mapping_ptr seeds_ptr pos_ptr "
    "temp_ptr vocab_size BLOCK_SIZE IS_DRAFTING APPLY_TEMPERATURE USE_FP64 PER_TOKEN_COL",
)
def _gumbel_sample_kernel(a: SimpleNamespace) -> None:
    """The best noised token of each block of the vocabulary."""
    if a.logits_cache is not None:
        what = "hal keeps no drafts' logits"
        raise Unavailable(what, cure="use n-gram drafts, or give a kernel", hook="_gumbel_sample_kernel")
    logits, pos = a.logits[:, : a.vocab_size].float(), a.pos + DRAFTING if a.IS_DRAFTING else a.pos
    values = _noised(logits, a.expanded_idx_mapping, a.temp, a.seeds, pos, fp64=a.USE_FP64, scaled=a.APPLY_TEMPERATURE)
    rows, blocks = a.local_max.shape
    padded = values.new_full((rows, blocks * a.BLOCK_SIZE), float("-inf"))
    padded[:, : a.vocab_size] = values
    best, where = padded.view(rows, blocks, a.BLOCK_SIZE).max(-1)
    a.local_max.copy_(best)
    a.local_argmax.copy_(where + torch.arange(blocks, device=where.device) * a.BLOCK_SIZE)
