"""The paged cache in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .batch import CacheShape

if TYPE_CHECKING:
    from hal_engine.model.config import LlamaConfig

Floats = np.ndarray[Any, np.dtype[np.float32]]


class HostCache:
    """The paged cache as arrays; the layout is that of :class:`hal_paddle_runner.kv_cache.PagedCache`."""

    def __init__(self, config: LlamaConfig, blocks: int, block_size: int) -> None:
        self.shape = CacheShape(blocks, block_size)
        # Zeros, not uninitialised memory: padding is read, and masked with a weight of exactly zero.
        sizes = self.shape.slots(config), config.head_dim
        self.layers: list[Floats] = [np.zeros(sizes, np.float32) for _ in range(config.num_hidden_layers)]
