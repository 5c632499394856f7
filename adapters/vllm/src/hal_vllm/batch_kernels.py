"""Kernels of each step around the model: its inputs, and what follows from its tokens.

They have vLLM's names and parameters, and wait for nothing, so that they can be captured into a graph. Sizes come from
the tensors, as the registry drops the grid.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hal_core import Unavailable

from .launching import kernel
from .runs import Runs, most_of, put

PAD = -1
"""A slot that is none."""


@kernel(
    "buffer_utils",
    "output_ptr output_stride write_indices_ptr write_starts_ptr write_contents_ptr write_cu_lens_ptr "
    "write_group_ids_ptr BLOCK_SIZE MULTI_GROUP",
)
def _apply_write_kernel(a: SimpleNamespace) -> None:
    """vLLM's own row writes, with ``HAL_VLLM=kernels``."""
    if a.MULTI_GROUP:
        what = "vLLM's own buffers write several KV cache groups by addresses"
        raise Unavailable(what, cure="set HAL_VLLM=on", hook="_apply_write_kernel")
    flat = a.output.view(-1)
    begin = 0
    places = a.write_indices.long() * a.output_stride + a.write_starts
    for at, end in zip(places.tolist(), a.write_cu_lens.tolist(), strict=True):
        flat[at : at + end - begin] = a.write_contents[begin:end]
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
    for group, size in enumerate(self.block_sizes):
        kept = real & self.slot_mapping_enabled[group]
        blocks = torch.where(kept, where // size, 0)
        found = self.block_tables[group].gpu[rows, blocks].long() * size + where % size
        slots[group, : tokens.count] = torch.where(kept, found, PAD)
        slots[group, tokens.count :] = PAD
    return slots[:, :num_tokens_padded]


@kernel(
    "input_batch",
    "input_ids_ptr next_prefill_tokens_ptr next_prefill_tokens_stride num_lookahead idx_mapping_ptr "
    "query_start_loc_ptr all_token_ids_ptr all_token_ids_stride prefill_lens_ptr num_computed_tokens_ptr "
    "BLOCK_SIZE LOOKAHEAD_BLOCK",
)
def _prepare_prefill_inputs_kernel(a: SimpleNamespace) -> None:
    """The tokens of requests in prefill, and those that follow them."""
    rows, every = a.idx_mapping, a.all_token_ids
    starts, last = a.query_start_loc[: rows.shape[0] + 1], every.shape[1] - 1
    computed, lens = a.num_computed_tokens[rows], a.prefill_lens[rows]
    prefill = computed < lens
    tokens = Runs(starts, a.input_ids.shape[0])
    mask = tokens.inside & prefill[tokens.of]
    where = (computed[tokens.of] + tokens.local).clamp(max=last)
    tokens.fill(a.input_ids, every[rows[tokens.of], where], mask)
    for ahead in range(a.num_lookahead):
        at = computed + starts.diff() + ahead
        follows = torch.where(at < lens, every[rows, at.clamp(max=last)], 0)
        put(a.next_prefill_tokens[ahead], rows, follows, prefill)


@kernel(
    "input_batch",
    "pos_ptr seq_lens_ptr idx_mapping_ptr query_start_loc_ptr num_computed_tokens_ptr max_num_reqs BLOCK_SIZE",
)
def _prepare_pos_seq_lens_kernel(a: SimpleNamespace) -> None:
    """The position of each token, and the length of each request with this step."""
    n = a.idx_mapping.shape[0]
    starts, computed = a.query_start_loc[: n + 1], a.num_computed_tokens[a.idx_mapping]
    a.seq_lens[:n] = computed + starts.diff()
    a.seq_lens[n : a.max_num_reqs] = 0
    tokens = Runs(starts, a.pos.shape[0])
    tokens.fill(a.pos, computed[tokens.of] + tokens.local)


@kernel(
    "input_batch",
    "input_ids_ptr idx_mapping_ptr last_sampled_tokens_ptr query_start_loc_ptr seq_lens_ptr "
    "prefill_len_ptr draft_tokens_ptr draft_tokens_stride cu_num_logits_ptr logits_indices_ptr BLOCK_SIZE "
    "NUM_NEW_SAMPLED_TOKENS=1",
)
def _combine_sampled_and_draft_tokens_kernel(a: SimpleNamespace) -> None:
    """The last sampled token and the drafts of requests past their prefill, and the places of all logits."""
    n, fresh = a.idx_mapping.shape[0], a.NUM_NEW_SAMPLED_TOKENS
    logits = Runs(a.cu_num_logits[: n + 1], a.logits_indices.shape[0])
    counts = a.cu_num_logits[: n + 1].diff()[logits.of]
    where = (a.query_start_loc[1 : n + 1][logits.of] - counts + logits.local).long()
    logits.fill(a.logits_indices, where)
    rows, lens = a.idx_mapping[logits.of], a.seq_lens[:n][logits.of]
    begin = a.prefill_len[rows]
    sampled, tokens = logits.local < fresh, a.last_sampled_tokens.view(-1)[rows]
    if (steps := a.draft_tokens.shape[1]) > 0:
        drafts = a.draft_tokens[rows, (logits.local - fresh).clamp(0, steps - 1).long()]
        tokens = torch.where(sampled, tokens, drafts)
    mask = logits.inside & (lens > begin) & (~sampled | (lens - counts >= begin))
    put(a.input_ids, where, tokens, mask)


@kernel(
    "input_batch",
    "num_sampled_ptr num_rejected_ptr seq_lens_ptr cu_num_logits_ptr idx_mapping_ptr prefill_len_ptr",
)
def _get_num_sampled_and_rejected_kernel(a: SimpleNamespace) -> None:
    """How many tokens count: none in the middle of a prefill."""
    n = a.idx_mapping.shape[0]
    middle = a.seq_lens[:n] < a.prefill_len[a.idx_mapping]
    sampled = a.num_sampled[:n].masked_fill_(middle, 0)
    a.num_rejected[:n] = (a.cu_num_logits[: n + 1].diff() - sampled).masked_fill(middle, 0)


@kernel(
    "input_batch",
    "idx_mapping_ptr num_computed_tokens_ptr last_sampled_tokens_ptr output_bin_counts_ptr "
    "output_bin_counts_stride sampled_tokens_ptr sampled_tokens_stride num_sampled_ptr num_rejected_ptr "
    "query_start_loc_ptr all_token_ids_ptr all_token_ids_stride total_len_ptr",
)
def _post_update_kernel(a: SimpleNamespace) -> None:
    """What a step's tokens change; a row with a negative number is left alone."""
    n, keep = a.idx_mapping.shape[0], a.idx_mapping >= 0
    rows = a.idx_mapping.clamp(min=0).long()
    tokens, counts = a.sampled_tokens[:n], torch.where(keep, a.num_sampled[:n], 0)
    steps = torch.arange(tokens.shape[1], device=rows.device)
    some, mask = counts > 0, steps < counts[:, None]
    last = tokens.gather(1, (counts - 1).clamp(min=0).long()[:, None])
    put(a.last_sampled_tokens, rows, last, some)
    total = a.total_len[rows]
    put(a.all_token_ids, rows[:, None] * a.all_token_ids_stride + total[:, None] + steps, tokens, mask)
    a.total_len.index_add_(0, rows, counts.to(a.total_len.dtype))
    if a.output_bin_counts is not None:
        bins = torch.where(mask, rows[:, None] * a.output_bin_counts_stride + tokens, 0).reshape(-1).long()
        a.output_bin_counts.view(-1).index_add_(0, bins, mask.reshape(-1).to(a.output_bin_counts.dtype))
    queries = 0 if a.query_start_loc is None else a.query_start_loc[: n + 1].diff()
    change = torch.where(keep, queries - a.num_rejected[:n], 0)
    a.num_computed_tokens.index_add_(0, rows, change.to(a.num_computed_tokens.dtype))


@kernel("input_batch", "idx_mapping_ptr num_computed_tokens_ptr query_start_loc_ptr")
def _post_update_num_computed_tokens_kernel(a: SimpleNamespace) -> None:
    """The same for steps without sampling."""
    queries = a.query_start_loc[: a.idx_mapping.shape[0] + 1].diff()
    a.num_computed_tokens.index_add_(0, a.idx_mapping.long(), queries.to(a.num_computed_tokens.dtype))


@kernel("input_batch", "idx_mapping_ptr expanded_idx_mapping_ptr expanded_local_pos_ptr cu_num_logits_ptr BLOCK_SIZE")
def _expand_idx_mapping_kernel(a: SimpleNamespace) -> None:
    """The request of each logits row, and the row's number in it."""
    logits = Runs(a.cu_num_logits[: a.idx_mapping.shape[0] + 1], a.expanded_idx_mapping.shape[0])
    logits.fill(a.expanded_idx_mapping, a.idx_mapping[logits.of])
    logits.fill(a.expanded_local_pos, logits.local)
