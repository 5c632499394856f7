"""One step's batch, its validation, and the index plan for a few gathers over all rows at once.

Plain NumPy without a framework, so the plan is tested without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hal_core import InvalidValue
from hal_engine.model.config import LlamaConfig

SHORT = 8
"""Rows of up to so many tokens are padded to one another: rows that verify drafts."""


@dataclass(frozen=True)
class ModelBatch:
    """The tokens of all rows of a step in row order; decode rows and prefill chunks mix freely."""

    token_ids: np.ndarray
    """int64 ``[tokens]``, each below the vocabulary's size."""
    positions: np.ndarray
    """int64 ``[tokens]``: position of each token in its sequence, starting at the row's context length."""
    row_lengths: np.ndarray
    """int32 ``[rows]``: how many of the tokens belong to each row, at least 1."""
    context_lengths: np.ndarray
    """int32 ``[rows]``: tokens of the row already in the cache."""
    block_tables: np.ndarray
    """int32 ``[rows, max_blocks]``: physical block of each ``block_size`` positions, -1 for missing ones."""
    outputs: np.ndarray | None = None
    """int64 ``[n]``: tokens whose logits are requested, as rising indices into ``token_ids``; None: each row's last
    token."""


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a paged cache, laid out ``[2, blocks + 1, kv_heads, block_size, head_dim]``, keys before values.

    A head's tokens of one block are contiguous, so that reading copies long rows. The last block is always zero;
    padding reads it.
    """

    blocks: int
    block_size: int

    def __post_init__(self) -> None:
        for name, value in (("blocks", self.blocks), ("block_size", self.block_size)):
            if value < 1:
                raise InvalidValue(f"{value} is below 1", cure="give a positive count", argument=name)

    def slots(self, config: LlamaConfig) -> int:
        """Return the rows of a layer, ``[slots, head_dim]``, of the keys and the values."""
        return 2 * (self.blocks + 1) * config.num_key_value_heads * self.block_size

    @property
    def piece(self) -> int:
        """Tokens of a head that are read together: at most 16, and a divisor of the block size."""
        return math.gcd(self.block_size, 16)


@dataclass(frozen=True)
class GroupPlan:
    """Attention of rows that are padded to one another: ``rows`` x ``queries`` tokens against ``keys`` positions.

    Its queries are contiguous, ``[rows, heads, queries, head_dim]``, and so are its results.
    """

    rows: int
    queries: int
    keys: int
    """A multiple of the cache's piece."""
    read_index: np.ndarray
    """int64 ``[2 * rows * kv_heads * keys / piece]``, keys before values, into a cache viewed as ``[…, piece *
    head_dim]``."""
    mask: np.ndarray
    """float32 ``[rows, kv_heads, heads_per_group * queries, keys]``, the scores' own shape: broadcasting a smaller one
    takes Paddle forty times as long on a CPU. 0 for allowed positions and -inf elsewhere; position 0 is allowed for
    every query."""


@dataclass(frozen=True)
class RowOrder:
    """Order of rows' tokens in the groups, which depends only on the lengths of the rows.

    Indices include the heads, so that one gather both collects and transposes.
    """

    query_index: np.ndarray
    """int64 ``[n]``: the queries of the groups in order, of ``[tokens * heads]``; padding repeats."""
    merge_index: np.ndarray
    """int64 ``[tokens * heads]`` into the groups' consecutive results."""


@dataclass(frozen=True)
class StepPlan:
    """Index plan shared by a step's layers. Slots are rows of a cache viewed as ``[…, head_dim]``."""

    write_index: np.ndarray
    """int64 ``[2 * tokens * kv_heads]``: the slots of the step's tokens, keys before values."""
    clear_index: np.ndarray | None
    """int64: slots after a row's last token in a block that this step begins; None if there are none."""
    groups: tuple[GroupPlan, ...]
    outputs: np.ndarray
    """int64 ``[n]``: index of each token whose logits are requested."""


def check_batch(batch: ModelBatch, config: LlamaConfig, cache: CacheShape) -> None:
    """Raise ``InvalidValue`` naming the field unless the batch can be computed; nothing is written before."""
    lengths, contexts = batch.row_lengths, batch.context_lengths
    rows, tokens = lengths.size, batch.token_ids.size
    tables = batch.block_tables
    _require(rows > 0 and lengths.shape == (rows,) and lengths.min() > 0, "row_lengths", "must be [rows] of 1 or more")
    _require(contexts.shape == (rows,) and contexts.min() >= 0, "context_lengths", "must be [rows] of 0 or more")
    _require(tables.ndim == 2 and len(tables) == rows, "block_tables", "must be [rows, max_blocks]")
    _require(batch.token_ids.shape == (int(lengths.sum()),), "token_ids", "must be as many as row_lengths add up to")
    _require(batch.positions.shape == (tokens,), "positions", "must be as many as token_ids")
    low, high = int(batch.token_ids.min()), int(batch.token_ids.max())
    _require(low >= 0 and high < config.vocab_size, "token_ids", f"must be 0 to {config.vocab_size - 1}")
    expected = contexts if tokens == rows else _row_starts(contexts, lengths) + np.arange(tokens)
    _require(bool((batch.positions == expected).all()), "positions", "must continue each row from its context length")
    limit = config.max_position_embeddings
    _require(
        int(batch.positions.max()) < limit,
        "positions",
        f"must be below max_position_embeddings={limit}; shorten the row",
    )
    totals = contexts.astype(np.int64) + lengths
    needed = -(-totals // cache.block_size)
    _require(int(needed.max()) <= tables.shape[1], "block_tables", "has fewer blocks than a row's tokens need")
    used = tables[np.arange(tables.shape[1]) < needed[:, None]]
    _require(used.min() >= 0 and used.max() < cache.blocks, "block_tables", f"must name blocks 0 to {cache.blocks - 1}")
    if (outputs := batch.outputs) is not None and outputs.size:
        rising = bool((outputs[1:] > outputs[:-1]).all())
        _require(rising and outputs[0] >= 0 and outputs[-1] < tokens, "outputs", f"must rise from 0 to {tokens - 1}")


def _require(holds: bool | np.bool_, argument: str, what: str) -> None:
    if not holds:
        raise InvalidValue(what, cure="correct the batch; nothing was computed", argument=f"batch.{argument}")


def _row_starts(contexts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return int64 ``[tokens]``: position of token ``t`` less ``t``, constant inside a row."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.repeat(contexts - (ends - lengths), lengths)


def plan_step(batch: ModelBatch, config: LlamaConfig, cache: CacheShape) -> StepPlan:
    """Return the index plan of a valid batch.

    Rows of one token, of a few (a token and its drafts) and longer ones form a group each, so that a decode row is
    never padded to a prefill chunk. The mask hides positions after a row's last token, but a hidden NaN would still
    come through as NaN times a weight of zero. So the rest of a block is cleared when its first token is written, and
    missing blocks of a row are read from the zero block. Data of other requests are therefore never read.
    """
    lengths = batch.row_lengths
    if batch.token_ids.size == lengths.size:  # every row is one token, as in most steps
        write_rows = last = np.arange(lengths.size)
        groups = [_plan_group(batch, config, cache, write_rows)]
    else:
        write_rows, last = np.repeat(np.arange(lengths.size), lengths), np.cumsum(lengths, dtype=np.int64) - 1
        groups = [_plan_group(batch, config, cache, rows) for rows in by_length(lengths)]
    return StepPlan(
        write_index=slots_of(batch, config, cache, write_rows, batch.positions),
        clear_index=slots_after(batch, config, cache),
        groups=tuple(groups),
        outputs=last if batch.outputs is None else batch.outputs,
    )


def padded(count: int) -> int:
    """Return the class of a size: the next number of two significant bits, at most a half larger, above 64 of three, at
    most a quarter larger."""
    step = 1 << max(0, (int(count) - 1).bit_length() - (2 if count <= 64 else 3))
    return -(-int(count) // step) * step


def order_rows(lengths: np.ndarray, config: LlamaConfig, size: Callable[[int], int] = int) -> RowOrder | None:
    """Return the order of rows of these lengths; None if every row is one token, whose queries and heads are in
    order. ``size``: how many rows, and queries of each, a group has instead of these many."""
    if (lengths == 1).all():
        return None
    heads, firsts = np.arange(config.num_attention_heads), np.cumsum(lengths, dtype=np.int64) - lengths
    merge_index = np.empty((int(lengths.sum()), heads.size), np.int64)
    queries: list[np.ndarray] = []
    start = 0
    for rows in by_length(lengths):
        offsets = np.arange(size(lengths[rows].max()))
        inside = np.zeros((size(rows.size), offsets.size), bool)
        inside[: rows.size] = offsets < lengths[rows][:, None]
        tokens = np.where(inside, offsets, 0)
        tokens[: rows.size] += firsts[rows][:, None]
        queries.append((tokens[:, None, :] * heads.size + heads[:, None]).reshape(-1))
        row, query = np.nonzero(inside)
        merge_index[tokens[row, query]] = start + (row[:, None] * heads.size + heads) * offsets.size + query[:, None]
        start += tokens.size * heads.size
    return RowOrder(np.concatenate(queries), merge_index.reshape(-1))


@dataclass(frozen=True)
class RunPlan:
    """Several steps of the same rows, a token of each row in each; all read the blocks that the last one needs."""

    positions: np.ndarray
    """int64 ``[steps, rows]``."""
    write_index: np.ndarray
    """int64 ``[steps, 2 * rows * kv_heads]``, keys before values."""
    group: GroupPlan
    """With the mask of the first step."""
    masks: np.ndarray
    """float32 ``[steps, rows, kv_heads, heads_per_group, keys]``."""


def plan_run(
    tables: np.ndarray, first: np.ndarray, reach: np.ndarray, count: int, config: LlamaConfig, cache: CacheShape
) -> RunPlan:
    """Return the plan of ``count`` tokens of each row, starting at positions ``first`` int64 ``[rows]``, one after the
    other; those after the first ``reach`` int64 ``[rows]`` overwrite the last of these."""
    size, kv_heads, rows = cache.block_size, config.num_key_value_heads, len(first)
    positions = first + np.minimum(np.arange(count)[:, None], reach - 1)
    read_index, keys = pieces_of(tables, positions[-1] + 1, config, cache)
    slots = np.take_along_axis(tables, positions.T // size, axis=1).T.astype(np.int64)
    index = (slots[..., None] * kv_heads + np.arange(kv_heads)) * size + (positions % size)[..., None]
    mask = np.where(np.arange(keys) <= positions[..., None], np.float32(0), np.float32(-np.inf))
    masks = np.tile(mask[:, :, None, None], (1, 1, kv_heads, config.heads_per_group, 1))
    group = GroupPlan(rows, 1, keys, read_index, masks[0])
    return RunPlan(positions, _with_values(index.reshape(count, -1), config, cache), group, masks)


def pieces_of(
    tables: np.ndarray,
    totals: np.ndarray,
    config: LlamaConfig,
    cache: CacheShape,
    size: Callable[[int], int] = int,
) -> tuple[np.ndarray, int]:
    """Return ``GroupPlan.read_index`` of rows with so many tokens, int64 ``[rows]``, and ``GroupPlan.keys``; ``size``:
    how many pieces are read instead of these many."""
    piece = cache.piece
    parts, needed = cache.block_size // piece, -(-totals // piece)
    pieces = np.arange(size(needed.max()))
    blocks = np.minimum(pieces // parts, tables.shape[1] - 1)
    table = np.where(pieces < needed[:, None], tables[:, blocks], cache.blocks).astype(np.int64)
    heads = np.arange(config.num_key_value_heads)
    index = ((table[:, None, :] * heads.size + heads[:, None]) * parts + pieces % parts).reshape(-1)
    behind = (cache.blocks + 1) * heads.size * parts
    return np.concatenate([index, index + behind]), len(pieces) * piece


def _with_values(index: np.ndarray, config: LlamaConfig, cache: CacheShape) -> np.ndarray:
    """Return slots of keys, followed by those of the same tokens' values."""
    behind = (cache.blocks + 1) * config.num_key_value_heads * cache.block_size
    return np.concatenate([index, index + behind], axis=-1)


def by_length(lengths: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each group, which are padded to one another."""
    kinds = (lengths == 1, (lengths > 1) & (lengths <= SHORT), lengths > SHORT)
    return [rows for kind in kinds if (rows := np.flatnonzero(kind)).size]


def slots_after(batch: ModelBatch, config: LlamaConfig, cache: CacheShape) -> np.ndarray | None:
    """Return int64: the slots after each row's last token in a block that is new to the row."""
    size = cache.block_size
    totals = batch.context_lengths.astype(np.int64) + batch.row_lengths
    left = np.where(totals // size * size >= batch.context_lengths, -totals % size, 0)
    count = int(left.sum())
    if not count:
        return None
    positions = np.repeat(totals - (np.cumsum(left) - left), left) + np.arange(count)
    return slots_of(batch, config, cache, np.repeat(np.arange(left.size), left), positions)


def slots_of(
    batch: ModelBatch, config: LlamaConfig, cache: CacheShape, rows: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """Return int64 ``[2 * n * kv_heads]``: the slots of these positions of these rows, the heads of a token adjacent,
    keys before values."""
    size, kv_heads = cache.block_size, config.num_key_value_heads
    blocks = batch.block_tables[rows, positions // size].astype(np.int64)
    index = (blocks[:, None] * kv_heads + np.arange(kv_heads)) * size + (positions % size)[:, None]
    return _with_values(index.reshape(-1), config, cache)


def _plan_group(batch: ModelBatch, config: LlamaConfig, cache: CacheShape, rows: np.ndarray) -> GroupPlan:
    """Return the plan of the rows with these numbers."""
    lengths, contexts = batch.row_lengths[rows], batch.context_lengths[rows].astype(np.int64)
    read_index, keys = pieces_of(batch.block_tables[rows], contexts + lengths, config, cache)
    queries = int(lengths.max())
    offsets, position = np.arange(queries), np.arange(keys)
    visible = position <= (contexts[:, None] + np.minimum(offsets, lengths[:, None] - 1))[:, :, None]
    mask = np.where(visible, np.float32(0), np.float32(-np.inf))[:, None]
    mask = np.tile(mask, (1, config.num_key_value_heads, config.heads_per_group, 1))
    return GroupPlan(len(rows), queries, keys, read_index, mask)
