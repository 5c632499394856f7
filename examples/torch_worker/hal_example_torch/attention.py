"""Attention over a paged cache: in torch, of any number of queries a row; and by Triton kernels, of one.

A layer's keys, and its values, are ``[blocks + 1, block_size, kv_heads, head_dim]``; a row's table says which blocks
hold its tokens, in order. The one block more is nobody's: what must go nowhere is written there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hal_core import Unavailable
from torch import Tensor
from torch.nn import functional

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Tokens:
    """What a run is of: ``queries`` tokens of each of ``rows`` rows, and where they go.

    - ``ids``, ``positions`` int64 ``[rows, queries]``; a position is the last that its token sees, below 0: none.
    - ``places`` int64 ``[rows * queries]``: where keys and values are written, of the cache's slots in one line.
    - ``table`` ``[rows, blocks]``: the rows' blocks.
    """

    ids: Tensor
    positions: Tensor
    places: Tensor
    table: Tensor


Attention = Callable[[Tensor, Tensor, Tensor, Pair, Tokens, Pair], Tensor]
"""Of ``query`` ``[rows, queries, heads, head_dim]``, ``key``, ``value`` (of kv_heads), the cache's keys and values,
into which they go, the tokens, and their turns (cos, sin) ``[rows, queries, 1, head_dim / 2]``; as ``query``."""


def attend(query: Tensor, key: Tensor, value: Tensor, cache: Pair, tokens: Tokens, turns: Pair) -> Tensor:
    """Softmax attention; a query that sees nothing gives zeros."""
    for cached, new in zip(cache, (_turned(key, *turns), value), strict=True):
        cached.flatten(0, 1).index_copy_(0, tokens.places, new.flatten(0, 1))
    reach = torch.arange(tokens.table.shape[1] * cache[0].shape[1], device=query.device)
    sees = reach <= tokens.positions[:, :, None]  # [rows, queries, keys]
    key, value = (
        torch.where(sees.any(1)[:, :, None, None], cached[tokens.table.long()].flatten(1, 2), 0).transpose(1, 2)
        for cached in cache  # blocks are used again: who had them may have left NaN
    )
    query = _turned(query, *turns).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(query, key, value, sees[:, None], enable_gqa=True)
    return torch.where(sees.any(2)[:, None, :, None], mixed, 0).transpose(1, 2)


class FusedAttention:
    """The same for one query a row, in two kernels: each key and value is read once, and no row further than it is."""

    tile, warps, stages = 64, 4, 3

    def __init__(self) -> None:
        try:
            from . import kernel
        except ImportError as error:
            cure = "install triton, which torch for CUDA brings along"
            raise Unavailable(f"the attention kernel needs Triton: {error}", cure=cure) from error
        self._kernel: Any = kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, cache: Pair, tokens: Tokens, turns: Pair) -> Tensor:
        rows, _, heads, width = query.shape
        size, kv_heads = cache[0].shape[1:3]
        turned, out = (torch.empty_like(query, memory_format=torch.contiguous_format) for _ in "qo")
        given = (query, key, value, query.stride(0), key.stride(0), value.stride(0), *turns, tokens.places)
        half, room = width // 2, 1 << (width - 1).bit_length()
        self._kernel.turn_and_store[(rows, heads + kv_heads)](
            *given, turned, *cache, heads, kv_heads, half, max(1, room // 2), num_warps=1
        )
        group = heads // kv_heads
        rooms = (group, max(16, 1 << (group - 1).bit_length()), width, max(16, room))  # a product's least sizes
        known = (turned, *cache, tokens.table, tokens.positions, out, width**-0.5, tokens.table.stride(0))
        stages = self.stages if query.dtype.itemsize < 4 else 1
        self._kernel.attend_one[(rows, kv_heads)](
            *known, size, kv_heads, *rooms, self.tile, num_warps=self.warps, num_stages=stages
        )
        return out


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: pairs (i, i + head_dim / 2), in float32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
