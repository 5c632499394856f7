"""The decoder in host memory: prepared calls of oneDNN, and NumPy. Nothing here imports Paddle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .host_cache import HostCache
from .joining import join_prediction
from .model import Model
from .prepared import PreparedDecoder

if TYPE_CHECKING:
    from hal_engine.model.config import LlamaConfig

    from .batch import ModelBatch
    from .ranks import TensorRanks

Floats = np.ndarray[Any, np.dtype[np.float32]]


class HostModel(Model):
    """See :class:`hal_paddle_runner.model.Model`; ``decoder`` has its calls."""

    cache: HostCache | None = None

    def __init__(
        self,
        config: LlamaConfig,
        tensors: dict[str, np.ndarray],
        *,
        ranks: TensorRanks | None = None,
        everywhere: bool = False,
    ) -> None:
        """``tensors``: the checkpoint's, or the rank's part (:func:`hal_engine.model.loading.read_tensors`), which are
        emptied to make room. Raises :class:`hal_paddle_runner.onednn.Unsuitable` where the calls cannot be made."""
        super().__init__(config, ranks=ranks, everywhere=everywhere)
        self.embedding: Floats = tensors["model.embed_tokens.weight"]
        self.decoder = PreparedDecoder(config, self.local, tensors, ranks, self.embed, self.rotary.factors)
        self.prediction = join_prediction(self.local, tensors)

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        """See :meth:`Model.allocate_cache`."""
        self.cache = HostCache(self.local, blocks, block_size)
        self.decoder.attach(self.cache)

    def prepare(self, most_rows: int) -> None:
        """See :meth:`Model.prepare`."""
        self.note = f"calls of oneDNN; {self.decoder.prepare(most_rows)}"

    def forward(self, batch: ModelBatch) -> np.ndarray | None:
        """See :meth:`Model.forward`."""
        hidden, outputs = self.decoder.run(batch)
        if not len(outputs):
            return np.zeros((0, self.config.vocab_size), np.float32)
        return self.logits(self.decoder.normed(chosen(hidden, outputs)))

    def forward_with_hidden(self, batch: ModelBatch) -> tuple[np.ndarray | None, Floats]:
        """See :meth:`Model.forward_with_hidden`."""
        hidden, outputs = self.decoder.run(batch)
        hidden = self.decoder.normed(hidden)
        if not len(outputs):
            return np.zeros((0, self.config.vocab_size), np.float32), hidden
        return self.logits(chosen(hidden, outputs)), hidden

    def head(self, normed: Floats) -> Floats:
        """See :meth:`Model.head`."""
        return self.decoder.logits(normed)

    def embed(self, token_ids: np.ndarray, rows: Floats) -> None:
        """Write each token's row of the embedding, zeros where another rank has it."""
        if self.ranks is None:
            self.embedding.take(token_ids, 0, rows, "clip")
            return
        here, places = self.here(token_ids)
        self.embedding.take(places, 0, rows, "clip")
        rows[~here] = 0


def chosen(hidden: Floats, outputs: np.ndarray) -> Floats:
    """Return some of the rows, in rising order."""
    return hidden if len(outputs) == len(hidden) else hidden[outputs]
