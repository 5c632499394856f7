"""Kernels of seeded sampling: what a request's parameters do to its logits, and log-probabilities.

Some wait for the device (a loop's length is read from it); none is part of a captured graph. Top-k and top-p are vLLM's
own operations of torch where there is no Triton.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from .launching import kernel
from .runs import Runs

MINUS = float("-inf")


@kernel("sample.gumbel", "logits_ptr logits_stride expanded_idx_mapping_ptr temperature_ptr vocab_size BLOCK_SIZE")
def _temperature_kernel(a: SimpleNamespace) -> None:
    """Logits over temperature, in place; 0 is left to the argmax."""
    heat = a.temperature[a.expanded_idx_mapping].float()
    a.logits[:, : a.vocab_size].div_(torch.where(heat == 0, 1.0, heat)[:, None])


@kernel("sample.min_p", "logits_ptr logits_stride expanded_idx_mapping_ptr min_p_ptr vocab_size BLOCK_SIZE")
def _min_p_kernel(a: SimpleNamespace) -> None:
    """Drop what is less likely than ``min_p`` of the best token."""
    logits, share = a.logits[:, : a.vocab_size], a.min_p[a.expanded_idx_mapping].float()
    threshold = logits.amax(-1).float() + share.log()
    logits.masked_fill_((logits < threshold[:, None]) & (share != 0)[:, None], MINUS)


@kernel(
    "sample.penalties",
    "logits_ptr logits_stride expanded_idx_mapping_ptr token_ids_ptr expanded_local_pos_ptr "
    "repetition_penalty_ptr frequency_penalty_ptr presence_penalty_ptr prompt_bin_mask_ptr "
    "prompt_bin_mask_stride output_bin_counts_ptr output_bin_counts_stride vocab_size BLOCK_SIZE",
)
def _penalties_kernel(a: SimpleNamespace) -> None:
    """Repetition, frequency and presence; the drafts before a row count as output."""
    rows, local = a.expanded_idx_mapping, a.expanded_local_pos.long()
    logits = a.logits[:, : a.vocab_size]
    counts = a.output_bin_counts[rows, : a.vocab_size]
    first = torch.arange(rows.shape[0], device=rows.device) - local
    for before in range(int(local.max()) if local.numel() else 0):
        some = local > before
        tokens = a.token_ids[torch.where(some, first + before + 1, 0)].long()
        counts.scatter_add_(1, tokens[:, None], some[:, None].to(counts.dtype))
    repetition = a.repetition_penalty[rows][:, None]
    seen = _unpacked(a.prompt_bin_mask[rows])[:, : a.vocab_size] | (counts > 0)
    scale = torch.where(seen, repetition, 1.0)
    logits.mul_(torch.where(logits > 0, 1.0 / scale, scale))
    logits.sub_(a.frequency_penalty[rows][:, None] * counts)
    logits.sub_(a.presence_penalty[rows][:, None] * (counts > 0))


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """Return the bits of int32 words ``[n, words]``, lowest first, as bool ``[n, 32 * words]``."""
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    return (bits & 1).bool().view(words.shape[0], -1)


@kernel(
    "sample.penalties",
    "expanded_idx_mapping_ptr all_token_ids_ptr all_token_ids_stride prompt_len_ptr prefill_len_ptr "
    "prompt_bin_mask_ptr prompt_bin_mask_stride output_bin_counts_ptr output_bin_counts_stride BLOCK_SIZE",
)
def _bincount_kernel(a: SimpleNamespace) -> None:
    """Which tokens a new request's prompt has, and how often each one of its output."""
    rows, words = a.expanded_idx_mapping.long(), a.prompt_bin_mask.shape[1]
    lens, prompt = a.prefill_len[rows][:, None], a.prompt_len[rows][:, None]
    width = int(lens.max()) if lens.numel() else 0
    tokens = a.all_token_ids[rows, :width].long()
    places = torch.arange(width, device=rows.device)
    none = torch.full_like(tokens, words * 32)  # a column of its own for what is masked out
    seen = torch.zeros((rows.shape[0], words * 32 + 1), dtype=torch.int64, device=rows.device)
    seen.scatter_(1, torch.where(places < prompt, tokens, none), 1)
    bits = seen[:, :-1].view(rows.shape[0], words, 32) << torch.arange(32, device=rows.device)
    a.prompt_bin_mask[rows] |= bits.sum(-1).to(torch.int32)
    output = (places >= prompt) & (places < lens)
    at = torch.where(output, rows[:, None] * a.output_bin_counts_stride + tokens, 0).reshape(-1)
    a.output_bin_counts.view(-1).index_add_(0, at, output.reshape(-1).to(a.output_bin_counts.dtype))


@kernel(
    "sample.logit_bias",
    "logits_ptr logits_stride vocab_size expanded_idx_mapping_ptr num_allowed_token_ids_ptr "
    "allowed_token_ids_ptr allowed_token_ids_stride num_logit_bias_ptr bias_token_ids_ptr "
    "bias_token_ids_stride bias_ptr bias_stride pos_ptr min_lens_ptr num_stop_token_ids_ptr "
    "restore_when_all_masked_ptr stop_token_ids_ptr stop_token_ids_stride BLOCK_SIZE LOGITS_BLOCK_SIZE "
    "CHECK_ALL_MASKED_ROWS",
)
def _bias_kernel(a: SimpleNamespace) -> None:
    """Allowed tokens, then biases, then no stop token before ``min_tokens``."""
    rows, logits = a.expanded_idx_mapping, a.logits[:, : a.vocab_size]
    wide = torch.cat([logits, logits.new_zeros((rows.shape[0], 1))], 1)  # the last column takes what is masked out

    def places(ids: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        some = torch.arange(ids.shape[1], device=ids.device) < counts[:, None]
        return torch.where(some, ids[rows].long(), a.vocab_size)

    counts = a.num_allowed_token_ids[rows]
    allowed = places(a.allowed_token_ids, counts)
    only = torch.full_like(wide, MINUS).scatter_(1, allowed, wide.gather(1, allowed))
    wide = torch.where((counts > 0)[:, None], only, wide)
    biased = places(a.bias_token_ids, a.num_logit_bias[rows])
    wide.scatter_add_(1, biased, a.bias[rows].masked_fill(biased == a.vocab_size, 0.0).to(wide.dtype))
    short = a.pos + 1 < a.min_lens[rows]
    stops = places(a.stop_token_ids, a.num_stop_token_ids[rows].masked_fill(~short, 0))
    before = wide.gather(1, stops)
    wide.scatter_(1, stops, MINUS)
    if a.CHECK_ALL_MASKED_ROWS:
        nothing = (wide[:, : a.vocab_size].amax(-1) == MINUS) & (a.restore_when_all_masked[rows] != 0)
        back = nothing[:, None] & before.isfinite()
        wide.scatter_(1, torch.where(back, stops, a.vocab_size), torch.where(back, before, 0.0))
    logits.copy_(wide[:, : a.vocab_size])


@kernel(
    "sample.bad_words",
    "logits_ptr logits_stride expanded_idx_mapping_ptr bad_word_token_ids_ptr bad_word_token_ids_stride "
    "bad_word_offsets_ptr bad_word_offsets_stride num_bad_words_ptr all_token_ids_ptr "
    "all_token_ids_stride prompt_len_ptr total_len_ptr input_ids_ptr expanded_local_pos_ptr",
)
def _bad_words_kernel(a: SimpleNamespace) -> None:
    """Drop the last token of a bad word whose others were just put out, drafts included."""
    rows, local = a.expanded_idx_mapping, a.expanded_local_pos.long()
    words, prompt = a.num_bad_words[rows], a.prompt_len[rows]
    output = a.total_len[rows] - prompt
    known = output + local
    first = torch.arange(rows.shape[0], device=rows.device) - local
    for word in range(int(words.max()) if words.numel() else 0):
        has = words > word
        begin, end = a.bad_word_offsets[rows, word], a.bad_word_offsets[rows, word + 1]
        prefix = torch.where(has, end - begin - 1, 0)
        match = has & (prefix <= known)
        for i in range(int(prefix.max())):
            at = known - prefix + i
            draft = a.input_ids[(first + at - output + 1).clamp(0, rows.shape[0] - 1)]
            kept = a.all_token_ids[rows, (prompt + at).clamp(0, a.all_token_ids.shape[1] - 1)]
            expected = a.bad_word_token_ids[rows, (begin + i).clamp(0, a.bad_word_token_ids.shape[1] - 1)]
            match &= (i >= prefix) | (torch.where(at >= output, draft, kept) == expected)
        last = a.bad_word_token_ids[rows, (end - 1).clamp(0, a.bad_word_token_ids.shape[1] - 1)]
        hit = match.nonzero().view(-1)
        a.logits[hit, last[hit].long()] = MINUS


@kernel(
    "sample.logprob",
    "output_ptr logits_ptr logits_stride topk_ids_ptr topk_ids_stride topk vocab_size BLOCK_SIZE TOPK_BLOCK_SIZE",
)
def _topk_log_softmax_kernel(a: SimpleNamespace) -> None:
    """Log-probabilities of some tokens; float32."""
    logits = a.logits[:, : a.vocab_size].float()
    best = logits.amax(-1, keepdim=True)
    together = (logits - best).exp().sum(-1, keepdim=True).log()
    a.output[:, : a.topk] = logits.gather(1, a.topk_ids[:, : a.topk]) - best - together


@kernel("sample.logprob", "output_ptr logits_ptr logits_stride token_ids_ptr vocab_size BLOCK_SIZE")
def _ranks_kernel(a: SimpleNamespace) -> None:
    """The rank of a token: how many are at least as likely."""
    logits = a.logits[:, : a.vocab_size]
    chosen = logits.gather(1, a.token_ids.long()[:, None])
    rest = -a.vocab_size % a.BLOCK_SIZE  # of the last block: it counts where the token itself is impossible
    a.output.copy_((logits >= chosen).sum(-1) + torch.where(chosen[:, 0] == MINUS, rest, 0))


@kernel(
    "sample.logprob",
    "out_token_ids_ptr out_token_ids_stride out_valid_mask_ptr out_valid_mask_stride "
    "sampled_token_ids_ptr topk_indices_ptr topk_indices_stride expanded_idx_mapping_ptr "
    "num_per_req_token_ids_ptr per_req_token_ids_ptr per_req_token_ids_stride NUM_TOPK PADDED_COLS",
)
def _fill_logprob_token_ids_kernel(a: SimpleNamespace) -> None:
    """The tokens whose log-probabilities are wanted: the sampled one, then a request's own or the best."""
    a.out_token_ids[:, 0], a.out_valid_mask[:, 0] = a.sampled_token_ids, True
    rows, width = a.expanded_idx_mapping, a.out_token_ids.shape[1] - 1
    columns = torch.arange(width, device=rows.device)
    custom = a.num_per_req_token_ids[rows][:, None]
    own = a.per_req_token_ids[rows[:, None], columns.clamp(max=a.per_req_token_ids.shape[1] - 1)].long()
    best = own if a.NUM_TOPK == 0 else a.topk_indices[:, columns.clamp(max=a.NUM_TOPK - 1)].long()
    valid = columns < torch.where(custom > 0, custom, a.NUM_TOPK)
    a.out_token_ids[:, 1:] = torch.where(valid, torch.where(custom > 0, own, best), a.out_token_ids[:, 1:])
    a.out_valid_mask[:, 1:] |= valid


@kernel(
    "sample.prompt_logprob",
    "prompt_logprobs_token_ids_ptr query_start_loc_ptr idx_mapping_ptr num_computed_tokens_ptr all_token_ids_ptr "
    "all_token_ids_stride BLOCK_SIZE",
)
def _prompt_logprobs_token_ids_kernel(a: SimpleNamespace) -> None:
    """The token that follows each token of the batch."""
    rows, out = a.idx_mapping.long(), a.prompt_logprobs_token_ids
    tokens = Runs(a.query_start_loc[: rows.shape[0] + 1], out.shape[0])
    flat = a.all_token_ids.view(-1)
    at = rows[tokens.of] * a.all_token_ids_stride + a.num_computed_tokens[rows][tokens.of] + 1 + tokens.local
    tokens.fill(out, flat[at.clamp(max=flat.shape[0] - 1)])


@kernel(
    "structured_outputs",
    "logits_ptr logits_stride logits_indices_ptr cu_num_logits_ptr bitmask_ptr bitmask_stride vocab_size MASK_STRIDE "
    "BLOCK_SIZE",
)
def _apply_grammar_bitmask_kernel(a: SimpleNamespace) -> None:
    """Drop the tokens that a grammar forbids: the bits that are 0."""
    places = a.logits_indices.long()
    requests, local = places // a.MASK_STRIDE, places % a.MASK_STRIDE
    starts = a.cu_num_logits.long()
    some = (local < starts[requests + 1] - starts[requests]).nonzero().view(-1)
    rows = (starts[requests] + local)[some]
    allowed = _unpacked(a.bitmask[some])[:, : a.vocab_size]
    a.logits[rows, : a.vocab_size] = a.logits[rows, : a.vocab_size].masked_fill(~allowed, MINUS)
