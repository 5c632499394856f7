"""The paged cache of keys and values (paging: Kwon et al. 2023).

A block holds ``block_size`` tokens of one sequence; a row's block table lists its blocks. Each layer has one tensor,
``[2, blocks + 1, kv_heads, block_size, head_dim]``, keys before values, so that one operator writes both and one reads
both. Tokens are scattered to slots ``[…, head_dim]``; pieces of blocks are gathered, as long rows copy faster than
tokens. The last block is never written and stays zero: padding reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import paddle
from hal_engine.model.config import LlamaConfig

from .batch import CacheShape
from .operators import gather, scatter_

if TYPE_CHECKING:
    from paddle import Tensor


class PagedCache:
    """float32 keys and values of all layers; ``layers[number]`` is ``[slots, head_dim]``, keys before values."""

    def __init__(self, config: LlamaConfig, blocks: int, block_size: int, place: str) -> None:
        self.shape = CacheShape(blocks, block_size)
        # Zeros, not uninitialised memory: padding is read, and masked with a weight of exactly zero.
        flat = np.zeros((self.shape.slots(config), config.head_dim), np.float32)
        self.layers: list[Tensor] = [paddle.to_tensor(flat, place=place) for _ in range(config.num_hidden_layers)]
        # The same memory, one piece of a head per row.
        self._pieces = [layer.reshape([-1, self.shape.piece * config.head_dim]) for layer in self.layers]

    def write(self, layer: int, index: Tensor, rows: Tensor) -> None:
        """Store ``[slots, head_dim]`` keys and values at the slots ``index``, in place."""
        scatter_(self.layers[layer], index, rows)

    def read(self, layer: int, index: Tensor) -> Tensor:
        """Return the pieces ``index``, each of one head, ``[indices, piece * head_dim]``."""
        return gather(self._pieces[layer], index)
