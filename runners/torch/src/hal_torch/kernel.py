"""Triton kernels: rotary positions with the cache's new entries, attention of few queries a slot over a paged cache,
and the gate of the MLP."""

# No ``from __future__ import annotations``: Triton reads the annotations.
import triton
import triton.language as tl


@triton.jit
def turn_and_store(  # noqa: ANN201
    query, key, value, query_stride, key_stride, value_stride, cos, sin, places, out, keys, values, bad,  # noqa: ANN001
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROOM: tl.constexpr, HALF: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Of a token and a key/value head: pairs (i, i + HALF) of its query heads turned into ``out``, and of its key into
    the cache, with its value; zeros in place of NaN and infinity, whose token is marked in ``bad``."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group, lane = tl.arange(0, GROUP_ROOM), tl.arange(0, ROOM)
    inside = lane < HALF
    c = tl.load(cos + row * HALF + lane, mask=inside, other=0.0)
    s = tl.load(sin + row * HALF + lane, mask=inside, other=0.0)

    wanted = (group < GROUP)[:, None] & inside[None, :]
    at = (head * GROUP + group)[:, None] * 2 * HALF + lane[None, :]
    first = tl.load(query + row * query_stride + at, mask=wanted, other=0.0).to(tl.float32)
    second = tl.load(query + row * query_stride + at + HALF, mask=wanted, other=0.0).to(tl.float32)
    target = out + row * KV_HEADS * GROUP * 2 * HALF + at
    tl.store(target, (first * c[None, :] - second * s[None, :]).to(out.dtype.element_ty), mask=wanted)
    tl.store(target + HALF, (second * c[None, :] + first * s[None, :]).to(out.dtype.element_ty), mask=wanted)

    source = key + row * key_stride + head * 2 * HALF + lane
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    low = (first * c - second * s).to(out.dtype.element_ty).to(tl.float32)
    high = (second * c + first * s).to(out.dtype.element_ty).to(tl.float32)
    source = value + row * value_stride + head * 2 * HALF + lane
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)

    at = (tl.load(places + row) * KV_HEADS + head) * 2 * HALF + lane
    sound_low, sound_high = tl.abs(low) < float("inf"), tl.abs(high) < float("inf")
    sound_first, sound_second = tl.abs(first) < float("inf"), tl.abs(second) < float("inf")
    tl.store(keys + at, tl.where(sound_low, low, 0.0).to(out.dtype.element_ty), mask=inside)
    tl.store(keys + at + HALF, tl.where(sound_high, high, 0.0).to(out.dtype.element_ty), mask=inside)
    tl.store(values + at, tl.where(sound_first, first, 0.0).to(out.dtype.element_ty), mask=inside)
    tl.store(values + at + HALF, tl.where(sound_second, second, 0.0).to(out.dtype.element_ty), mask=inside)
    sound = sound_low & sound_high & sound_first & sound_second
    if tl.min(sound.to(tl.int32), axis=0) == 0:
        tl.store(bad + row, 1)


@triton.jit
def gate(inner, out, width, TILE: tl.constexpr):  # noqa: ANN001, ANN201
    """``out`` ``[n, width]``: of ``inner`` ``[n, 2 * width]`` the first half's SiLU times the second."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    first = tl.load(inner + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(inner + row * 2 * width + width + column, mask=inside, other=0.0)
    turned = (first / (1.0 + tl.exp(-first))).to(second.dtype)  # rounded between the two, as torch does
    tl.store(out + row * width + column, turned * second, mask=inside)


@triton.jit
def share_out(last, work, share, arrived, most,  # noqa: ANN001, ANN201
    SLOTS: tl.constexpr, SLOTS_ROOM: tl.constexpr, EACH: tl.constexpr, EACH_ROOM: tl.constexpr,
    KV_HEADS: tl.constexpr, HEADS_ROOM: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Divide the keys of all slots into shares of one length, the least of ``LEAST * 2**k`` that makes at most ``most``
    shares of slots with keys, or one of each. A slot without keys has one too. Into ``share`` the length; into ``work``
    of each share its slot, its number and how many its slot has, 20 bits each, or -1 behind the last; zeros into
    ``arrived`` ``[SLOTS, KV_HEADS]``. A program writes ``TILE`` of ``work``."""
    slot, each, head = tl.arange(0, SLOTS_ROOM), tl.arange(0, EACH_ROOM), tl.arange(0, HEADS_ROOM)
    inside = slot < SLOTS
    wanted = inside[:, None] & (each < EACH)[None, :]
    seen = tl.load(last + slot[:, None] * EACH + each[None, :], mask=wanted, other=-1) + 1
    count = tl.maximum(tl.max(seen, axis=1), 0).to(tl.int32)
    length = tl.full([], LEAST, tl.int32)
    room = tl.maximum(tl.sum((count > 0).to(tl.int32), axis=0), most)
    while tl.sum((count + length - 1) // length, axis=0) > room:
        length = length * 2
    shares = tl.where(inside, tl.maximum((count + length - 1) // length, 1), 0)
    ends = tl.cumsum(shares, axis=0)
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mine = (number[:, None] < ends[None, :]) & (number[:, None] >= (ends - shares)[None, :])
    packed = slot.to(tl.int64) + (shares.to(tl.int64) << 40) - ((ends - shares).to(tl.int64) << 20)
    found = tl.sum(tl.where(mine, packed[None, :], 0), axis=1) + (number.to(tl.int64) << 20)
    tl.store(work + number, tl.where(number < tl.sum(shares, axis=0), found, -1), mask=number < SLOTS + most)
    if tl.program_id(0) == 0:
        tl.store(share, length)
        place = slot[:, None] * KV_HEADS + head[None, :]
        nothing = tl.zeros([SLOTS_ROOM, HEADS_ROOM], tl.int32)
        tl.store(arrived + place, nothing, mask=inside[:, None] & (head < KV_HEADS)[None, :])


@triton.jit
def attend_rows(  # noqa: ANN201
    query, keys, values, table, last, out, work, share, arrived, tops, totals, parts, scale, table_stride,  # noqa: ANN001
    SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, ROOM: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_ROOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``query``, ``out`` ``[slots * EACH, heads, WIDTH]``; the heads of one key/value head lie side by side. A program
    has all rows of a slot and one share of its keys and values, which it reads once. ``work``, ``share``, ``arrived``:
    of :func:`share_out`. Where a slot has several shares, each program leaves its part (largest score, sum and mixture,
    in ``tops``, ``totals``, ``parts``), and the last to arrive joins them in their order."""
    head, number = tl.program_id(0), tl.program_id(1)  # programs without work are the last to begin
    packed = tl.load(work + number)
    if packed >= 0:
        slot, shares = packed & 0xFFFFF, packed >> 40
        mine = (packed >> 20) & 0xFFFFF
        first = number - mine
        each, lane, offset = tl.arange(0, ROOM), tl.arange(0, WIDTH_ROOM), tl.arange(0, TILE)
        row = slot * EACH + each // GROUP
        seen = tl.load(last + row, mask=each < GROUP * EACH, other=-1) + 1
        count = tl.max(seen, axis=0)
        limit = tl.where(seen > 0, seen, count)  # a row without visible keys computes finite numbers
        inside = (each < GROUP * EACH)[:, None] & (lane < WIDTH)[None, :]
        place = (row * KV_HEADS * GROUP + head * GROUP + each % GROUP)[:, None] * WIDTH + lane[None, :]
        wanted = tl.load(query + place, mask=inside, other=0.0)
        length = tl.load(share).to(tl.int64)
        lower = mine * length
        upper = tl.minimum(lower + length, count)
        top = tl.full([ROOM], float("-inf"), tl.float32)
        total = tl.zeros([ROOM], tl.float32)
        mixed = tl.zeros([ROOM, WIDTH_ROOM], tl.float32)
        for begin in range(lower, upper, TILE):
            position = begin + offset
            there = position < upper
            block = tl.load(table + slot * table_stride + position // SIZE, mask=there, other=0).to(tl.int64)
            at = ((block * SIZE + position % SIZE) * KV_HEADS + head)[:, None] * WIDTH + lane[None, :]
            known = there[:, None] & (lane < WIDTH)[None, :]
            key = tl.load(keys + at, mask=known, other=0.0)
            value = tl.load(values + at, mask=known, other=0.0)
            scores = tl.dot(wanted, tl.trans(key), input_precision="ieee") * scale
            scores = tl.where(there[None, :] & (position[None, :] < limit[:, None]), scores, float("-inf"))
            above = tl.maximum(top, tl.max(scores, axis=1))
            level = tl.where(above > float("-inf"), above, 0.0)  # a draft's row may see no key of this share
            shown = tl.exp(scores - level[:, None])
            kept = tl.exp(top - level)
            total = total * kept + tl.sum(shown, axis=1)
            mixed = mixed * kept[:, None] + tl.dot(shown.to(value.dtype), value, input_precision="ieee")
            top = above
        if shares > 1:
            line = (number.to(tl.int64) * KV_HEADS + head) * ROOM + each
            tl.store(tops + line, top)
            tl.store(totals + line, total)
            tl.store(parts + line[:, None] * WIDTH_ROOM + lane[None, :], mixed)
            tl.debug_barrier()  # all threads' parts are written before the count says so
            before = tl.atomic_add(arrived + slot * KV_HEADS + head, 1, sem="acq_rel", scope="gpu")
            if before == shares - 1:
                tl.store(arrived + slot * KV_HEADS + head, 0)  # for the next layer
                top = tl.full([ROOM], float("-inf"), tl.float32)
                total = tl.zeros([ROOM], tl.float32)
                mixed = tl.zeros([ROOM, WIDTH_ROOM], tl.float32)
                for other in range(shares):
                    line = ((first + other).to(tl.int64) * KV_HEADS + head) * ROOM + each
                    highest = tl.load(tops + line, cache_modifier=".cg")
                    above = tl.maximum(top, highest)
                    level = tl.where(above > float("-inf"), above, 0.0)
                    kept, new = tl.exp(top - level), tl.exp(highest - level)
                    total = total * kept + tl.load(totals + line, cache_modifier=".cg") * new
                    part = tl.load(parts + line[:, None] * WIDTH_ROOM + lane[None, :], cache_modifier=".cg")
                    mixed = mixed * kept[:, None] + part * new[:, None]
                    top = above
                result = tl.where((seen > 0)[:, None], mixed / tl.where(total > 0, total, 1.0)[:, None], 0.0)
                tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
        else:
            result = tl.where((seen > 0)[:, None], mixed / tl.where(total > 0, total, 1.0)[:, None], 0.0)
            tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
