"""Kernels of n-gram drafts and of their verification."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hal_core import Unavailable

from .launching import kernel
from .random_kernels import gumbel_argmax, philox_uniform
from .runs import Runs, most_of


@kernel(
    "spec_decode.ngram.speculator",
    "token_ids_ptr token_ids_stride idx_mapping_ptr total_len_ptr num_sampled_ptr scratch_ptr "
    "scratch_stride L MIN_N MAX_N MAX_N_PO2 BLOCK_L",
)
def _ngram_scan_kernel(a: SimpleNamespace) -> None:
    """The best earlier place of each request's last n tokens: the greatest n, then the last place.

    ``scratch`` int64 ``[requests, blocks]``: ``n * (a.L + 1) + place + 1`` of the best in each block of places, or 0.
    """
    rows, n = a.idx_mapping, a.idx_mapping.shape[0]
    lens = a.total_len[rows].long()
    eligible = (a.num_sampled[:n] > 0) & (lens >= a.MIN_N)
    width = most_of(lens, a.token_ids.shape[1])
    every = a.token_ids[rows, :width]
    places = torch.arange(width, device=rows.device)
    best = torch.zeros((n, width), dtype=torch.int64, device=rows.device)
    for size in range(a.MIN_N, min(a.MAX_N, width) + 1):
        match = (places <= (lens - size - 1)[:, None]) & eligible[:, None]
        for i in range(size):
            tail = every.gather(1, (lens - size + i).clamp(0, max(width - 1, 0))[:, None])
            match &= every.roll(-i, 1) == tail  # what comes round from the front lies past the last place
        best = torch.where(match, size * (a.L + 1) + places + 1, best)
    blocks = a.scratch.shape[1]
    scores = torch.zeros((n, blocks * a.BLOCK_L), dtype=torch.int64, device=rows.device)
    scores[:, :width] = best
    a.scratch[:n] = scores.view(n, blocks, a.BLOCK_L).amax(-1)


@kernel(
    "spec_decode.ngram.speculator",
    "token_ids_ptr token_ids_stride idx_mapping_ptr total_len_ptr num_sampled_ptr last_sampled_ptr "
    "scratch_ptr scratch_stride drafts_ptr L N_BLOCKS K K_PO2 N_BLOCKS_PO2",
)
def _ngram_finalize_kernel(a: SimpleNamespace) -> None:
    """What followed that place, and the last token where nothing did."""
    rows, n = a.idx_mapping, a.idx_mapping.shape[0]
    score = a.scratch[:n, : a.N_BLOCKS].amax(-1)
    found = score > 0
    size = torch.where(found, (score - 1) // (a.L + 1), 0)
    begin = torch.where(found, score - 1 - size * (a.L + 1) + size, 0)
    steps = torch.arange(a.K, device=rows.device)
    follows = a.token_ids[rows[:, None], (begin[:, None] + steps).clamp(max=a.L - 1)].long()
    left = (a.total_len[rows] - begin).clamp(min=0)
    valid = (steps < left[:, None]) & ((a.num_sampled[:n] > 0) & found)[:, None]
    a.drafts[:n, : a.K] = torch.where(valid, follows, a.last_sampled[rows][:, None])


@kernel(
    "spec_decode.rejection_sampler",
    "flat_sampled_ptr sampled_ptr sampled_stride num_sampled_ptr cu_num_logits_ptr",
)
def _flatten_sampled_kernel(a: SimpleNamespace) -> None:
    """The sampled tokens, laid beside their logits."""
    logits = Runs(a.cu_num_logits[: a.num_sampled.shape[0] + 1], a.flat_sampled.shape[0])
    mask = logits.inside & (logits.local < a.num_sampled[logits.of])
    tokens = a.sampled[logits.of, logits.local.clamp(max=a.sampled.shape[1] - 1).long()]
    logits.fill(a.flat_sampled, tokens, mask)


@kernel(
    "spec_decode.rejection_sampler",
    "draft_sampled_ptr pos_ptr input_ids_ptr positions_ptr logits_indices_ptr expanded_idx_mapping_ptr "
    "expanded_local_pos_ptr prefill_len_ptr num_logits BLOCK_SIZE",
)
def _gather_draft_sampled_kernel(a: SimpleNamespace) -> None:
    """The token and the position of each logits row; -1 for a draft that none proposed."""
    at, local = a.logits_indices[: a.num_logits], a.expanded_local_pos[: a.num_logits]
    where = a.positions[at]
    empty = (local > 0) & (where - local < a.prefill_len[a.expanded_idx_mapping[: a.num_logits]])
    a.draft_sampled[: a.num_logits] = a.input_ids[at].masked_fill(empty, -1)
    a.pos[: a.num_logits] = where


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
