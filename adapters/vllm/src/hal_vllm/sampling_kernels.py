"""Kernels of seeded sampling: what a request's parameters do to its logits, and log-probabilities.

Some wait for the device (a loop's length is read from it); none is part of a captured graph. Top-k and top-p are vLLM's
own operations of torch where there is no Triton.
"""

from __future__ import annotations

from typing import Any

import torch

MINUS = float("-inf")


def _temperature_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Logits over temperature, in place; 0 is left to the argmax."""
    heat = temperature_ptr[expanded_idx_mapping_ptr].float()
    logits_ptr[:, :vocab_size].div_(torch.where(heat == 0, 1.0, heat)[:, None])


def _min_p_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    min_p_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Drop what is less likely than ``min_p`` of the best token."""
    logits, share = logits_ptr[:, :vocab_size], min_p_ptr[expanded_idx_mapping_ptr].float()
    threshold = logits.amax(-1).float() + share.log()
    logits.masked_fill_((logits < threshold[:, None]) & (share != 0)[:, None], MINUS)


def _penalties_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    token_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    repetition_penalty_ptr: torch.Tensor,
    frequency_penalty_ptr: torch.Tensor,
    presence_penalty_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Repetition, frequency and presence; the drafts before a row count as output."""
    rows, local = expanded_idx_mapping_ptr, expanded_local_pos_ptr.long()
    logits = logits_ptr[:, :vocab_size]
    counts = output_bin_counts_ptr[rows, :vocab_size]
    first = torch.arange(rows.shape[0], device=rows.device) - local
    for before in range(int(local.max()) if local.numel() else 0):
        some = local > before
        tokens = token_ids_ptr[torch.where(some, first + before + 1, 0)].long()
        counts.scatter_add_(1, tokens[:, None], some[:, None].to(counts.dtype))
    repetition = repetition_penalty_ptr[rows][:, None]
    seen = _unpacked(prompt_bin_mask_ptr[rows])[:, :vocab_size] | (counts > 0)
    scale = torch.where(seen, repetition, 1.0)
    logits.mul_(torch.where(logits > 0, 1.0 / scale, scale))
    logits.sub_(frequency_penalty_ptr[rows][:, None] * counts)
    logits.sub_(presence_penalty_ptr[rows][:, None] * (counts > 0))


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """Return the bits of int32 words ``[n, words]``, lowest first, as bool ``[n, 32 * words]``."""
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    return (bits & 1).bool().view(words.shape[0], -1)


def _bincount_kernel(
    expanded_idx_mapping_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """Which tokens a new request's prompt has, and how often each one of its output."""
    rows, words = expanded_idx_mapping_ptr.long(), prompt_bin_mask_ptr.shape[1]
    lens, prompt = prefill_len_ptr[rows][:, None], prompt_len_ptr[rows][:, None]
    width = int(lens.max()) if lens.numel() else 0
    tokens = all_token_ids_ptr[rows, :width].long()
    places = torch.arange(width, device=rows.device)
    none = torch.full_like(tokens, words * 32)  # a column of its own for what is masked out
    seen = torch.zeros((rows.shape[0], words * 32 + 1), dtype=torch.int64, device=rows.device)
    seen.scatter_(1, torch.where(places < prompt, tokens, none), 1)
    bits = seen[:, :-1].view(rows.shape[0], words, 32) << torch.arange(32, device=rows.device)
    prompt_bin_mask_ptr[rows] |= bits.sum(-1).to(torch.int32)
    output = (places >= prompt) & (places < lens)
    at = torch.where(output, rows[:, None] * output_bin_counts_stride + tokens, 0).reshape(-1)
    output_bin_counts_ptr.view(-1).index_add_(0, at, output.reshape(-1).to(output_bin_counts_ptr.dtype))


def _bias_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_stride: int,
    num_logit_bias_ptr: torch.Tensor,
    bias_token_ids_ptr: torch.Tensor,
    bias_token_ids_stride: int,
    bias_ptr: torch.Tensor,
    bias_stride: int,
    pos_ptr: torch.Tensor,
    min_lens_ptr: torch.Tensor,
    num_stop_token_ids_ptr: torch.Tensor,
    restore_when_all_masked_ptr: torch.Tensor,
    stop_token_ids_ptr: torch.Tensor,
    stop_token_ids_stride: int,
    BLOCK_SIZE: int,
    LOGITS_BLOCK_SIZE: int,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Allowed tokens, then biases, then no stop token before ``min_tokens``."""
    rows, logits = expanded_idx_mapping_ptr, logits_ptr[:, :vocab_size]
    wide = torch.cat([logits, logits.new_zeros((rows.shape[0], 1))], 1)  # the last column takes what is masked out

    def places(ids: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        some = torch.arange(ids.shape[1], device=ids.device) < counts[:, None]
        return torch.where(some, ids[rows].long(), vocab_size)

    counts = num_allowed_token_ids_ptr[rows]
    allowed = places(allowed_token_ids_ptr, counts)
    only = torch.full_like(wide, MINUS).scatter_(1, allowed, wide.gather(1, allowed))
    wide = torch.where((counts > 0)[:, None], only, wide)
    biased = places(bias_token_ids_ptr, num_logit_bias_ptr[rows])
    wide.scatter_add_(1, biased, bias_ptr[rows].masked_fill(biased == vocab_size, 0.0).to(wide.dtype))
    short = pos_ptr + 1 < min_lens_ptr[rows]
    stops = places(stop_token_ids_ptr, num_stop_token_ids_ptr[rows].masked_fill(~short, 0))
    before = wide.gather(1, stops)
    wide.scatter_(1, stops, MINUS)
    if CHECK_ALL_MASKED_ROWS:
        nothing = (wide[:, :vocab_size].amax(-1) == MINUS) & (restore_when_all_masked_ptr[rows] != 0)
        back = nothing[:, None] & before.isfinite()
        wide.scatter_(1, torch.where(back, stops, vocab_size), torch.where(back, before, 0.0))
    logits.copy_(wide[:, :vocab_size])


def _bad_words_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    bad_word_token_ids_ptr: torch.Tensor,
    bad_word_token_ids_stride: int,
    bad_word_offsets_ptr: torch.Tensor,
    bad_word_offsets_stride: int,
    num_bad_words_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
) -> None:
    """Drop the last token of a bad word whose others were just put out, drafts included."""
    rows, local = expanded_idx_mapping_ptr, expanded_local_pos_ptr.long()
    words, prompt = num_bad_words_ptr[rows], prompt_len_ptr[rows]
    output = total_len_ptr[rows] - prompt
    known = output + local
    first = torch.arange(rows.shape[0], device=rows.device) - local
    for word in range(int(words.max()) if words.numel() else 0):
        has = words > word
        begin, end = bad_word_offsets_ptr[rows, word], bad_word_offsets_ptr[rows, word + 1]
        prefix = torch.where(has, end - begin - 1, 0)
        match = has & (prefix <= known)
        for i in range(int(prefix.max())):
            at = known - prefix + i
            draft = input_ids_ptr[(first + at - output + 1).clamp(0, rows.shape[0] - 1)]
            kept = all_token_ids_ptr[rows, (prompt + at).clamp(0, all_token_ids_ptr.shape[1] - 1)]
            expected = bad_word_token_ids_ptr[rows, (begin + i).clamp(0, bad_word_token_ids_ptr.shape[1] - 1)]
            match &= (i >= prefix) | (torch.where(at >= output, draft, kept) == expected)
        last = bad_word_token_ids_ptr[rows, (end - 1).clamp(0, bad_word_token_ids_ptr.shape[1] - 1)]
        hit = match.nonzero().view(-1)
        logits_ptr[hit, last[hit].long()] = MINUS


def _topk_log_softmax_kernel(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    topk_ids_ptr: torch.Tensor,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    """Log-probabilities of some tokens; float32."""
    logits = logits_ptr[:, :vocab_size].float()
    best = logits.amax(-1, keepdim=True)
    together = (logits - best).exp().sum(-1, keepdim=True).log()
    output_ptr[:, :topk] = logits.gather(1, topk_ids_ptr[:, :topk]) - best - together


def _ranks_kernel(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    token_ids_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """The rank of a token: how many are at least as likely."""
    logits = logits_ptr[:, :vocab_size]
    chosen = logits.gather(1, token_ids_ptr.long()[:, None])
    rest = -vocab_size % BLOCK_SIZE  # the kernel counts the rest of its last block where the token itself is impossible
    output_ptr.copy_((logits >= chosen).sum(-1) + torch.where(chosen[:, 0] == MINUS, rest, 0))


def _fill_logprob_token_ids_kernel(
    out_token_ids_ptr: torch.Tensor,
    out_token_ids_stride: int,
    out_valid_mask_ptr: torch.Tensor,
    out_valid_mask_stride: int,
    sampled_token_ids_ptr: torch.Tensor,
    topk_indices_ptr: torch.Tensor,
    topk_indices_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_per_req_token_ids_ptr: torch.Tensor,
    per_req_token_ids_ptr: torch.Tensor,
    per_req_token_ids_stride: int,
    NUM_TOPK: int,
    PADDED_COLS: int,
) -> None:
    """The tokens whose log-probabilities are wanted: the sampled one, then a request's own or the best."""
    out_token_ids_ptr[:, 0], out_valid_mask_ptr[:, 0] = sampled_token_ids_ptr, True
    rows, width = expanded_idx_mapping_ptr, out_token_ids_ptr.shape[1] - 1
    columns = torch.arange(width, device=rows.device)
    custom = num_per_req_token_ids_ptr[rows][:, None]
    own = per_req_token_ids_ptr[rows[:, None], columns.clamp(max=per_req_token_ids_ptr.shape[1] - 1)].long()
    best = own if NUM_TOPK == 0 else topk_indices_ptr[:, columns.clamp(max=NUM_TOPK - 1)].long()
    valid = columns < torch.where(custom > 0, custom, NUM_TOPK)
    out_token_ids_ptr[:, 1:] = torch.where(valid, torch.where(custom > 0, own, best), out_token_ids_ptr[:, 1:])
    out_valid_mask_ptr[:, 1:] |= valid


KERNELS: dict[str, Any] = {
    "sample.gumbel": (_temperature_kernel,),
    "sample.min_p": (_min_p_kernel,),
    "sample.penalties": (_penalties_kernel, _bincount_kernel),
    "sample.logit_bias": (_bias_kernel,),
    "sample.bad_words": (_bad_words_kernel,),
    "sample.logprob": (_topk_log_softmax_kernel, _ranks_kernel, _fill_logprob_token_ids_kernel),
}
"""As :data:`hal_vllm.batch_kernels.KERNELS`."""
