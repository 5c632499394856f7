"""Attention over a paged cache: of prompts by torch's SDPA over gathered pages, of decoding rows by a Triton kernel.

SDPA's flash kernel takes packed sequences. Where it does not run (float32, the CPU, an odd width of heads), SDPA gets a
mask instead.

A layer's keys, and its values, are ``[blocks + 2, block_size, kv_heads, head_dim]``. The first extra block takes
discarded writes. The second is never written, so that padding of a gather is finite. Keys and values that are NaN or
infinite are stored as zeros and their token is marked ``bad``: no request affects another one's attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from hal_core import Unavailable
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Prompts:
    """Pieces of prompts, packed one after the other, each of which sees its own keys up to each token.

    - ``places`` int64 ``[keys]``: where the keys lie that they may see, packed in the same order.
    - ``ends`` int32 ``[pieces + 1]`` each: where each piece ends among tokens, and among keys, 0 first; the last
      pieces may be empty.
    - ``bias`` ``[tokens, keys]``: 0 for a key that a token sees, else very low; None where the kernels need none.
    """

    places: Tensor
    ends: Pair
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Shares:
    """How the keys of slots are divided among programs: ``length`` int32 ``[1]``, keys of a share; ``work`` int64
    ``[most]``, whose each share is, as the kernels read it, -1 behind the last; ``arrived`` int32 ``[slots,
    kv_heads]``, zeros, how many shares of a slot are computed."""

    length: Tensor
    work: Tensor
    arrived: Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of slots that decode, of one token each, as many of every slot, which lie side by side: ``table`` ``[slots,
    blocks]``, the blocks of each slot, and ``last`` int64 ``[rows]``, the last position that a row sees; below 0:
    none. ``shares``: for kernels that divide keys; :meth:`Kernels.rows` makes them."""

    table: Tensor
    last: Tensor
    shares: Shares | None = None

    @property
    def each(self) -> int:
        """How many rows a slot has."""
        return len(self.last) // len(self.table)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens of a run: the ``count`` tokens of ``prompts``, then those of ``rows``; either may be None.

    - ``ids``, ``positions`` int64 ``[n]``; a position below 0 marks padding.
    - ``places`` int64 ``[n]``: where keys and values are written, as flat indices of the cache.
    - ``bad`` uint8 ``[n]``: set where a token's keys or values are NaN or infinite.
    """

    ids: Tensor
    positions: Tensor
    places: Tensor
    bad: Tensor
    count: int
    prompts: Prompts | None
    rows: Rows | None


class Kernels(Protocol):
    """The operations that differ by device."""

    @property
    def packs(self) -> bool:
        """Whether prompts need no ``bias``."""

    def attend_prompts(self, query: Tensor, cache: Pair, prompts: Prompts) -> Tensor:
        """Attention of the packed ``query`` ``[tokens, heads, head_dim]``."""

    def gated(self, inner: Tensor) -> Tensor:
        """Of ``[n, 2 * width]`` the first half's SiLU times the second."""

    def store(self, query: Tensor, key: Tensor, value: Tensor, cache: Pair, tokens: Tokens, turns: Pair) -> Tensor:
        """Turn ``query`` ``[n, heads, head_dim]`` and ``key`` by their positions (``turns``: cos, sin ``[n, half]``),
        store ``key`` and ``value``, and return the turned query."""

    def rows(self, table: Tensor, last: Tensor, cache: Tensor) -> Rows:
        """Return the rows of a step, for all of its layers. ``cache``: keys of one of them."""

    def attend(self, query: Tensor, cache: Pair, rows: Rows, out: Tensor) -> None:
        """Compute attention of one query a row, into ``out``; a row that sees no key gives zeros."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, cache: Pair, tokens: Tokens, turns: Pair, kernels: Kernels
) -> Tensor:
    """Store the new keys and values; softmax attention, contiguous ``[n, heads, head_dim]``."""
    turned, count = kernels.store(query, key, value, cache, tokens, turns), tokens.count
    if tokens.prompts is not None:
        mixed = kernels.attend_prompts(turned[:count], cache, tokens.prompts)
        if tokens.rows is None:
            return mixed
    out = torch.empty_like(turned)
    if tokens.prompts is not None:
        out[:count] = mixed
    if tokens.rows is not None:
        kernels.attend(turned[count:], cache, tokens.rows, out[count:])
    return out


def lowest(dtype: torch.dtype) -> float:
    """Bias of a key that a token does not see: its share is 0, and no sum overflows."""
    return float(torch.finfo(dtype).min) / 4


def _attend_masked(query: Tensor, cache: Pair, prompts: Prompts) -> Tensor:
    """All pieces as one sequence. A key/value head is a batch of its own, so that the query heads that share it need no
    copy of it."""
    count, heads, width = query.shape
    kv_heads = cache[0].shape[2]
    group = heads // kv_heads
    key, value = (
        cached.flatten(0, 1)[prompts.places].transpose(0, 1)[:, None].expand(-1, group, -1, -1) for cached in cache
    )
    split = query.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
    # In float32 the tokens must equal those of the cpu device: no kernel that multiplies with less precision.
    kinds = [SDPBackend.MATH] if query.dtype == torch.float32 else [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kinds):
        mixed = functional.scaled_dot_product_attention(split, key, value, prompts.bias)
    return mixed.permute(2, 0, 1, 3).reshape(count, heads, width)


def _attend_packed(query: Tensor, cache: Pair, prompts: Prompts) -> Tensor:
    """By the flash kernel of SDPA for packed sequences; a token is the last of its piece's keys less those after it."""
    key, value = (cached.flatten(0, 1)[prompts.places] for cached in cache)
    most = (len(query), len(key))
    found: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, *prompts.ends, *most, 0.0, is_causal=True, return_debug_mask=False
    )[0]
    return found


def packs(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Return whether SDPA's flash kernel runs for heads of this type and width on a GPU."""
    return dtype.itemsize == 2 and head_dim % 8 == 0 and head_dim <= 256 and _capability(device) >= (8, 0)


def _capability(device: torch.device) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


class TorchKernels:
    """The same in torch: the reference for the Triton kernels, and the implementation for torch's CPU."""

    packs = False

    def attend_prompts(self, query: Tensor, cache: Pair, prompts: Prompts) -> Tensor:
        return _attend_masked(query, cache, prompts)

    def gated(self, inner: Tensor) -> Tensor:
        first, second = inner.chunk(2, -1)
        return functional.silu(first) * second

    def store(self, query: Tensor, key: Tensor, value: Tensor, cache: Pair, tokens: Tokens, turns: Pair) -> Tensor:
        for cached, new in zip(cache, (_turned(key, *turns), value), strict=True):
            sound = torch.isfinite(new)
            tokens.bad.bitwise_or_((~sound.flatten(1).all(1)).to(torch.uint8))
            cached.flatten(0, 1).index_copy_(0, tokens.places, torch.where(sound, new, 0))
        return _turned(query, *turns).contiguous()

    def rows(self, table: Tensor, last: Tensor, cache: Tensor) -> Rows:
        return Rows(table, last)

    def attend(self, query: Tensor, cache: Pair, rows: Rows, out: Tensor) -> None:
        reach = torch.arange(rows.table.shape[1] * cache[0].shape[1], device=query.device)
        sees = reach <= rows.last.view(-1, rows.each, 1)  # [slots, rows of each, keys]
        key, value = (cached[rows.table.long()].flatten(1, 2).transpose(1, 2) for cached in cache)
        split = query.unflatten(0, (-1, rows.each)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(split, key, value, sees[:, None], enable_gqa=True)
        out.copy_(torch.where((rows.last >= 0)[:, None, None], mixed.transpose(1, 2).flatten(0, 1), 0))


class TritonKernels:
    """Kernels that read each key and value of a slot once, and no slot further than it is. ``packs``: as of the
    function of this name.

    Keys are divided among programs (``least``: of a share), so that few slots with many keys use the whole GPU:
    ``programs`` for heads of 128 numbers, one for each multiprocessor of an H100 or H200, and four times as many for
    heads of 64, of which more run at once. More only take turns, and programs without work delay the others."""

    tile, warps, stages, columns = 64, 4, 3, 1024
    least, programs, shared = 256, 132, 32

    def __init__(self, *, packs: bool) -> None:
        self.packs = packs
        try:
            from . import kernel
        except ImportError as error:
            cure = "install triton, which torch for CUDA brings along"
            raise Unavailable(f"the attention kernel needs Triton: {error}", cure=cure) from error
        self._kernel: Any = kernel

    def attend_prompts(self, query: Tensor, cache: Pair, prompts: Prompts) -> Tensor:
        return _attend_packed(query, cache, prompts) if self.packs else _attend_masked(query, cache, prompts)

    def gated(self, inner: Tensor) -> Tensor:
        count, width = len(inner), inner.shape[1] // 2
        out = inner.new_empty((count, width))
        self._kernel.gate[(count, -(-width // self.columns))](inner, out, width, self.columns, num_warps=self.warps)
        return out

    def store(self, query: Tensor, key: Tensor, value: Tensor, cache: Pair, tokens: Tokens, turns: Pair) -> Tensor:
        count, heads, width = query.shape
        kv_heads, half = cache[0].shape[2], width // 2
        group = heads // kv_heads
        turned = torch.empty_like(query, memory_format=torch.contiguous_format)
        given = (query, key, value, query.stride(0), key.stride(0), value.stride(0), *turns, tokens.places)
        rooms = (group, 1 << (group - 1).bit_length(), half, max(1, (1 << (width - 1).bit_length()) // 2))
        self._kernel.turn_and_store[(count, kv_heads)](
            *given, turned, *cache, tokens.bad, kv_heads, *rooms, num_warps=1
        )
        return turned

    def rows(self, table: Tensor, last: Tensor, cache: Tensor) -> Rows:
        (kv_heads, width), slots = cache.shape[2:], len(table)
        most, made = self.programs * (4 if width <= 64 else 1) // kv_heads, {"device": table.device}
        length, arrived = (torch.empty(size, dtype=torch.int32, **made) for size in ((1,), (slots, kv_heads)))
        work = torch.empty(slots + most, dtype=torch.int64, **made)
        rows = Rows(table, last, Shares(length, work, arrived))
        rooms = (slots, _room(slots), rows.each, _room(rows.each), kv_heads, _room(kv_heads))
        self._kernel.share_out[(-(-len(work) // self.shared),)](
            *(last, work, length, arrived, most), *rooms, self.least, self.shared, num_warps=self.warps
        )
        return rows

    def attend(self, query: Tensor, cache: Pair, rows: Rows, out: Tensor) -> None:
        (_, heads, width), shares = query.shape, rows.shares
        assert shares is not None
        most = len(shares.work)
        size, kv_heads = cache[0].shape[1:3]
        group = heads // kv_heads
        height, room = max(16, _room(group * rows.each)), max(16, _room(width))  # a product's least sizes
        parts = torch.empty((most * kv_heads * height, room + 2), dtype=torch.float32, device=query.device)
        tops, totals, mixed = parts.view(-1).split([len(parts), len(parts), len(parts) * room])
        given = (query, *cache, rows.table, rows.last, out, shares.work, shares.length, shares.arrived)
        rooms = (size, kv_heads, group, rows.each, height, width, room)
        stages = self.stages if query.dtype.itemsize < 4 else 1
        self._kernel.attend_rows[(kv_heads, most)](
            *(*given, tops, totals, mixed, width**-0.5, rows.table.stride(0)),
            *(*rooms, self.tile),
            num_warps=self.warps,
            num_stages=stages,
        )


def _room(count: int) -> int:
    """The power of two that holds so many."""
    return 1 << (count - 1).bit_length()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: pairs (i, i + head_dim / 2), in float32."""
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
