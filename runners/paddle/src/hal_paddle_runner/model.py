"""A loaded decoder: Llama, Mistral, Qwen2 and Qwen3 architecture, float32, with a paged cache.

Two forms: prepared calls in host memory (:mod:`hal_paddle_runner.host`), which need no Paddle but one library of its
wheel, and Paddle's operators on any place (:mod:`hal_paddle_runner.llama`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from hal_engine.model.config import LlamaConfig, read_config
from hal_engine.model.loading import read_tensors
from hal_engine.model.split import UNSPLIT, Shard, check_split, local_config

from hal.local_rank import HOST_PLACE

from .rotary import Rotary

if TYPE_CHECKING:
    from .batch import CacheShape, ModelBatch
    from .ranks import TensorRanks

Rows = Any
"""Rows of floats, ``[n, width]``: an array, or Paddle's tensor."""


class Cache(Protocol):
    """The paged cache of a model; ``layers``: of each layer keys before values, ``[slots, head_dim]``."""

    shape: CacheShape
    layers: list[Any]


class Model(ABC):
    """One decoder, or one rank's part of it. Not thread-safe: one worker drives it.

    With ``ranks`` it is a part of a decoder that is split over them (:mod:`hal_engine.model.split`), and every rank
    runs the same batches in the same order. ``everywhere``: all ranks get the logits, not only the first. ``note``:
    about the computations, for ``-v``.
    """

    cache: Cache | None = None

    def __init__(
        self,
        config: LlamaConfig,
        *,
        place: str = HOST_PLACE,
        ranks: TensorRanks | None = None,
        everywhere: bool = False,
        note: str = "",
    ) -> None:
        self.config, self.place, self.ranks, self.everywhere, self.note = config, place, ranks, everywhere, note
        self.shard = shard_of(ranks)
        self.local = local_config(config, self.shard)
        self.rotary = Rotary(config)

    @classmethod
    def load(cls, directory: Path, **options: Any) -> Self:  # noqa: ANN401 (of the class)
        """Load ``config.json`` and the safetensors of ``directory``; ``options``: of the class.

        Raises ``InvalidValue`` naming file and field or tensor for anything that is missing, broken or not supported.
        """
        config, tensors = read_checkpoint(Path(directory), options.get("ranks"), options.get("place", HOST_PLACE))
        made: Callable[..., Self] = cls
        return made(config, tensors, **options)

    @abstractmethod
    def allocate_cache(self, blocks: int, block_size: int) -> None:
        """Allocate a new zeroed paged cache of ``blocks`` blocks of ``block_size`` tokens, ids 0 to blocks - 1."""

    @abstractmethod
    def prepare(self, most_rows: int) -> None:
        """Before the first step: make what decode steps of up to so many rows need, as far as it takes no long time."""

    @abstractmethod
    def forward(self, batch: ModelBatch) -> np.ndarray | None:
        """Run one step: store the tokens' keys and values; return float32 ``[n, vocab]``, the logits after each of
        ``batch.outputs``, by default the rows' last tokens, or None on a rank that does not get them.

        The result for a row depends on the other rows only by rounding (about 1e-6: the CPU's matrix product is not
        batch-invariant). Raises ``InvalidValue`` for a batch that cannot be computed; nothing is written then.
        """

    @abstractmethod
    def forward_with_hidden(self, batch: ModelBatch) -> tuple[np.ndarray | None, Rows]:
        """Do the same, and also return the last layer's output for each token, ``[tokens, hidden]``, normed, for the
        prediction layer."""

    def logits(self, normed: Rows, *, everywhere: bool = False) -> np.ndarray | None:
        """Return float32 ``[n, vocab]`` of hidden states after the last norm: on every rank or only on the first, as
        set for the model unless ``everywhere``."""
        part = self.head(normed)
        if self.ranks is None:
            logits: np.ndarray = np.asarray(part)
            return logits
        parts = self.ranks.all_gather(part) if self.everywhere or everywhere else self.ranks.gather(part)
        if parts is None:
            return None
        rows: np.ndarray = np.asarray(parts).transpose(1, 0, 2).reshape(part.shape[0], -1)
        return np.ascontiguousarray(rows[:, : self.config.vocab_size])

    @abstractmethod
    def head(self, normed: Rows) -> Rows:
        """Return the logits of this rank's part of the vocabulary."""

    def here(self, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which tokens' embeddings this rank has, bool ``[n]``, and the row of each, 0 for others."""
        part = self.shard.part(self.config.vocab_size)
        here = (token_ids >= part.start) & (token_ids < part.stop)
        return here, np.where(here, token_ids - part.start, 0)


def read_checkpoint(
    directory: Path, ranks: TensorRanks | None, place: str
) -> tuple[LlamaConfig, dict[str, np.ndarray]]:
    """Return the configuration and the tensors of a checkpoint, or those of a rank's part, which are the caller's."""
    config, shard = read_config(directory), shard_of(ranks)
    check_split(config, shard.size)
    if place != HOST_PLACE:
        from .weights import check_place

        check_place(place)
    return config, read_tensors(directory, config, shard)


def shard_of(ranks: TensorRanks | None) -> Shard:
    """Return the part of a rank."""
    return UNSPLIT if ranks is None else Shard(ranks.index, ranks.size)
