"""The multi-token-prediction layer of a checkpoint (DeepSeek-AI 2024, DeepSeek-V3, section 2.2), with its own cache.

Entry ``i`` of a sequence joins the target's hidden state of token ``i`` with the embedding of token ``i + 1``, attends
to the entries before it, and says token ``i + 2``. Further tokens come of feeding the layer what it gave itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import paddle
from hal_core import InvalidValue

from hal.model.kv_cache import PagedCache

if TYPE_CHECKING:
    from paddle import Tensor

    from hal.model.llama import Hidden, LlamaModel, Step


class PredictionLayer:
    """The layer of ``model``, and a paged cache of it as large as the model's: block ids mean the same in both.

    Raises ``InvalidValue`` for a checkpoint that has none.
    """

    def __init__(self, model: LlamaModel) -> None:
        if model.weights.prediction is None:
            raise InvalidValue(
                "the checkpoint has no multi-token-prediction layer (num_nextn_predict_layers is 0)",
                cure="choose another proposer, as ngram, or a checkpoint that has one",
                argument="--speculate",
            )
        if model.cache is None:
            raise InvalidValue("the model has no cache yet", cure="call allocate_cache first", argument="model")
        self.model, self._weights = model, model.weights.prediction
        shape = model.cache.shape
        one = replace(model.local, num_hidden_layers=1)
        self._cache = PagedCache(one, shape.blocks, shape.block_size, model.place)

    def forward(self, hidden: Hidden, token_ids: np.ndarray, outputs: np.ndarray) -> Tensor:
        """Run the entries of a step's rows; those of tokens that are not known mean nothing, and are written over.

        :param hidden: what the target gave in the step.
        :param token_ids: int64 ``[tokens]``: what follows each of its tokens.
        :param outputs: int64 ``[n]``, rising: the entries that are asked for.
        :return: ``[n, hidden]``, normed: :meth:`logits` are made of it, and it may be fed in turn.
        """
        with paddle.no_grad():
            given = self._layer(token_ids, hidden.states, replace(hidden.step, cache=self._cache))
            return self.model.normed(self.model.chosen(given, outputs), self._weights.norm)

    def run(self, tables: np.ndarray, positions: np.ndarray, reach: np.ndarray, count: int) -> list[Step]:
        """``count`` further entries of each row, for :meth:`follow`; see :meth:`LlamaModel.placed_run`."""
        with paddle.no_grad():
            return self.model.placed_run(tables, positions, reach, count, self._cache)

    def follow(self, step: Step, token_ids: np.ndarray, given: Tensor) -> Tensor:
        """One more entry of each row, made of its last token and of what the layer gave before."""
        with paddle.no_grad():
            return self.model.normed(self._layer(token_ids, given, step), self._weights.norm)

    def logits(self, given: Tensor) -> np.ndarray:
        """float32 ``[n, vocab]``, on every rank: each embeds the draft that comes of them."""
        with paddle.no_grad():
            logits = self.model.logits(given, everywhere=True)
        assert logits is not None
        return logits

    def _layer(self, token_ids: np.ndarray, hidden: Tensor, step: Step) -> Tensor:
        model = self.model
        model.before_run(len(token_ids))
        joined = paddle.concat([model.normed(model.embedded(token_ids)), model.normed(hidden)], axis=1)
        return model.layer(paddle.matmul(joined, self._weights.join), 0, self._weights.layer, step)
