"""The paged cache as blocks of bytes: a block has the keys and values of all layers, including a proposer's.

A block is float32 ``[layers, 2, kv_heads * block_size * head_dim]``: keys before values, in the order of the layer's
own cache, which the fingerprint names.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from hal_core import DONE, InvalidValue, Ticket

from hal.local_rank import HOST_PLACE

from .host_cache import HostCache

if TYPE_CHECKING:
    from paddle import Tensor

    from .model import Cache, Model
    from .prediction import PredictionLayer
    from .prediction_host import HostPrediction

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


class HostPart:
    """Some layers in host memory, each of keys and of values as an array whose first axis is the block. For each layer
    a block has two rows of floats, its keys and its values."""

    def __init__(self, arrays: Sequence[tuple[Floats, Floats]], layout: str) -> None:
        self.layers, self.layout, self._arrays = len(arrays), layout, arrays

    def read(self, blocks: np.ndarray[Any, Any], out: Floats) -> None:
        """Copy the blocks to ``out``, ``[blocks, layers, 2, row]``."""
        for layer, pair in enumerate(self._arrays):
            for which, array in enumerate(pair):
                out[:, layer, which] = array.reshape(len(array), -1)[blocks]

    def write(self, blocks: np.ndarray[Any, Any], rows: Floats) -> None:
        """Copy ``[blocks, layers, 2, row]`` to the blocks."""
        for layer, pair in enumerate(self._arrays):
            for which, array in enumerate(pair):
                array.reshape(len(array), -1)[blocks] = rows[:, layer, which]


class PlacedPart:
    """Layers in Paddle's tensors, viewed as ``[2 * blocks * heads, row of a head]``."""

    def __init__(self, tensors: Sequence[Tensor], heads: int, layout: str, place: str) -> None:
        self.layers, self.layout, self._tensors, self._heads, self._place = len(tensors), layout, tensors, heads, place

    def _indices(self, blocks: np.ndarray[Any, Any]) -> list[Tensor]:
        """Return the rows of the blocks' keys, and those of their values."""
        import paddle

        found = (blocks[:, None] * self._heads + np.arange(self._heads)).reshape(-1)
        half = self._tensors[0].shape[0] // 2
        return [paddle.to_tensor(rows, place=self._place) for rows in (found, found + half)]

    def read(self, blocks: np.ndarray[Any, Any], out: Floats) -> None:
        """See :class:`HostPart`. Waits for the work on the place's current stream."""
        import paddle

        indices = self._indices(blocks)
        for layer, tensor in enumerate(self._tensors):
            for which, index in enumerate(indices):
                out[:, layer, which] = paddle.gather(tensor, index).numpy().reshape(len(blocks), -1)

    def write(self, blocks: np.ndarray[Any, Any], rows: Floats) -> None:
        """See :class:`HostPart`. In the order of the place's current stream, and waits for it."""
        import paddle

        indices = self._indices(blocks)
        for layer, tensor in enumerate(self._tensors):
            for which, index in enumerate(indices):
                flat = np.ascontiguousarray(rows[:, layer, which]).reshape(len(blocks) * self._heads, -1)
                paddle.scatter_(tensor, index, paddle.to_tensor(flat, place=self._place))
        if self._place != HOST_PLACE:
            paddle.device.synchronize(self._place)


Part: TypeAlias = HostPart | PlacedPart


def part_of(cache: Cache, heads: int, place: str) -> Part:
    """Return the layers of a paged cache, whose blocks have so many heads."""
    size, layout, layers = cache.shape.block_size, "heads, tokens", cache.layers
    if isinstance(cache, HostCache):
        pairs = [array.reshape(2, cache.shape.blocks + 1, -1) for array in cache.layers]
        return HostPart([(pair[0], pair[1]) for pair in pairs], layout)
    seen = [tensor.reshape([-1, size * tensor.shape[1]]) for tensor in layers]
    return PlacedPart(seen, heads, layout, place)


class PagedBlocks:
    """A :class:`hal_core.handover.BlockCache`: the blocks of a model's cache and, with ``prediction``, of its layer."""

    def __init__(self, model: Model, prediction: HostPrediction | PredictionLayer | None = None) -> None:
        """Raises InvalidValue for a model without a cache."""
        cache = model.cache
        if cache is None:
            raise InvalidValue("the model has no cache yet", cure="call allocate_cache first", argument="model")
        heads = model.local.num_key_value_heads
        self._parts = [part_of(cache, heads, model.place)]
        if prediction is not None:
            self._parts.append(part_of(prediction.cache, heads, model.place))
        self.blocks = cache.shape.blocks
        self._layers = sum(part.layers for part in self._parts)
        self._row = heads * cache.shape.block_size * model.config.head_dim
        self.block_bytes = 4 * 2 * self._layers * self._row
        self._facts = {
            "dtype": "float32",
            "byte order": sys.byteorder,
            "block size": str(cache.shape.block_size),
            "layers": str(self._layers),
            "kv heads": str(model.config.num_key_value_heads),
            "head dim": str(model.config.head_dim),
            "layout": "; ".join(f"{part.layers} of {part.layout}" for part in self._parts),
        }

    def facts(self) -> Mapping[str, str]:
        """See :class:`hal_core.handover.BlockCache`."""
        return self._facts

    def read(self, blocks: Sequence[int]) -> Bytes:
        """See :class:`hal_core.handover.BlockCache`."""
        ids = np.asarray(blocks, np.int64)
        found = np.empty((len(ids), self._layers, 2, self._row), np.float32)
        for part, layers in self._layered():
            part.read(ids, found[:, layers])
        return found.reshape(len(ids), -1).view(np.uint8)

    def write(self, blocks: Sequence[int], data: Bytes) -> Ticket:
        """See :class:`hal_core.handover.BlockCache`."""
        ids = np.asarray(blocks, np.int64)
        rows = _aligned(data).view(np.float32).reshape(len(ids), self._layers, 2, self._row)
        for part, layers in self._layered():
            part.write(ids, rows[:, layers])
        return DONE

    def _layered(self) -> list[tuple[Part, slice]]:
        """Return each part with its range of the block's layers."""
        found, first = list[tuple[Part, slice]](), 0
        for part in self._parts:
            found.append((part, slice(first, first + part.layers)))
            first += part.layers
        return found


def _aligned(data: Bytes) -> Bytes:
    """Return the bytes aligned for floats: those of a message may begin anywhere."""
    return data if data.ctypes.data % 4 == 0 and data.flags.c_contiguous else data.copy()
