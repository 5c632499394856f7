"""Attention of one query a row over a paged cache, in Triton: rotary positions and the cache's new entries, then a
program for each row and key/value head."""

# No ``from __future__ import annotations``: Triton reads the annotations.
import triton
import triton.language as tl


@triton.jit
def turn_and_store(  # noqa: ANN201
    query, key, value, query_stride, key_stride, value_stride, cos, sin, places, out, keys, values, bad,  # noqa: ANN001
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Pairs (i, i + HALF) of a head turned: ``query`` into ``out``, ``key`` with ``value`` into the cache, zeros in
    place of what is NaN or infinite, whose token is marked in ``bad``."""
    row, head, lane = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, ROOM)
    inside = lane < HALF
    wrong = tl.zeros([ROOM], tl.int32)
    c = tl.load(cos + row * HALF + lane, mask=inside, other=0.0)
    s = tl.load(sin + row * HALF + lane, mask=inside, other=0.0)
    if head < HEADS:
        source = query + row * query_stride + head * 2 * HALF + lane
        target = out + (row * HEADS + head) * 2 * HALF + lane
    else:
        at = (tl.load(places + row) * KV_HEADS + head - HEADS) * 2 * HALF + lane
        given = value + row * value_stride + (head - HEADS) * 2 * HALF + lane
        low = tl.load(given, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(given + HALF, mask=inside, other=0.0).to(tl.float32)
        sound_low, sound_high = tl.abs(low) < float("inf"), tl.abs(high) < float("inf")
        tl.store(values + at, tl.where(sound_low, low, 0.0).to(out.dtype.element_ty), mask=inside)
        tl.store(values + at + HALF, tl.where(sound_high, high, 0.0).to(out.dtype.element_ty), mask=inside)
        wrong = (~sound_low | ~sound_high).to(tl.int32)
        source = key + row * key_stride + (head - HEADS) * 2 * HALF + lane
        target = keys + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    low = (first * c - second * s).to(out.dtype.element_ty)
    high = (second * c + first * s).to(out.dtype.element_ty)
    if head >= HEADS:
        sound_low, sound_high = tl.abs(low.to(tl.float32)) < float("inf"), tl.abs(high.to(tl.float32)) < float("inf")
        wrong = wrong | (~sound_low | ~sound_high).to(tl.int32)
        low = tl.where(sound_low, low, 0.0).to(out.dtype.element_ty)
        high = tl.where(sound_high, high, 0.0).to(out.dtype.element_ty)
        if tl.max(wrong, axis=0) > 0:
            tl.store(bad + row, 1)
    tl.store(target, low, mask=inside)
    tl.store(target + HALF, high, mask=inside)


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
    asked = tl.load(query + place, mask=inside, other=0.0)
    top = tl.full([GROUP_ROOM], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROOM], tl.float32)
    mixed = tl.zeros([GROUP_ROOM, WIDTH_ROOM], tl.float32)
    for begin in range(0, count, TILE):
        position = begin + offset
        there = position < count
        block = tl.load(table + row * table_stride + position // SIZE, mask=there, other=0).to(tl.int64)
        at = ((block * SIZE + position % SIZE) * KV_HEADS + head)[:, None] * WIDTH + lane[None, :]
        known = there[:, None] & (lane < WIDTH)[None, :]
        key = tl.load(keys + at, mask=known, other=0.0)
        value = tl.load(values + at, mask=known, other=0.0)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        above = tl.maximum(top, tl.max(scores, axis=1))
        shares = tl.exp(scores - above[:, None])
        kept = tl.exp(top - above)
        total = total * kept + tl.sum(shares, axis=1)
        mixed = mixed * kept[:, None] + tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        top = above
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
