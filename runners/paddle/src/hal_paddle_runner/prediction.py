"""The multi-token-prediction layer of a checkpoint (DeepSeek-AI 2024, DeepSeek-V3, section 2.2), with its own cache.

Entry ``i`` of a sequence joins the target's hidden state of token ``i`` with the embedding of token ``i + 1``, attends
to the entries before it, and predicts token ``i + 2``. Further tokens result from feeding the layer its own output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import paddle

from .kv_cache import PagedCache

if TYPE_CHECKING:
    from paddle import Tensor

    from .batch import ModelBatch
    from .llama import LlamaModel, Step
    from .prediction_host import Part


class PredictionLayer:
    """The layer in Paddle, on the model's place."""

    def __init__(self, model: LlamaModel) -> None:
        assert model.prediction is not None
        assert model.cache is not None
        self.model, self._weights = model, model.prediction
        shape = model.cache.shape
        one = replace(model.local, num_hidden_layers=1)
        self.cache = PagedCache(one, shape.blocks, shape.block_size, model.place)

    def kept(self, hidden: Tensor) -> Tensor:
        """Return the target's output of a step, ``[tokens, hidden]``, in the form that :meth:`feed` takes then or
        later."""
        return hidden

    def feed(self, parts: list[Part], batch: ModelBatch) -> Tensor:
        """Run entries of known tokens, which follow the existing entries of each row.

        :param parts: the target's hidden states of them, in order.
        :param batch: rows and positions of the entries; its tokens are those that follow each.
        :return: ``[n, hidden]``, normed, of the entries in ``batch.outputs``: the input of :meth:`logits` and of the
            next entry.
        :raises InvalidValue: for a batch that cannot be computed.
        """
        with paddle.no_grad():
            step, outputs = self.model.placed(batch, self.cache)
            rows = [rows if end - begin == len(rows) else rows[begin:end] for rows, begin, end in parts]
            given = self._layer(batch.token_ids, rows[0] if len(rows) == 1 else paddle.concat(rows), step)
            return self.model.normed(self.model.chosen(given, outputs), self._weights.norm)

    def run(self, tables: np.ndarray, positions: np.ndarray, reach: np.ndarray, count: int) -> list[Step]:
        """Return ``count`` further entries of each row, for :meth:`follow`; see :meth:`LlamaModel.placed_run`."""
        with paddle.no_grad():
            return self.model.placed_run(tables, positions, reach, count, self.cache)

    def follow(self, step: Step, token_ids: np.ndarray, given: Tensor) -> Tensor:
        """Run one more entry of each row, from its last token and the layer's previous output."""
        with paddle.no_grad():
            return self.model.normed(self._layer(token_ids, given, step), self._weights.norm)

    def logits(self, given: Tensor) -> np.ndarray:
        """Return float32 ``[n, vocab]``, on every rank: each embeds the resulting draft."""
        with paddle.no_grad():
            logits = self.model.logits(given, everywhere=True)
        assert logits is not None
        return logits

    def _layer(self, token_ids: np.ndarray, hidden: Tensor, step: Step) -> Tensor:
        model = self.model
        joined = paddle.concat([model.normed(model.embedded(token_ids)), model.normed(hidden)], axis=1)
        return model.layer(paddle.matmul(joined, self._weights.join), 0, self._weights.layer, step)
