"""The prediction layer by the model's prepared calls (:mod:`hal_paddle_runner.prepared`), as one layer more, with a
cache of its own. Its interface is that of :mod:`hal_paddle_runner.prediction`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .batch import ModelBatch
from .host_cache import HostCache

if TYPE_CHECKING:
    from .host import HostModel

Array = np.ndarray[Any, Any]
Floats = Array
"""float32."""
Part: TypeAlias = "tuple[Any, int, int]"
"""Rows of a result of ``kept``: the first, and the end."""


class HostPrediction:
    """See :class:`hal_paddle_runner.prediction.PredictionLayer`, whose methods it has."""

    def __init__(self, model: HostModel) -> None:
        weights, decoder = model.prediction, model.decoder
        assert weights is not None
        assert model.cache is not None
        shape, one = model.cache.shape, replace(model.local, num_hidden_layers=1)
        self.model, self._decoder = model, decoder
        self.cache = HostCache(one, shape.blocks, shape.block_size)
        (self._view,) = decoder.views(self.cache)
        self._layer = decoder.weights.layer(weights.layer)
        self._join = np.ascontiguousarray(weights.join)
        self._norm = weights.norm * decoder.weights.root

    def kept(self, hidden: Floats) -> Floats:
        """Return the target's output of a step, in the form that :meth:`feed` takes."""
        return hidden

    def feed(self, parts: list[Part], batch: ModelBatch) -> Floats:
        """Run entries of known tokens; return ``[n, hidden]``, normed, of those in ``batch.outputs``.

        The batch is not checked: the model has run the same rows.
        """
        arrays = [rows[begin:end] for rows, begin, end in parts]
        return self._run(batch, arrays[0] if len(arrays) == 1 else np.concatenate(arrays))

    def run(self, tables: Array, positions: Array, reach: Array, count: int) -> list[tuple[Array, Array]]:
        """Return ``count`` further entries of each row, for :meth:`follow`: their block tables and positions."""
        return [(tables, positions + np.minimum(number, reach - 1)) for number in range(count)]

    def follow(self, step: tuple[Array, Array], token_ids: Array, given: Floats) -> Floats:
        """Run one more entry of each row, from its last token and the layer's previous output."""
        tables, positions = step
        ones = np.ones(len(positions), np.int32)
        return self._run(ModelBatch(token_ids, positions, ones, positions.astype(np.int32), tables), given)

    def logits(self, given: Floats) -> Floats:
        """Return float32 ``[n, vocab]``, on every rank."""
        found = self.model.logits(given, everywhere=True)
        assert found is not None
        return found

    def _run(self, batch: ModelBatch, hidden: Floats) -> Floats:
        joined = np.empty((2, *hidden.shape), np.float32)
        joined[1] = hidden
        self.model.embed(batch.token_ids, joined[0])
        if self.model.ranks is not None:
            self.model.ranks.all_reduce(joined[0])
        normed = self._decoder.normed(joined, self._decoder.weights.root)
        x = np.concatenate(list(normed), axis=1) @ self._join
        return self._decoder.normed(self._decoder.run_more(batch, x, self._layer, self._view), self._norm)
