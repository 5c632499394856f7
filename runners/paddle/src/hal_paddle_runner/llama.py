"""The decoder: Llama, Mistral, Qwen2 and Qwen3 architecture in Paddle, float32, with a paged cache.

Sources: RMSNorm, Zhang & Sennrich 2019; rotary positions, Su et al. 2021, in the half-split layout of Llama
checkpoints; grouped-query attention, Ainslie et al. 2023; SwiGLU, Shazeer 2020; normed queries and keys, Qwen3 (2025).

A step is a fixed, small number of operators for any number of rows: in decoding, a small model spends its time on the
operators' fixed cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import paddle
import paddle.nn.functional as functional
from hal_core import InvalidValue
from hal_core.devices import processor_features
from hal_engine.model.config import LlamaConfig, read_config
from hal_engine.model.loading import read_tensors
from hal_engine.model.split import UNSPLIT, Shard, check_split, local_config
from paddle.incubate.nn.functional import fused_rms_norm

from hal.local_rank import HOST_PLACE

from .batch import GroupPlan, ModelBatch, check_batch, order_rows, plan_run, plan_step
from .kv_cache import PagedCache, shared_array
from .onednn import Unsuitable
from .operators import gather, matmul, reshape, silu, softmax_
from .prepared import PreparedDecoder
from .weights import DecoderWeights, LayerWeights, check_place, has_fused_norm, prepare_weights

if TYPE_CHECKING:
    from paddle import Tensor

    from .ranks import TensorRanks


Rows: TypeAlias = "Tensor | np.ndarray"
"""Rows of floats: an array where the calls are prepared, else a tensor."""


@dataclass(frozen=True)
class _Group:
    """A ``GroupPlan`` with its arrays on the model's place."""

    plan: GroupPlan
    read_index: Tensor
    mask: Tensor


@dataclass(frozen=True)
class _Heads:
    """Places of the heads of rows with some lengths."""

    queries: int
    turned: int
    """Number of queries and keys, which are rotated by their positions."""
    index: Tensor
    """Of ``[tokens * (heads + 2 kv_heads), head_dim]``, the projections: ``queries`` of them in the groups' order, then
    all tokens' keys, then their values."""
    tokens: np.ndarray
    """int64: the token of each of them."""
    merge_index: Tensor | None
    """int64 ``[tokens * heads]`` into the groups' consecutive results; None: in order."""


@dataclass(frozen=True)
class Step:
    """Data shared by all layers of one step, on the model's place; and the cache that they write and read."""

    cache: PagedCache
    write_index: Tensor
    clear: tuple[Tensor, Tensor] | None
    groups: tuple[_Group, ...]
    heads: _Heads
    cos: Tensor
    """``[n, head_dim]``, in the order of ``heads.index``; not broadcast to that shape by an operator, which on a cpu
    takes ten times as long."""
    sin: Tensor


class LlamaModel:
    """A loaded decoder. Not thread-safe: one worker drives it.

    With ``ranks`` it is one rank's part of a decoder that is split over them (:mod:`hal_engine.model.split`), and every
    rank runs the same batches in the same order. ``everywhere``: all ranks get the logits, not only the first.
    """

    def __init__(
        self,
        config: LlamaConfig,
        tensors: dict[str, np.ndarray],
        *,
        place: str = "cpu",
        ranks: TensorRanks | None = None,
        everywhere: bool = False,
        eager: bool = False,
    ) -> None:
        """``tensors``: the checkpoint's, or the rank's part (:func:`hal_engine.model.loading.read_tensors`); not
        kept, and emptied as far as their memory is needed. ``eager``: run Paddle's operators, in host memory too."""
        self.config, self.ranks, self.everywhere = config, ranks, everywhere
        self.shard = UNSPLIT if ranks is None else Shard(ranks.index, ranks.size)
        self.local = local_config(config, self.shard)
        self.place = place
        """Called with the number of tokens before each run of layers: ranks of other groups synchronize there."""
        self.cache: PagedCache | None = None
        self.prepared: PreparedDecoder | None = None
        self.note = ""
        """About the computations, for ``-v``."""
        is_packed = place == HOST_PLACE and not eager
        self.weights: DecoderWeights = prepare_weights(config, tensors, place, packed=is_packed)
        if is_packed:
            self._prepare(tensors)
        self._fused_norm = has_fused_norm(place, processor_features())
        self._ones = self._put(np.ones(config.hidden_size, np.float32))
        self._heads: dict[bytes, _Heads] = {}  # by lengths, of the last steps: most repeat an earlier one
        self._frequencies = config.rope.frequencies(config.head_dim)
        self._rotations = self._rotation_table(0)
        self._turn_factors = np.zeros((0, config.head_dim // 2), np.complex64)

    def _prepare(self, tensors: dict[str, np.ndarray]) -> None:
        """Prepare the layers' calls, if the library for them can be used."""
        self._embeddings = shared_array(self.weights.embedding)
        try:
            self.prepared = PreparedDecoder(self.config, self.local, tensors, self.ranks, self.embed, self.turned)
        except Unsuitable as why:
            self.note = f"Paddle's operators, about half as fast as prepared calls: {why}"
            self.weights = prepare_weights(self.config, tensors, self.place)

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        place: str = "cpu",
        ranks: TensorRanks | None = None,
        everywhere: bool = False,
        eager: bool = False,
    ) -> LlamaModel:
        """Load ``config.json`` and the safetensors of ``directory`` onto ``place`` (Paddle's name).

        Raises ``InvalidValue`` naming file and field or tensor for anything that is missing, broken or not supported.
        """
        directory = Path(directory)
        config = read_config(directory)
        shard = UNSPLIT if ranks is None else Shard(ranks.index, ranks.size)
        check_split(config, shard.size)
        check_place(place)
        tensors = read_tensors(directory, config, shard)
        return cls(config, tensors, place=place, ranks=ranks, everywhere=everywhere, eager=eager)

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        """Allocate a new zeroed paged cache of ``blocks`` blocks of ``block_size`` tokens, ids 0 to blocks - 1."""
        self.cache = PagedCache(self.local, blocks, block_size, self.place)
        if self.prepared is not None:
            self.prepared.attach(self.cache)

    def prepare(self, most_rows: int) -> None:
        """Before the first step: make what decode steps of up to so many rows need, as far as it takes no long time."""
        if self.prepared is not None:
            self.note = f"calls of oneDNN; {self.prepared.prepare(most_rows)}"

    def forward(self, batch: ModelBatch) -> np.ndarray | None:
        """Run one step: store the tokens' keys and values; return float32 ``[n, vocab]``, the logits after each of
        ``batch.outputs``, by default the rows' last tokens, or None on a rank that does not get them.

        The result for a row depends on the other rows only by rounding (about 1e-6: the CPU's matrix product is not
        batch-invariant). Raises ``InvalidValue`` for a batch that cannot be computed; nothing is written then.
        """
        with paddle.no_grad():
            hidden, outputs = self._run(batch)
            if not len(outputs):
                return np.zeros((0, self.config.vocab_size), np.float32)
            return self.logits(self._last_norm(self.chosen(hidden, outputs)))

    def forward_with_hidden(self, batch: ModelBatch) -> tuple[np.ndarray | None, Rows]:
        """Do the same, and also return the last layer's output for each token, ``[tokens, hidden]``, normed, for the
        prediction layer: an array where the calls are prepared."""
        with paddle.no_grad():
            hidden, outputs = self._run(batch)
            hidden = self._last_norm(hidden)
            if not len(outputs):
                return np.zeros((0, self.config.vocab_size), np.float32), hidden
            return self.logits(self.chosen(hidden, outputs)), hidden

    def _last_norm(self, hidden: Rows) -> Rows:
        if isinstance(hidden, np.ndarray):
            assert self.prepared is not None
            return self.prepared.normed(hidden)
        return self.normed(hidden, self.weights.norm)

    def chosen(self, hidden: Rows, outputs: np.ndarray) -> Rows:
        """Return some of the rows, in rising order."""
        if len(outputs) == len(hidden):
            return hidden
        return hidden[outputs] if isinstance(hidden, np.ndarray) else gather(hidden, self._put(outputs))

    def _put(self, array: np.ndarray) -> Tensor:
        """Copy to the model's place. ``paddle.to_tensor`` does the same with so much Python that several calls of it
        are a tenth of a small model's step."""
        return paddle.Tensor(value=array, place=self.weights.norm.place)

    def _run(self, batch: ModelBatch) -> tuple[Rows, np.ndarray]:
        """Return hidden states ``[tokens, hidden]`` before the last norm, and int64 ``[n]`` of tokens with requested
        logits."""
        if self.cache is None:
            raise InvalidValue("no cache", cure="call allocate_cache first", argument="forward")
        if self.prepared is not None:
            return self.prepared.run(batch)
        step, outputs = self.placed(batch, self.cache)
        hidden = self.embedded(batch.token_ids)
        for number, layer in enumerate(self.weights.layers):
            hidden = self.layer(hidden, number, layer, step)
        return hidden, outputs

    def placed(self, batch: ModelBatch, cache: PagedCache) -> tuple[Step, np.ndarray]:
        """Return the data shared by all layers that run a batch on a cache, and int64 ``[n]`` of tokens with requested
        logits."""
        check_batch(batch, self.config, cache.shape)
        plan = plan_step(batch, self.local, cache.shape)
        heads = self._head_indices(batch.row_lengths)
        turns = self._put(self._turns(batch.positions, heads))
        step = Step(
            cache=cache,
            write_index=self._put(plan.write_index),
            clear=None if plan.clear_index is None else self._place_clear(plan.clear_index),
            groups=tuple(self._place_group(group) for group in plan.groups),
            heads=heads,
            cos=turns[0],
            sin=turns[1],
        )
        return step, plan.outputs

    def placed_run(
        self, tables: np.ndarray, positions: np.ndarray, reach: np.ndarray, count: int, cache: PagedCache
    ) -> list[Step]:
        """Return the steps of ``count`` consecutive tokens of each row, with one transfer for all of them.

        :param tables: block tables, int32 ``[rows, max_blocks]``.
        :param positions: int64 ``[rows]``: of each row's first token.
        :param reach: int64 ``[rows]``: how many tokens of a row have room in its blocks, at least 1; further ones
            overwrite the last of these, so their results are meaningless.
        """
        plan = plan_run(tables, positions, reach, count, self.local, cache.shape)
        heads = self._head_indices(np.ones(len(positions), np.int32))
        turns = self._put(self._turns(plan.positions, heads))
        cos, sin = (paddle.unbind(part) for part in paddle.unbind(turns))
        writes, masks = paddle.unbind(self._put(plan.write_index)), paddle.unbind(self._put(plan.masks))
        group = self._place_group(plan.group)
        return [
            Step(cache, write, None, (replace(group, mask=mask),), heads, c, s)
            for write, mask, c, s in zip(writes, masks, cos, sin, strict=True)
        ]

    def embedded(self, token_ids: np.ndarray) -> Tensor:
        """Return ``[tokens, hidden]``: each token's row of the embedding, from the rank that has it."""
        if self.ranks is None:
            return functional.embedding(self._put(token_ids), self.weights.embedding)
        part = self.shard.part(self.config.vocab_size)
        here = (token_ids >= part.start) & (token_ids < part.stop)
        rows = functional.embedding(self._put(np.where(here, token_ids - part.start, 0)), self.weights.embedding)
        return self.ranks.all_reduce(rows * self._put(here.astype(np.float32)[:, None]))

    def embed(self, token_ids: np.ndarray, rows: np.ndarray) -> None:
        """Write the embeddings of tokens to rows in host memory, zeros where another rank has them."""
        if self.ranks is None:
            self._embeddings.take(token_ids, 0, rows, "clip")
            return
        part = self.shard.part(self.config.vocab_size)
        self._embeddings.take(token_ids - part.start, 0, rows, "clip")
        rows[(token_ids < part.start) | (token_ids >= part.stop)] = 0

    def _summed(self, partial: Tensor) -> Tensor:
        """Return the sum of the ranks' partial results."""
        return partial if self.ranks is None else self.ranks.all_reduce(partial)

    def _place_group(self, plan: GroupPlan) -> _Group:
        return _Group(plan, self._put(plan.read_index), self._put(plan.mask))

    def _place_clear(self, index: np.ndarray) -> tuple[Tensor, Tensor]:
        return self._put(index), self._put(np.zeros((index.size, self.config.head_dim), np.float32))

    def _head_indices(self, lengths: np.ndarray) -> _Heads:
        """Return the places of the heads of rows with these lengths."""
        found = self._heads.get(lengths.tobytes())
        if found is None:
            heads, kv_heads = self.local.num_attention_heads, self.local.num_key_value_heads
            rows = np.arange(int(lengths.sum()) * (heads + 2 * kv_heads)).reshape(-1, heads + 2 * kv_heads)
            query, key, value = (part.reshape(-1) for part in np.split(rows, [heads, heads + kv_heads], axis=1))
            merge_index = None
            if (order := order_rows(lengths, self.local)) is not None:
                query, merge_index = query[order.query_index], self._put(order.merge_index)
            order_of_all = np.concatenate([query, key, value])
            tokens = order_of_all // (heads + 2 * kv_heads)
            found = _Heads(query.size, query.size + key.size, self._put(order_of_all), tokens, merge_index)
            self._heads = dict([*self._heads.items()][-7:]) | {lengths.tobytes(): found}
        return found

    def _turns(self, positions: np.ndarray, heads: _Heads) -> np.ndarray:
        """Return the rotations of tokens at ``positions`` int64 ``[..., tokens]``, for each of ``heads.index``. Values
        are unchanged: they are multiplied by one, as at position 0."""
        rows = positions[..., heads.tokens]
        rows[..., heads.turned :] = 0
        return self.rotations(rows)

    def rotations(self, positions: np.ndarray) -> np.ndarray:
        """Return float32 ``[2, ..., head_dim]``: cosines at ``positions`` int64 ``[...]``, and sines with their
        signs."""
        most = int(positions.max()) + 1
        if most > self._rotations.shape[1]:  # twice as many as needed, so that it rarely grows
            self._rotations = self._rotation_table(min(2 * most, self.config.max_position_embeddings))
        found: np.ndarray = self._rotations[:, positions]
        return found

    def turned(self, positions: np.ndarray) -> np.ndarray:
        """Return the same rotations as factors of a head's halves as complex numbers, complex64 ``[n, 1, head_dim /
        2]``."""
        most, half = int(positions.max()) + 1, self.config.head_dim // 2
        if most > len(self._turn_factors):
            cos, sin = self._rotation_table(min(2 * most, self.config.max_position_embeddings))
            self._turn_factors = (cos[:, :half] + 1j * sin[:, half:]).astype(np.complex64)
        found: np.ndarray = self._turn_factors[positions][:, None]
        return found

    def _rotation_table(self, positions: int) -> np.ndarray:
        """Return float32 ``[2, positions, head_dim]``: the cosines, and the sines with their signs."""
        angles = np.arange(positions)[:, None] * self._frequencies
        cos, sin = np.cos(angles), np.sin(angles)
        table = [np.concatenate([cos, cos], axis=-1), np.concatenate([-sin, sin], axis=-1)]
        return np.stack(table).astype(np.float32)

    def normed(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the RMSNorm of each row. Those of the layers have a weight of ones (None): ``prepare_weights`` folded
        their own into the next matrix."""
        if self._fused_norm:
            return fused_rms_norm(x, self._ones if weight is None else weight, None, self.config.rms_norm_eps, 1)[0]
        scaled = x * paddle.rsqrt(paddle.mean(x * x, axis=-1, keepdim=True) + self.config.rms_norm_eps)
        return scaled if weight is None else scaled * weight

    def layer(self, x: Tensor, number: int, layer: LayerWeights, step: Step) -> Tensor:
        """Run one decoder layer on ``[tokens, hidden]``: attention and SwiGLU, each with its norm and residual."""
        query, written = self._projected(self.normed(x), layer, step)
        if step.clear is not None:
            step.cache.write(number, *step.clear)
        step.cache.write(number, step.write_index, written)
        attended = self._summed(matmul(self._attention(query, number, step), layer.output))
        if layer.output_bias is not None:
            attended = attended + layer.output_bias
        x = x + attended
        normed = self.normed(x)
        gate = silu(matmul(normed, layer.gate))
        return x + self._summed(matmul(gate * matmul(normed, layer.up), layer.down))

    def _projected(self, x: Tensor, layer: LayerWeights, step: Step) -> tuple[Tensor, Tensor]:
        """Return queries ``[queries, head_dim]`` in the groups' order, and keys and values ``[2 * tokens * kv_heads,
        head_dim]`` of ``x``, at their positions."""
        width, heads = self.config.head_dim, step.heads
        qkv = matmul(x, layer.qkv)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        rows = gather(reshape(qkv, [-1, width]), heads.index)
        if layer.q_norm is not None:
            query, key, value = paddle.split(rows, [heads.queries, heads.turned - heads.queries, -1])
            rows = paddle.concat([self.normed(query, layer.q_norm), self.normed(key, layer.k_norm), value])
        rows = rows * step.cos + paddle.roll(rows, width // 2, axis=-1) * step.sin
        return rows[: heads.queries], rows[heads.queries :]

    def _attention(self, query: Tensor, number: int, step: Step) -> Tensor:
        """Return softmax attention of ``[queries, head_dim]`` over the cache: ``[tokens, heads * head_dim]``."""
        kv_heads, width = self.local.num_key_value_heads, self.config.head_dim
        outputs, begin = [], 0
        for group in step.groups:
            plan = group.plan
            end = begin + plan.rows * plan.queries * self.local.num_attention_heads
            chosen = query if len(step.groups) == 1 else query[begin:end]
            begin = end
            # Heads of one key/value head are adjacent, so its queries are the rows of one product.
            chosen = reshape(chosen, [plan.rows, kv_heads, -1, width])
            shape = [2, plan.rows, kv_heads, plan.keys, width]
            key, value = paddle.unbind(reshape(step.cache.read(number, group.read_index), shape))
            scores = matmul(chosen, key, transpose_y=True).add_(group.mask)
            scores = softmax_(scores)
            outputs.append(matmul(scores, value))
        joined = outputs[0] if len(outputs) == 1 else paddle.concat([output.reshape([-1, width]) for output in outputs])
        if step.heads.merge_index is not None:
            joined = gather(joined.reshape([-1, width]), step.heads.merge_index)
        return reshape(joined, [-1, self.local.num_attention_heads * width])

    def logits(self, normed: Rows, *, everywhere: bool = False) -> np.ndarray | None:
        """Return float32 ``[n, vocab]`` of hidden states after the last norm: on every rank or only on the first, as
        set for the model unless ``everywhere``."""
        part: Rows
        if self.prepared is not None:
            part = self.prepared.logits(np.asarray(normed))
        else:
            part = matmul(normed, self.weights.head, transpose_y=True)
        if self.ranks is None:
            logits: np.ndarray = np.asarray(part)
            return logits
        parts = self.ranks.all_gather(part) if self.everywhere or everywhere else self.ranks.gather(part)
        if parts is None:
            return None
        rows: np.ndarray = np.asarray(parts).transpose(1, 0, 2).reshape(part.shape[0], -1)
        return np.ascontiguousarray(rows[:, : self.config.vocab_size])
