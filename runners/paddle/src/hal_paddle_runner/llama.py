"""The decoder in Paddle's operators, on any of Paddle's places.

Sources: RMSNorm, Zhang & Sennrich 2019; grouped-query attention, Ainslie et al. 2023; SwiGLU, Shazeer 2020; normed
queries and keys, Qwen3 (2025).

A step is a fixed, small number of operators for any number of rows: in decoding, a small model spends its time on the
operators' fixed cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import paddle
import paddle.nn.functional as functional
from hal_core import InvalidValue
from hal_core.devices import processor_features
from hal_engine.model.config import LlamaConfig
from paddle.incubate.nn.functional import fused_rms_norm

from hal.local_rank import HOST_PLACE

from .batch import GroupPlan, ModelBatch, check_batch, order_rows, plan_run, plan_step
from .kv_cache import PagedCache
from .model import Model
from .operators import gather, matmul, reshape, silu, softmax_
from .weights import DecoderWeights, LayerWeights, PredictionWeights, has_fused_norm, prepare_weights

if TYPE_CHECKING:
    from paddle import Tensor

    from .ranks import TensorRanks


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


class LlamaModel(Model):
    """See :class:`hal_paddle_runner.model.Model`: in Paddle's operators, on any place."""

    cache: PagedCache | None = None

    def __init__(
        self,
        config: LlamaConfig,
        tensors: dict[str, np.ndarray],
        *,
        place: str = HOST_PLACE,
        ranks: TensorRanks | None = None,
        everywhere: bool = False,
        note: str = "",
    ) -> None:
        """``tensors``: the checkpoint's, or the rank's part (:func:`hal_engine.model.loading.read_tensors`)."""
        super().__init__(config, place=place, ranks=ranks, everywhere=everywhere, note=note)
        self.weights: DecoderWeights = prepare_weights(config, tensors, place)
        self._fused_norm = has_fused_norm(place, processor_features())
        self._ones = self._put(np.ones(config.hidden_size, np.float32))
        self._heads: dict[bytes, _Heads] = {}  # by lengths, of the last steps: most repeat an earlier one

    @property
    def prediction(self) -> PredictionWeights | None:
        """Return the weights of the prediction layer; None without one."""
        return self.weights.prediction

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        """See :meth:`Model.allocate_cache`."""
        self.cache = PagedCache(self.local, blocks, block_size, self.place)

    def prepare(self, most_rows: int) -> None:
        """See :meth:`Model.prepare`: nothing is needed."""

    def forward(self, batch: ModelBatch) -> np.ndarray | None:
        """See :meth:`Model.forward`."""
        with paddle.no_grad():
            hidden, outputs = self._run(batch)
            if not len(outputs):
                return np.zeros((0, self.config.vocab_size), np.float32)
            return self.logits(self.normed(self.chosen(hidden, outputs), self.weights.norm))

    def forward_with_hidden(self, batch: ModelBatch) -> tuple[np.ndarray | None, Tensor]:
        """See :meth:`Model.forward_with_hidden`."""
        with paddle.no_grad():
            hidden, outputs = self._run(batch)
            hidden = self.normed(hidden, self.weights.norm)
            if not len(outputs):
                return np.zeros((0, self.config.vocab_size), np.float32), hidden
            return self.logits(self.chosen(hidden, outputs)), hidden

    def chosen(self, hidden: Tensor, outputs: np.ndarray) -> Tensor:
        """Return some of the rows, in rising order."""
        return hidden if len(outputs) == len(hidden) else gather(hidden, self._put(outputs))

    def _put(self, array: np.ndarray) -> Tensor:
        """Copy to the model's place. ``paddle.to_tensor`` does the same with so much Python that several calls of it
        are a tenth of a small model's step."""
        return paddle.Tensor(value=array, place=self.weights.norm.place)

    def _run(self, batch: ModelBatch) -> tuple[Tensor, np.ndarray]:
        """Return hidden states ``[tokens, hidden]`` before the last norm, and int64 ``[n]`` of tokens with requested
        logits."""
        if self.cache is None:
            raise InvalidValue("no cache", cure="call allocate_cache first", argument="forward")
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
        here, places = self.here(token_ids)
        rows = functional.embedding(self._put(places), self.weights.embedding)
        return self.ranks.all_reduce(rows * self._put(here.astype(np.float32)[:, None]))

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
        return self.rotary.rotations(rows)

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

    def head(self, normed: Tensor) -> Tensor:
        """See :meth:`Model.head`."""
        return matmul(normed, self.weights.head, transpose_y=True)
