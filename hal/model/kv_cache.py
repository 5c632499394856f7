"""The paged cache of keys and values (paging: Kwon et al. 2023).

A block holds ``block_size`` tokens of one sequence; a row's block table says which. Per layer there is one tensor for
keys and one for values, ``[blocks + 1, kv_heads, block_size, head_dim]``, kept flat as ``[slots, head_dim]``: tokens
are scattered to slots, and whole blocks are gathered, which costs a third of gathering tokens. The one block more is
never written and stays zero: padding reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import paddle
from hal_core import InvalidValue

from hal.model.batch import CacheShape
from hal.model.config import LlamaConfig

if TYPE_CHECKING:
    from paddle import Tensor


class PagedCache:
    """float32 keys and values of all layers; ``keys[layer]`` and ``values[layer]`` are the flat tensors."""

    def __init__(self, config: LlamaConfig, blocks: int, block_size: int, place: str) -> None:
        for name, value in (("blocks", blocks), ("block_size", block_size)):
            if value < 1:
                raise InvalidValue(f"{value} is below 1", cure="give a positive count", argument=name)
        self.shape = CacheShape(blocks, block_size)
        # Zeros, not uninitialised memory: padding is read, and masked with a weight of exactly zero.
        flat = np.zeros(((blocks + 1) * config.num_key_value_heads * block_size, config.head_dim), np.float32)
        layers = range(config.num_hidden_layers)
        self.keys: list[Tensor] = [paddle.to_tensor(flat, place=place) for _ in layers]
        self.values: list[Tensor] = [paddle.to_tensor(flat, place=place) for _ in layers]
        # The same memory, a block of one head a row.
        self._key_blocks = [keys.reshape([-1, block_size * config.head_dim]) for keys in self.keys]
        self._value_blocks = [values.reshape([-1, block_size * config.head_dim]) for values in self.values]

    def clear(self, layer: int, index: Tensor, zeros: Tensor) -> None:
        """Zero the slots ``index``; ``zeros`` is ``[slots, head_dim]``."""
        self.write(layer, index, zeros, zeros)

    def write(self, layer: int, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``[slots, head_dim]`` keys and values at the slots ``index``, in place."""
        paddle.scatter_(self.keys[layer], index, keys)
        paddle.scatter_(self.values[layer], index, values)

    def read(self, layer: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the blocks ``index`` (block number times kv_heads plus head), each
        ``[indices, block_size * head_dim]``."""
        return paddle.gather(self._key_blocks[layer], index), paddle.gather(self._value_blocks[layer], index)
