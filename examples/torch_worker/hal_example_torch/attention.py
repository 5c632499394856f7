"""Attention over a paged cache: in torch, of any number of queries a row; and a Triton kernel, of one.

A layer's keys, and its values, are ``[blocks + 1, block_size, kv_heads, head_dim]``; a row's table says which blocks
hold its tokens, in order. The one block more is nobody's: what must go nowhere is written there.
"""

from __future__ import annotations

from typing import Any

import torch
from hal_core import Unavailable
from torch import Tensor


def attend(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, last: Tensor) -> Tensor:
    """Softmax attention of ``[rows, queries, heads, head_dim]``, as much out.

    :param table: ``[rows, blocks]``: where the keys of positions from 0 on are.
    :param last: int64 ``[rows, queries]``: the last position that each query sees; below 0: none, and it gives zeros.
    """
    rows, queries, heads, width = query.shape
    kv_heads = keys.shape[2]
    key, value = (cached[table.long()].flatten(1, 2).transpose(1, 2) for cached in (keys, values))
    sees = torch.arange(key.shape[2], device=query.device) <= last[:, :, None]  # [rows, queries, keys]
    known = sees.any(1)[:, None, :, None]
    value = torch.where(known, value, torch.zeros((), dtype=value.dtype, device=value.device))
    grouped = query.reshape(rows, queries, kv_heads, -1, width).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = (grouped @ key.transpose(2, 3)).float() * width**-0.5
    scores = scores.reshape(rows, kv_heads, -1, queries, key.shape[2]).masked_fill(~sees[:, None, None], float("-inf"))
    shares = torch.nan_to_num(torch.softmax(scores, -1)) if queries == 1 else torch.softmax(scores, -1)
    mixed = shares.to(value.dtype).flatten(2, 3) @ value
    return mixed.reshape(rows, kv_heads, -1, queries, width).permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, width)


class FusedAttention:
    """The same for one query a row, in one kernel that reads each key and value once and no row further than it is."""

    def __init__(self) -> None:
        try:
            from .kernel import attend_one
        except ImportError as error:
            cure = "install triton, which torch for CUDA brings along"
            raise Unavailable(f"the attention kernel needs Triton: {error}", cure=cure) from error
        self._kernel: Any = attend_one

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, table: Tensor, last: Tensor) -> Tensor:
        rows, _, heads, width = query.shape
        size, kv_heads = keys.shape[1:3]
        out = torch.empty_like(query)
        group = heads // kv_heads
        rooms = (group, 1 << (group - 1).bit_length(), width, 1 << (width - 1).bit_length())
        given = (query, keys, values, table, last, out, width**-0.5, table.stride(0), size, kv_heads, *rooms)
        self._kernel[(rows, kv_heads)](*given, 32, num_warps=4)
        return out
