"""The paged cache of keys and values (paging: Kwon et al. 2023).

A block holds ``block_size`` tokens of one sequence; a row's block table lists its blocks. Each layer has one tensor,
``[2, blocks + 1, kv_heads, block_size, head_dim]``, keys before values, so that one operator writes both and one reads
both. Tokens are scattered to slots ``[…, head_dim]``; pieces of blocks are gathered, as long rows copy faster than
tokens. The last block is never written and stays zero: padding reads it.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from hal_core import InvalidValue
from hal_engine.model.config import LlamaConfig

from .batch import CacheShape
from .operators import gather, scatter_

if TYPE_CHECKING:
    from paddle import Tensor


def shared_array(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the memory of a float32 tensor on the host as an array, to be written too. The caller keeps the tensor."""
    memory = (ctypes.c_float * math.prod(tensor.shape)).from_address(tensor.data_ptr())
    return np.ctypeslib.as_array(memory).reshape(tensor.shape)


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a host tensor as an array, without a copy if Paddle can share it; it must not be written."""
    return np.from_dlpack(tensor) if hasattr(tensor, "__dlpack__") else tensor.numpy()


class PagedCache:
    """float32 keys and values of all layers; ``layers[number]`` is ``[slots, head_dim]``, keys before values."""

    def __init__(self, config: LlamaConfig, blocks: int, block_size: int, place: str) -> None:
        for name, value in (("blocks", blocks), ("block_size", block_size)):
            if value < 1:
                raise InvalidValue(f"{value} is below 1", cure="give a positive count", argument=name)
        self.shape = CacheShape(blocks, block_size)
        # Zeros, not uninitialised memory: padding is read, and masked with a weight of exactly zero.
        slots = 2 * (blocks + 1) * config.num_key_value_heads * block_size
        flat = np.zeros((slots, config.head_dim), np.float32)
        self.layers: list[Tensor] = [paddle.to_tensor(flat, place=place) for _ in range(config.num_hidden_layers)]
        # The same memory, one piece of a head per row.
        self._pieces = [layer.reshape([-1, self.shape.piece * config.head_dim]) for layer in self.layers]

    def write(self, layer: int, index: Tensor, rows: Tensor) -> None:
        """Store ``[slots, head_dim]`` keys and values at the slots ``index``, in place."""
        scatter_(self.layers[layer], index, rows)

    def read(self, layer: int, index: Tensor) -> Tensor:
        """Return the pieces ``index``, each of one head, ``[indices, piece * head_dim]``."""
        return gather(self._pieces[layer], index)
