"""Kernels of each step around the model: its inputs, and what follows from its tokens.

They have vLLM's names and parameters, and wait for nothing, so that they can be captured into a graph. Sizes come from
the tensors, as the registry drops the grid.
"""

from __future__ import annotations

from typing import Any

import torch
from hal_core import Unavailable

from .runs import Runs, most_of, put

PAD = -1
"""A slot that is none."""


def _apply_write_kernel(
    output_ptr: torch.Tensor,
    output_stride: int,
    write_indices_ptr: torch.Tensor,
    write_starts_ptr: torch.Tensor,
    write_contents_ptr: torch.Tensor,
    write_cu_lens_ptr: torch.Tensor,
    write_group_ids_ptr: torch.Tensor | None,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> None:
    """vLLM's own row writes, with ``HAL_VLLM=kernels``."""
    if MULTI_GROUP:
        what = "vLLM's own buffers write several KV cache groups by addresses"
        raise Unavailable(what, cure="set HAL_VLLM=on", hook="_apply_write_kernel")
    flat = output_ptr.view(-1)
    begin = 0
    places = write_indices_ptr.long() * output_stride + write_starts_ptr
    for at, end in zip(places.tolist(), write_cu_lens_ptr.tolist(), strict=True):
        flat[at : at + end - begin] = write_contents_ptr[begin:end]
        begin = end


def gather_block_tables(
    self: Any,  # noqa: ANN401 (vLLM's BlockTables)
    idx_mapping: torch.Tensor,
    num_reqs_padded: int,
    out: tuple[torch.Tensor, ...] | None = None,
    out_ptrs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """``BlockTables.gather_block_tables``: the tables of the batch's requests, in its order; padded rows are zero."""
    out = tuple(self.input_block_tables) if out is None else out
    n, rows = idx_mapping.shape[0], idx_mapping.clamp(min=0)
    for group, target in enumerate(out):
        counts = self.num_blocks.gpu[group][rows]
        width = most_of(counts, target.shape[1])
        mask = torch.arange(width, device=target.device) < counts[:, None]
        part = target[:n, :width]
        part.copy_(torch.where(mask, self.block_tables[group].gpu[rows, :width], part))
        target[n:num_reqs_padded] = 0
    return tuple(target[:num_reqs_padded] for target in out)


def compute_slot_mappings(
    self: Any,  # noqa: ANN401 (vLLM's BlockTables)
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    num_tokens_padded: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``BlockTables.compute_slot_mappings``: the place in the KV cache of each token; int64 ``[groups, tokens]``."""
    if self.cp_size != 1:
        cure = "set decode_context_parallel_size=1, or give a kernel"
        raise Unavailable("context parallelism", cure=cure, hook="_compute_slot_mappings_kernel")
    slots = self.slot_mappings if out is None else out
    tokens = Runs(query_start_loc[: idx_mapping.shape[0] + 1], min(slots.shape[1], positions.shape[0]))
    rows = idx_mapping[tokens.of]
    real = tokens.inside & (rows >= 0)
    rows, where = rows.clamp(min=0), positions[: tokens.count]
    for group, (size, enabled) in enumerate(zip(self.block_sizes, self._slot_mapping_enabled, strict=True)):
        slots[group, tokens.count :] = PAD
        if not enabled:
            slots[group].fill_(PAD)
            continue
        blocks = torch.where(real, where // size, 0)
        found = self.block_tables[group].gpu[rows, blocks].long() * size + where % size
        slots[group, : tokens.count] = torch.where(real, found, PAD)
    return slots[:, :num_tokens_padded]


def _prepare_prefill_inputs_kernel(
    input_ids_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prefill_lens_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """The tokens of requests in prefill, and those that follow them."""
    rows, every = idx_mapping_ptr, all_token_ids_ptr
    starts, last = query_start_loc_ptr[: rows.shape[0] + 1], every.shape[1] - 1
    computed, lens = num_computed_tokens_ptr[rows], prefill_lens_ptr[rows]
    prefill = computed < lens
    tokens = Runs(starts, input_ids_ptr.shape[0])
    mask = tokens.inside & prefill[tokens.of]
    where = (computed[tokens.of] + tokens.local).clamp(max=last)
    ids = input_ids_ptr[: tokens.count]
    ids.copy_(torch.where(mask, every[rows[tokens.of], where], ids))
    for ahead in range(num_lookahead):
        at = computed + starts.diff() + ahead
        follows = torch.where(at < lens, every[rows, at.clamp(max=last)], 0)
        put(next_prefill_tokens_ptr[ahead], rows, follows, prefill)


def _prepare_pos_seq_lens_kernel(
    pos_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """The position of each token, and the length of each request with this step."""
    n = idx_mapping_ptr.shape[0]
    starts, computed = query_start_loc_ptr[: n + 1], num_computed_tokens_ptr[idx_mapping_ptr]
    seq_lens_ptr[:n] = computed + starts.diff()
    seq_lens_ptr[n:max_num_reqs] = 0
    tokens = Runs(starts, pos_ptr.shape[0])
    where = pos_ptr[: tokens.count]
    where.copy_(torch.where(tokens.inside, (computed[tokens.of] + tokens.local).to(where.dtype), where))


def _combine_sampled_and_draft_tokens_kernel(
    input_ids_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor,
    draft_tokens_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """The last sampled token and the drafts of requests past their prefill, and the places of all logits."""
    n, fresh = idx_mapping_ptr.shape[0], NUM_NEW_SAMPLED_TOKENS
    logits = Runs(cu_num_logits_ptr[: n + 1], logits_indices_ptr.shape[0])
    counts = cu_num_logits_ptr[: n + 1].diff()[logits.of]
    where = (query_start_loc_ptr[1 : n + 1][logits.of] - counts + logits.local).long()
    logits_indices_ptr[: logits.count] = torch.where(logits.inside, where, logits_indices_ptr[: logits.count])
    rows, lens = idx_mapping_ptr[logits.of], seq_lens_ptr[:n][logits.of]
    begin = prefill_len_ptr[rows]
    sampled, tokens = logits.local < fresh, last_sampled_tokens_ptr.view(-1)[rows]
    if (steps := draft_tokens_ptr.shape[1]) > 0:
        drafts = draft_tokens_ptr[rows, (logits.local - fresh).clamp(0, steps - 1).long()]
        tokens = torch.where(sampled, tokens, drafts)
    mask = logits.inside & (lens > begin) & (~sampled | (lens - counts >= begin))
    put(input_ids_ptr, where, tokens, mask)


def _get_num_sampled_and_rejected_kernel(
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
) -> None:
    """How many tokens count: none in the middle of a prefill."""
    n = idx_mapping_ptr.shape[0]
    middle = seq_lens_ptr[:n] < prefill_len_ptr[idx_mapping_ptr]
    sampled = num_sampled_ptr[:n].masked_fill_(middle, 0)
    num_rejected_ptr[:n] = (cu_num_logits_ptr[: n + 1].diff() - sampled).masked_fill(middle, 0)


def _post_update_kernel(
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    output_bin_counts_ptr: torch.Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: torch.Tensor,
    sampled_tokens_stride: int,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor | None,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
) -> None:
    """What a step's tokens change; a row with a negative number is left alone."""
    n, keep = idx_mapping_ptr.shape[0], idx_mapping_ptr >= 0
    rows = idx_mapping_ptr.clamp(min=0).long()
    tokens, counts = sampled_tokens_ptr[:n], torch.where(keep, num_sampled_ptr[:n], 0)
    steps = torch.arange(tokens.shape[1], device=rows.device)
    some, mask = counts > 0, steps < counts[:, None]
    last = tokens.gather(1, (counts - 1).clamp(min=0).long()[:, None])
    put(last_sampled_tokens_ptr, rows, last, some)
    total = total_len_ptr[rows]
    put(all_token_ids_ptr, rows[:, None] * all_token_ids_stride + total[:, None] + steps, tokens, mask)
    total_len_ptr.index_add_(0, rows, counts.to(total_len_ptr.dtype))
    if output_bin_counts_ptr is not None:
        bins = torch.where(mask, rows[:, None] * output_bin_counts_stride + tokens, 0).reshape(-1).long()
        output_bin_counts_ptr.view(-1).index_add_(0, bins, mask.reshape(-1).to(output_bin_counts_ptr.dtype))
    queries = 0 if query_start_loc_ptr is None else query_start_loc_ptr[: n + 1].diff()
    change = torch.where(keep, queries - num_rejected_ptr[:n], 0)
    num_computed_tokens_ptr.index_add_(0, rows, change.to(num_computed_tokens_ptr.dtype))


def _post_update_num_computed_tokens_kernel(
    idx_mapping_ptr: torch.Tensor, num_computed_tokens_ptr: torch.Tensor, query_start_loc_ptr: torch.Tensor
) -> None:
    """The same for steps without sampling."""
    queries = query_start_loc_ptr[: idx_mapping_ptr.shape[0] + 1].diff()
    num_computed_tokens_ptr.index_add_(0, idx_mapping_ptr.long(), queries.to(num_computed_tokens_ptr.dtype))


def _expand_idx_mapping_kernel(
    idx_mapping_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    BLOCK_SIZE: int,
) -> None:
    """The request of each logits row, and the row's number in it."""
    logits = Runs(cu_num_logits_ptr[: idx_mapping_ptr.shape[0] + 1], expanded_idx_mapping_ptr.shape[0])
    for target, values in (
        (expanded_idx_mapping_ptr[: logits.count], idx_mapping_ptr[logits.of]),
        (expanded_local_pos_ptr[: logits.count], logits.local),
    ):
        target.copy_(torch.where(logits.inside, values.to(target.dtype), target))


KERNELS: dict[str, Any] = {
    "buffer_utils": (_apply_write_kernel,),
    "input_batch": (
        _prepare_prefill_inputs_kernel,
        _prepare_pos_seq_lens_kernel,
        _combine_sampled_and_draft_tokens_kernel,
        _get_num_sampled_and_rejected_kernel,
        _post_update_kernel,
        _post_update_num_computed_tokens_kernel,
        _expand_idx_mapping_kernel,
    ),
}
"""Module of vLLM's ``v1/worker/gpu`` to its kernels here."""
