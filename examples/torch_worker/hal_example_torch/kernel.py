"""Attention of one query a row over a paged cache, in Triton: a program for each row and key/value head."""

# No ``from __future__ import annotations``: Triton reads the annotations.
import triton
import triton.language as tl


@triton.jit
def attend_one(  # noqa: ANN201
    query, keys, values, table, last, out, scale, table_stride,  # noqa: ANN001
    SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROOM: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_ROOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``query``, ``out`` ``[rows, heads, WIDTH]``; the heads of one key/value head lie side by side."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(last + row) + 1
    group, lane, offset = tl.arange(0, GROUP_ROOM), tl.arange(0, WIDTH_ROOM), tl.arange(0, TILE)
    inside = (group < GROUP)[:, None] & (lane < WIDTH)[None, :]
    place = (row * KV_HEADS * GROUP + head * GROUP + group)[:, None] * WIDTH + lane[None, :]
    asked = tl.load(query + place, mask=inside, other=0.0).to(tl.float32) * scale
    top = tl.full([GROUP_ROOM], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROOM], tl.float32)
    mixed = tl.zeros([GROUP_ROOM, WIDTH_ROOM], tl.float32)
    for begin in range(0, count, TILE):
        position = begin + offset
        there = position < count
        block = tl.load(table + row * table_stride + position // SIZE, mask=there, other=0).to(tl.int64)
        at = ((block * SIZE + position % SIZE) * KV_HEADS + head)[:, None] * WIDTH + lane[None, :]
        known = there[:, None] & (lane < WIDTH)[None, :]
        key = tl.load(keys + at, mask=known, other=0.0).to(tl.float32)
        value = tl.load(values + at, mask=known, other=0.0).to(tl.float32)
        scores = tl.sum(asked[:, None, :] * key[None, :, :], axis=2)
        scores = tl.where(there[None, :], scores, float("-inf"))
        above = tl.maximum(top, tl.max(scores, axis=1))
        shares = tl.exp(scores - above[:, None])
        kept = tl.exp(top - above)
        total = total * kept + tl.sum(shares, axis=1)
        mixed = mixed * kept[:, None] + tl.sum(shares[:, :, None] * value[None, :, :], axis=1)
        top = above
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
