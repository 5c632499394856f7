"""The prediction layer in NumPy, for a model in the host's memory: drafting runs it on a row or a few, for which one of
Paddle's operators takes longer than what it computes (on a cpu a run takes a fifth of the time, measured at one row).

The layer, its cache and what it is asked are those of :mod:`hal.model.prediction`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import paddle

from hal.model.batch import CacheShape, ModelBatch

if TYPE_CHECKING:
    from paddle import Tensor

    from hal.model.llama import LlamaModel

Array = np.ndarray[Any, Any]
Floats = Array
"""float32."""
Part: TypeAlias = "tuple[Any, int, int]"
"""Rows of what a layer's ``kept`` gave: the first, and behind the last."""
MOST_QUERIES = 256
"""Queries of a row whose scores are made at once, to save memory."""


@dataclass(frozen=True)
class HostRun:
    """One further entry of each of some rows: their block tables and positions."""

    tables: Array
    positions: Array


def as_array(tensor: Tensor) -> Floats:
    """A tensor of the host's memory as an array, without a copy where Paddle can share it; not to be written to."""
    return np.from_dlpack(tensor) if hasattr(tensor, "__dlpack__") else tensor.numpy()


class HostPrediction:
    """See :class:`hal.model.prediction.PredictionLayer`, whose methods it has."""

    def __init__(self, model: LlamaModel, shape: CacheShape) -> None:
        weights = model.weights.prediction
        assert weights is not None
        self.model, self._shape = model, shape
        layer = weights.layer
        self._join, self._norm = as_array(weights.join), as_array(weights.norm)
        self._layer: dict[str, Any] = {
            name: None if one is None else as_array(one) for name, one in vars(layer).items()
        }
        self._embedding, self._head = as_array(model.weights.embedding), as_array(model.weights.head)
        local = model.local
        self._heads, self._kv_heads, self._width = (
            local.num_attention_heads,
            local.num_key_value_heads,
            model.config.head_dim,
        )
        size = (shape.blocks, shape.block_size, self._kv_heads, self._width)
        self.keys, self.values = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self._eps = np.float32(model.config.rms_norm_eps)
        self._swap = np.roll(np.arange(self._width), self._width // 2)

    def kept(self, hidden: Tensor) -> Floats:
        """What the target gave in a step, as :meth:`feed` takes it."""
        return as_array(hidden)

    def feed(self, parts: list[Part], batch: ModelBatch) -> Floats:
        """Run entries of known tokens; ``[n, hidden]``, normed, of those that ``batch.outputs`` names.

        The batch is taken to be sound: the model has run the same rows.
        """
        arrays = [rows[begin:end] for rows, begin, end in parts]
        hidden = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        ends = np.cumsum(batch.row_lengths).tolist()
        spans = [
            (end - length, end, context, table)
            for end, length, context, table in zip(
                ends, batch.row_lengths.tolist(), batch.context_lengths.tolist(), batch.block_tables, strict=True
            )
        ]
        given = self._run(batch.token_ids, batch.positions, hidden, spans)
        return self._normed(given if batch.outputs is None else given[batch.outputs]) * self._norm

    def run(self, tables: Array, positions: Array, reach: Array, count: int) -> list[HostRun]:
        """``count`` further entries of each row, for :meth:`follow`."""
        return [HostRun(tables, positions + np.minimum(number, reach - 1)) for number in range(count)]

    def follow(self, step: HostRun, token_ids: Array, given: Floats) -> Floats:
        """One more entry of each row, made of its last token and of what the layer gave before."""
        spans = [
            (row, row + 1, position, table)
            for row, (position, table) in enumerate(zip(step.positions.tolist(), step.tables, strict=True))
        ]
        return self._normed(self._run(token_ids, step.positions, given, spans)) * self._norm

    def logits(self, given: Floats) -> Floats:
        """float32 ``[n, vocab]``, on every rank."""
        if self.model.ranks is None and len(given) == 1:
            row: Floats = self._head @ given[0]
            return row[None]
        with paddle.no_grad():
            found = self.model.logits(paddle.to_tensor(given, place=self.model.place), everywhere=True)
        assert found is not None
        return found

    def _run(
        self, token_ids: Array, positions: Array, hidden: Floats, spans: list[tuple[int, int, int, Array]]
    ) -> Floats:
        """The layer on ``[tokens, hidden]``; ``spans``: first and last token of a row, its context length and table."""
        self.model.before_run(len(token_ids))
        weights = self._layer
        whole = self.model.ranks is None
        embedded = self._embedding[token_ids] if whole else as_array(self.model.embedded(token_ids))
        x = np.concatenate([self._normed(embedded), self._normed(hidden)], axis=1) @ self._join
        query, key, value = self._projected(self._normed(x), positions)
        size, places = self._shape.block_size, positions % self._shape.block_size
        blocks = np.concatenate([table[positions[begin:end] // size] for begin, end, _, table in spans])
        self.keys[blocks, places], self.values[blocks, places] = key, value
        attended = np.empty((len(x), self._heads * self._width), np.float32)
        for begin, end, context, table in spans:
            known = context + end - begin
            used = table[: -(-known // size)]
            keys = self.keys[used].reshape(-1, self._kv_heads, self._width)[:known]
            values = self.values[used].reshape(-1, self._kv_heads, self._width)[:known]
            for first in range(begin, end, MOST_QUERIES):
                last = min(first + MOST_QUERIES, end)
                seen = context + last - begin
                attended[first:last] = self._attention(query[first:last], keys[:seen], values[:seen])
        out = self._summed(attended @ weights["output"])
        x = x + out if weights["output_bias"] is None else x + out + weights["output_bias"]
        gate_up = self._normed(x) @ weights["gate_up"]
        gate, up = gate_up[:, : gate_up.shape[1] // 2], gate_up[:, gate_up.shape[1] // 2 :]
        inner = gate / (1 + np.exp(np.minimum(-gate, 80))) * up  # what is behind e**80 is 0
        return x + self._summed(inner @ weights["down"])

    def _projected(self, x: Floats, positions: Array) -> tuple[Floats, Floats, Floats]:
        """Queries ``[tokens, heads, width]``, keys and values ``[tokens, kv_heads, width]``."""
        weights, heads = self._layer, self._heads
        qkv = x @ weights["qkv"]
        if weights["qkv_bias"] is not None:
            qkv = qkv + weights["qkv_bias"]
        qkv = qkv.reshape(len(x), -1, self._width)
        qk, value = qkv[:, : heads + self._kv_heads], qkv[:, heads + self._kv_heads :]
        if weights["q_norm"] is not None:
            normed = self._normed(qk)
            qk = np.concatenate([normed[:, :heads] * weights["q_norm"], normed[:, heads:] * weights["k_norm"]], axis=1)
        cos, sin = self.model.rotations(positions)
        qk = qk * cos[:, None] + qk[..., self._swap] * sin[:, None]
        return qk[:, :heads], qk[:, heads:], value

    def _attention(self, query: Floats, keys: Floats, values: Floats) -> Floats:
        """Of the last tokens of a row, ``[tokens, heads, width]``, over all of it: ``[tokens, heads * width]``."""
        count, known = len(query), len(keys)
        grouped = query.reshape(count, self._kv_heads, -1, self._width).transpose(1, 0, 2, 3)
        scores = grouped.reshape(self._kv_heads, -1, self._width) @ keys.transpose(1, 2, 0)
        if count > 1:
            behind = np.arange(known) > np.arange(known - count, known)[:, None]
            scores.reshape(self._kv_heads, count, -1, known)[:] += np.where(behind, np.float32(-np.inf), 0)[:, None]
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = (scores @ values.transpose(1, 0, 2)).reshape(self._kv_heads, count, -1, self._width)
        return mixed.transpose(1, 0, 2, 3).reshape(count, -1)

    def _normed(self, x: Floats) -> Floats:
        """RMSNorm of each row, without a weight."""
        flat = x.reshape(-1, x.shape[-1])
        square = np.einsum("ij,ij->i", flat, flat).reshape(*x.shape[:-1], 1)
        normed: Floats = x / np.sqrt(square / x.shape[-1] + self._eps)
        return normed

    def _summed(self, partial: Floats) -> Floats:
        """The sum of what the ranks have each computed a part of."""
        if self.model.ranks is None:
            return partial
        return as_array(self.model.ranks.all_reduce(paddle.to_tensor(partial, place=self.model.place)))
