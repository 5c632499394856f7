"""The prediction layer in NumPy, for a model in host memory. Drafting runs it on a few rows, for which one of Paddle's
operators takes longer than its computation (on a cpu a run takes a tenth of the time, measured at one row).

The layer, its cache and its interface are those of :mod:`hal_paddle_runner.prediction`. As it is a single layer, only
keys and values are computed for entries without a requested output. It uses as few operators as possible:

- RMSNorm is a number for each row, by which the product after it is multiplied.
- An embedding's contribution to an entry is kept for every token, if that is small.
- In a head the two halves of queries and keys are interleaved, so that their rotation is one complex product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .batch import ModelBatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .host import HostModel

Array = np.ndarray[Any, Any]
Floats = Array
"""float32."""
Part: TypeAlias = "tuple[Any, int, int]"
"""Rows of a result of ``kept``: the first, and the end."""
MOST_KEPT = 1 << 22
"""Most kept elements of the embedding."""


@dataclass(frozen=True)
class HostRun:
    """One further entry of each row: their block tables and positions."""

    tables: Array
    positions: Array


class HostPrediction:
    """See :class:`hal_paddle_runner.prediction.PredictionLayer`, whose methods it has."""

    def __init__(self, model: HostModel) -> None:
        weights, cache = model.prediction, model.cache
        assert weights is not None
        assert cache is not None
        self.model, self._shape = model, cache.shape
        local = model.local
        self._heads, self._kv_heads, self._width = (
            local.num_attention_heads,
            local.num_key_value_heads,
            model.config.head_dim,
        )
        self._eps = model.config.rms_norm_eps
        self._layer = self._arranged(weights.layer)
        self._join_embedded, self._join_hidden = np.split(np.ascontiguousarray(weights.join), 2)
        self._norm, embedding, shape = weights.norm, model.embedding, cache.shape
        self._joined: Floats | None = None
        if model.ranks is None and len(embedding) * weights.join.shape[1] <= MOST_KEPT:
            self._joined = (embedding @ self._join_embedded) * self._scale(embedding)
        self._cache = np.zeros((2, shape.blocks, shape.block_size, self._kv_heads, self._width), np.float32)
        self.keys, self.values = self._cache

    def kept(self, hidden: Floats) -> Floats:
        """Return the target's output of a step, in the form that :meth:`feed` takes."""
        return hidden

    def feed(self, parts: list[Part], batch: ModelBatch) -> Floats:
        """Run entries of known tokens; return ``[n, hidden]``, normed, of those in ``batch.outputs``.

        The batch is not checked: the model has run the same rows.
        """
        arrays = [rows[begin:end] for rows, begin, end in parts]
        hidden = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        ends, tables = np.cumsum(batch.row_lengths), batch.block_tables
        outputs = ends - 1 if batch.outputs is None else batch.outputs
        rows = np.repeat(np.arange(len(ends)), batch.row_lengths)
        x, query = self._enter(batch.token_ids, batch.positions, hidden, tables[rows, self._blocks(batch.positions)])
        return self._finish(x[outputs], query[outputs], tables[rows[outputs]], batch.positions[outputs])

    def run(self, tables: Array, positions: Array, reach: Array, count: int) -> list[HostRun]:
        """Return ``count`` further entries of each row, for :meth:`follow`."""
        return [HostRun(tables, positions + np.minimum(number, reach - 1)) for number in range(count)]

    def follow(self, step: HostRun, token_ids: Array, given: Floats) -> Floats:
        """Run one more entry of each row, from its last token and the layer's previous output."""
        tables, positions = step.tables, step.positions
        blocks = tables[np.arange(len(tables)), self._blocks(positions)]
        x, query = self._enter(token_ids, positions, given, blocks)
        return self._finish(x, query, tables, positions)

    def logits(self, given: Floats) -> Floats:
        """Return float32 ``[n, vocab]``, on every rank."""
        found = self.model.logits(given, everywhere=True)
        assert found is not None
        return found

    def _arranged(self, layer: Mapping[str, Array | None]) -> dict[str, Any]:
        """Return the layer's weights, the columns of queries and keys interleaved, those of the gates halved."""
        found: dict[str, Any] = {
            name: None if one is None else np.ascontiguousarray(one) for name, one in layer.items()
        }
        turned = self._heads + self._kv_heads
        pairs = np.arange(self._width).reshape(2, -1).T.reshape(-1)
        columns = (np.arange(turned)[:, None] * self._width + pairs).reshape(-1)
        for name in ("qkv", "qkv_bias"):
            if (array := found[name]) is not None:
                moved = array.copy()
                moved[..., : len(columns)] = array[..., columns]
                found[name] = moved
        found["gate_up"] = np.concatenate([found.pop("gate") / 2, found.pop("up")], axis=1)
        query, key = found.pop("q_norm"), found.pop("k_norm")
        found["qk_norm"] = None
        if query is not None and key is not None:
            found["qk_norm"] = np.stack([query[pairs]] * self._heads + [key[pairs]] * self._kv_heads)
        return found

    def _blocks(self, positions: Array) -> Array:
        blocks: Array = positions // self._shape.block_size
        return blocks

    def _enter(self, token_ids: Array, positions: Array, hidden: Floats, blocks: Array) -> tuple[Floats, Floats]:
        """Write the keys and values of some entries; return the layer's input, ``[tokens, hidden]``, and the queries,
        ``[tokens, heads, width]``. ``blocks``: the block of each."""
        weights, kv_heads, width = self._layer, self._kv_heads, self._width
        turned = (self._heads + kv_heads) * width
        x = (hidden @ self._join_hidden) * self._scale(hidden)
        x += self._embedded(token_ids)
        qkv = (x @ weights["qkv"]) * self._scale(x)
        if weights["qkv_bias"] is not None:
            qkv += weights["qkv_bias"]
        qk = qkv[:, :turned].reshape(len(x), -1, width)
        if weights["qk_norm"] is not None:
            qk = qk * self._scale(qk.reshape(-1, width)).reshape(len(x), -1, 1) * weights["qk_norm"]
        qk = (qk.view(np.complex64) * self.model.rotary.factors(positions)).view(np.float32)
        places = positions % self._shape.block_size
        self.keys[blocks, places] = qk[:, self._heads :]
        self.values[blocks, places] = qkv[:, turned:].reshape(len(x), kv_heads, width)
        return x, qk[:, : self._heads]

    def _finish(self, x: Floats, query: Floats, tables: Array, positions: Array) -> Floats:
        """Return the layer's output, normed, for one entry of each row, which is the row's last one."""
        if not len(x):
            return x
        weights = self._layer
        out = self._summed(self._attention(query, tables, positions) @ weights["output"])
        x = x + out if weights["output_bias"] is None else x + out + weights["output_bias"]
        gate_up = (x @ weights["gate_up"]) * self._scale(x)
        gate, up = gate_up[:, : gate_up.shape[1] // 2], gate_up[:, gate_up.shape[1] // 2 :]
        inner = np.tanh(gate)  # of half the gate: equivalent to the logistic function of all of it
        inner += 1
        inner *= gate
        inner *= up
        x = x + self._summed(inner @ weights["down"])
        given: Floats = x * self._scale(x) * self._norm
        return given

    def _attention(self, query: Floats, tables: Array, positions: Array) -> Floats:
        """Return attention of one token a row, ``[rows, heads, width]``, over the whole row: ``[rows, heads *
        width]``."""
        rows, kv_heads, most = len(query), self._kv_heads, int(positions.max())
        used = tables[:, : most // self._shape.block_size + 1]
        if rows > 1:  # shorter rows read their first block again: missing blocks are masked below
            used = np.where(np.arange(used.shape[1]) <= self._blocks(positions)[:, None], used, used[:, :1])
        keys, values = self._cache[:, used].reshape(2, rows, -1, kv_heads, self._width)[:, :, : most + 1]
        grouped = query.reshape(rows, kv_heads, -1, self._width)
        scores = grouped @ keys.transpose(0, 2, 3, 1)
        if rows > 1:
            behind = np.arange(most + 1) > positions[:, None]
            scores += np.where(behind, np.float32(-np.inf), np.float32(0))[:, None, None]
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = scores @ values.transpose(0, 2, 1, 3)
        mixed /= scores.sum(axis=-1, keepdims=True)
        attended: Floats = mixed.reshape(rows, -1)
        return attended

    def _embedded(self, token_ids: Array) -> Floats:
        """Return the contribution of the tokens' embeddings, ``[tokens, hidden]``."""
        if self._joined is not None:
            kept: Floats = self._joined[token_ids]
            return kept
        rows = self.model.embedded(token_ids)
        added: Floats = (rows @ self._join_embedded) * self._scale(rows)
        return added

    def _scale(self, x: Floats) -> Any:  # noqa: ANN401 (a number, or one for each row)
        """Return the factor by which each row is multiplied for RMSNorm without a weight."""
        if len(x) == 1:
            row = x[0]
            return 1 / math.sqrt(float(row @ row) / x.shape[1] + self._eps)
        return 1 / np.sqrt(np.einsum("ij,ij->i", x, x)[:, None] / x.shape[1] + np.float32(self._eps))

    def _summed(self, partial: Floats) -> Floats:
        """Return the sum of the ranks' partial results."""
        if self.model.ranks is None:
            return partial
        summed: Floats = self.model.ranks.all_reduce(partial)
        return summed
