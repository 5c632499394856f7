"""Kernels of n-gram drafts and of their verification."""

from __future__ import annotations

from typing import Any

import torch
from hal_core import Unavailable

from .random_kernels import gumbel_argmax, philox_uniform
from .runs import Runs, most_of


def _ngram_scan_kernel(
    token_ids_ptr: torch.Tensor,
    token_ids_stride: int,
    idx_mapping_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    scratch_ptr: torch.Tensor,
    scratch_stride: int,
    L: int,
    MIN_N: int,
    MAX_N: int,
    MAX_N_PO2: int,
    BLOCK_L: int,
) -> None:
    """The best earlier place of each request's last n tokens: the greatest n, then the last place.

    ``scratch`` int64 ``[requests, blocks]``: ``n * (L + 1) + place + 1`` of the best in each block of places, or 0.
    """
    rows, n = idx_mapping_ptr, idx_mapping_ptr.shape[0]
    lens = total_len_ptr[rows].long()
    eligible = (num_sampled_ptr[:n] > 0) & (lens >= MIN_N)
    width = most_of(lens, token_ids_ptr.shape[1])
    every = token_ids_ptr[rows, :width]
    places = torch.arange(width, device=rows.device)
    best = torch.zeros((n, width), dtype=torch.int64, device=rows.device)
    for size in range(MIN_N, min(MAX_N, width) + 1):
        match = (places <= (lens - size - 1)[:, None]) & eligible[:, None]
        for i in range(size):
            tail = every.gather(1, (lens - size + i).clamp(0, max(width - 1, 0))[:, None])
            match &= every.roll(-i, 1) == tail  # what comes round from the front lies past the last place
        best = torch.where(match, size * (L + 1) + places + 1, best)
    blocks = scratch_ptr.shape[1]
    scores = torch.zeros((n, blocks * BLOCK_L), dtype=torch.int64, device=rows.device)
    scores[:, :width] = best
    scratch_ptr[:n] = scores.view(n, blocks, BLOCK_L).amax(-1)


def _ngram_finalize_kernel(
    token_ids_ptr: torch.Tensor,
    token_ids_stride: int,
    idx_mapping_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    scratch_ptr: torch.Tensor,
    scratch_stride: int,
    drafts_ptr: torch.Tensor,
    L: int,
    N_BLOCKS: int,
    K: int,
    K_PO2: int,
    N_BLOCKS_PO2: int,
) -> None:
    """What followed that place, and the last token where nothing did."""
    rows, n = idx_mapping_ptr, idx_mapping_ptr.shape[0]
    score = scratch_ptr[:n, :N_BLOCKS].amax(-1)
    found = score > 0
    size = torch.where(found, (score - 1) // (L + 1), 0)
    begin = torch.where(found, score - 1 - size * (L + 1) + size, 0)
    steps = torch.arange(K, device=rows.device)
    follows = token_ids_ptr[rows[:, None], (begin[:, None] + steps).clamp(max=L - 1)].long()
    left = (total_len_ptr[rows] - begin).clamp(min=0)
    valid = (steps < left[:, None]) & ((num_sampled_ptr[:n] > 0) & found)[:, None]
    drafts_ptr[:n, :K] = torch.where(valid, follows, last_sampled_ptr[rows][:, None])


def _flatten_sampled_kernel(
    flat_sampled_ptr: torch.Tensor,
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
) -> None:
    """The sampled tokens, laid beside their logits."""
    logits = Runs(cu_num_logits_ptr[: num_sampled_ptr.shape[0] + 1], flat_sampled_ptr.shape[0])
    flat = flat_sampled_ptr[: logits.count]
    mask = logits.inside & (logits.local < num_sampled_ptr[logits.of])
    tokens = sampled_ptr[logits.of, logits.local.clamp(max=sampled_ptr.shape[1] - 1).long()]
    flat.copy_(torch.where(mask, tokens.to(flat.dtype), flat))


def _gather_draft_sampled_kernel(
    draft_sampled_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    num_logits: int,
    BLOCK_SIZE: int,
) -> None:
    """The token and the position of each logits row; -1 for a draft that none proposed."""
    at, local = logits_indices_ptr[:num_logits], expanded_local_pos_ptr[:num_logits]
    where = positions_ptr[at]
    empty = (local > 0) & (where - local < prefill_len_ptr[expanded_idx_mapping_ptr[:num_logits]])
    draft_sampled_ptr[:num_logits] = input_ids_ptr[at].masked_fill(empty, -1)
    pos_ptr[:num_logits] = where


def rejection_sample(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
    contexts: torch.Tensor | None = None,
    watermarking: torch.Tensor | None = None,
    watermarking_skip_mask: torch.Tensor | None = None,
    watermark_key: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the drafts that the target accepts and draw one token more, for drafts without logits.

    :return: tokens int64 ``[requests, steps + 1]``, and how many of them each request has, int32 ``[requests]``; the
        rest of a row is undefined.
    :raises Unavailable: for drafts with logits, synthetic rates, block verification and watermarks.
    """
    refused = {
        "_compute_local_logits_stats_kernel with drafts' logits": draft_logits is not None,
        "_rejection_kernel with synthetic rates": synthetic_conditional_rates is not None,
        "_rejection_kernel with block verification": use_block_verification,
        "_resample_kernel with watermarks": contexts is not None,
    }
    for name, given in refused.items():
        if given:
            raise Unavailable(f"hal has no kernel for {name}", cure="use n-gram drafts, or give one", hook=name)
    n, last = cu_num_logits.shape[0] - 1, target_logits.shape[0] - 1
    starts, counts = cu_num_logits[:-1].long(), cu_num_logits.diff().long()
    rows = idx_mapping.long()
    warm = temperature[rows] != 0
    best = target_logits.argmax(-1)
    normal = target_logits.float().logsumexp(-1)
    sampled = torch.zeros((n, num_speculative_steps + 1), dtype=torch.int64, device=target_logits.device)
    going = torch.ones(n, dtype=torch.bool, device=target_logits.device)
    accepted = torch.zeros(n, dtype=torch.int64, device=target_logits.device)
    for i in range(num_speculative_steps):
        at = (starts + i).clamp(max=last)
        draft = draft_sampled[(at + 1).clamp(max=last)].long()
        valid, checked = draft >= 0, going & (i < counts - 1)
        draft = draft.clamp(min=0)
        ratio = target_logits[at, draft].float() - normal[at]
        passes = torch.where(warm, ratio > philox_uniform(seed[rows], pos[at]).log(), best[at] == draft)
        going = checked & valid & passes
        accepted += going
        sampled[:, i] = torch.where(going, draft, best[at])
    at = starts + accepted
    extra = accepted == counts - 1
    refused_draft = draft_sampled[(at + 1).clamp(max=last)].long()
    drawn = target_logits[at].float()
    columns = torch.arange(drawn.shape[1], device=drawn.device)
    drawn = drawn.masked_fill((columns == refused_draft[:, None]) & (warm & ~extra)[:, None], float("-inf"))
    tokens = gumbel_argmax(drawn, rows, temperature, seed, pos[at], fp64=use_fp64)
    sampled.scatter_(1, accepted[:, None], tokens[:, None])
    return sampled, (accepted + 1).to(torch.int32)


KERNELS: dict[str, Any] = {
    "spec_decode.rejection_sampler": (_flatten_sampled_kernel, _gather_draft_sampled_kernel),
    "spec_decode.ngram.speculator": (_ngram_scan_kernel, _ngram_finalize_kernel),
}
"""As :data:`hal_vllm.batch_kernels.KERNELS`."""
