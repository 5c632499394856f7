"""Large values (G1 to G5): megabytes, many axes and runs, and offsets past 4 GiB."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy as copy_of
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hal_core.errors import InvalidValue, TicketTimeout
from hal_core.memory.dtypes import DTYPES, dtype_of
from hal_core.memory.plan import SCATTER_MAP, WRITE, Records, WritePlan
from hal_core.memory.views import ByteRange, View

from .fixtures import hook_calls
from .fixtures.large_blocks import GAP, LargeBlock, comb, elements
from .fixtures.large_offsets import BORDERS, HugeBlock
from .fixtures.prepared_calls import assert_copied
from .fixtures.sizes import MIB, SIZES, need, sizes
from .harness import backdoor
from .harness.asserts import assert_raises, assert_says
from .harness.backdoor import arrive
from .harness.bits import Array, noise
from .harness.guarantees import guarantee
from .harness.reached import PAST, Reached, past
from .harness.waiters import A_WHILE
from .kit import Kit
from .test_copies import stream_cases

if TYPE_CHECKING:
    from hal_core.memory.copies import CopyTicket
    from hal_core.tickets import Ticket


LENGTHS = SIZES["bytes of a value"].quick
"""Bytes of one value: both sides of every border at which a device may change its method."""
LONGEST = 17 * MIB + 3
RUNS = (255, 256, 257, 1025)
MANY_RUNS = {"quick": (70_001,), "default": (65_536, 70_001, 131_101), "nightly": (65_536, 70_001, 131_101)}
"""Separate runs of one target: more than a block, a grid, two grids or a 16-bit index hold."""
FILLED_RUNS = 131_101
"""Runs that a scalar fills in every profile."""
WAYS = ("array", "array with gaps", "scalar", "device value")
TO_RUNS = (*WAYS, "reversed device value")
SOURCE = 4 * MIB
AXES = {"quick": (*range(13),), "default": (*range(13), 17), "nightly": (*range(13), 17)}
"""Counts of axes; past 16 a target has a hundred thousand elements."""
ONES = {"quick": (0, 3, 19), "default": (0, 1, 3, 8, 19), "nightly": (0, 1, 3, 8, 19)}
"""Additional axes of one element: with them up to 32, which every NumPy supports."""
DEEP = 16
"""Deepest nesting of lists."""
PLENTY = 4
"""Axes of a device value from which on a device may refuse, with a reason."""


def ways(block: LargeBlock, source: LargeBlock, target: View, seed: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield ``(name, value, elements)`` for each form of a value with the target's shape."""
    some = elements(seed, target.shape, target.dtype)
    if target.dtype.name != "bfloat16":
        yield "array", some, some
        gaps = np.repeat(some, 2, axis=-1)[..., ::2] if some.ndim else some
        yield "array with gaps", gaps, some
    one = elements(seed + 1, (1,), target.dtype)
    if target.dtype.kind != "float":
        yield "scalar", one[0].item(), one[0]
    value = View.contiguous(source.memory, 64 + seed % 3 * target.dtype.itemsize, target.shape, target.dtype)
    yield "device value", value, source.over(value)
    value = value[tuple(slice(None, None, -1) for _ in target.shape)]
    yield "reversed device value", value, source.over(value)


@guarantee(5)
def test_g05_values_of_every_length_land_whole_and_nowhere_else(kit: Kit) -> None:
    source = LargeBlock(kit, LENGTHS[-1] + 192, noise(1, LENGTHS[-1] + 192))
    reached = Reached(f"{name}, {many}" for name in WAYS for many in [*PAST][:3])
    block = LargeBlock(kit, (sum(LENGTHS) + GAP * len(LENGTHS)))
    for turn, chosen in enumerate(WAYS):
        at = GAP
        for length in LENGTHS:
            target = block.at(at, (length,))
            for name, value, should in ways(block, source, target, length + turn):
                if name == chosen:
                    block.write(target, value, should)
                    for many in past(length):
                        reached.note(f"{name}, {many}")
            at += length + GAP
        block.check(f"values of {LENGTHS[0]} to {LENGTHS[-1]} bytes, each by way of a {chosen}")
    reached.check()


@guarantee(5)
def test_g05_a_value_of_many_megabytes_lands_whole(kit: Kit) -> None:
    block = LargeBlock(kit, LONGEST + 2 * GAP)
    target = block.at(GAP, (LONGEST,))
    value = noise(2, LONGEST)
    block.write(target, value)
    block.check(f"an array of {LONGEST} bytes")
    inner = block.at(GAP + 5, (LONGEST - 11,))
    block.write(inner, 0x3C, np.uint8(0x3C))
    block.check(f"a scalar over {LONGEST - 11} bytes")
    shifted = block.at(GAP + 3, (2_100_001,), "int64")  # beyond 2**24 bytes, and no multiple of a page
    if shifted.offset % 8:
        shifted = block.at(-(-shifted.offset // 8) * 8, (2_100_001,), "int64")
    block.write(shifted, elements(3, shifted.shape, shifted.dtype))
    block.check("an array of 2 100 001 int64")


def many_runs(block: LargeBlock, begin: int, runs: int, dtype: str) -> dict[str, View]:
    """Return targets of so many separate runs, one after the other, starting at byte ``begin``."""
    kind = dtype_of(dtype)
    item = kind.itemsize
    reach, pairs = runs * 2 * item, runs * 5 * item
    return {
        "every second": View(block.memory, begin, (runs,), (2 * item,), kind),
        "backwards": View(block.memory, begin + reach + (runs - 1) * 2 * item, (runs,), (-2 * item,), kind),
        "pairs": View(block.memory, begin + 2 * reach, (runs, 2), (5 * item, item), kind),
        "columns": View(block.memory, begin + 2 * reach + pairs, (2, runs), (2 * item, 5 * item), kind),
    }


KINDS = ("every second", "backwards", "pairs", "columns")


@guarantee(5)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
@pytest.mark.parametrize("way", TO_RUNS)
def test_g05_targets_of_many_runs_are_written_run_by_run(kit: Kit, way: str, dtype: str) -> None:
    reached = Reached(f"{kind}, past 8 bits" for kind in KINDS)
    size = dtype_of(dtype).itemsize
    block, source = LargeBlock(kit, 15 * max(RUNS) * size), LargeBlock(kit, SOURCE >> 4, noise(4, SOURCE >> 4))
    for runs in RUNS:
        for kind, target in many_runs(block, 0, runs, dtype).items():
            write_by(way, block, source, target, runs)
            for many in past(runs):
                reached.note(f"{kind}, {many}")
        block.check(f"targets of {runs} runs of {dtype}, each by way of a {way}")
    reached.check()


@guarantee(5, also=(1,))
@pytest.mark.parametrize(("way", "dtype"), [*zip(WAYS, ["int64", "uint8", "int32", "uint16"], strict=True)])
def test_g05_targets_of_more_runs_than_16_bits_count_are_written(kit: Kit, way: str, dtype: str) -> None:
    reached = Reached(f"{kind}, past 16 bits" for kind in KINDS)
    size = dtype_of(dtype).itemsize
    counts = MANY_RUNS[kit.effort.profile] if way != "scalar" else (FILLED_RUNS,)
    block, source = LargeBlock(kit, 15 * max(counts) * size), LargeBlock(kit, SOURCE, noise(4, SOURCE))
    for runs in counts:
        for kind, target in many_runs(block, 0, runs, dtype).items():
            write_by(way, block, source, target, runs)
            reached.note(f"{kind}, {past(runs)[-1]}")
        block.check(f"targets of {runs} runs of {dtype}, each by way of a {way}")
    reached.check()


@guarantee(5)
def test_g05_runs_past_24_bits_of_offset_are_written_where_they_are(kit: Kit) -> None:
    border, runs = 16 * MIB, 301  # from here on, a 32-bit float cannot distinguish neighbours
    block, source = LargeBlock(kit, border + 1 * MIB), LargeBlock(kit, SOURCE >> 4, noise(4, SOURCE >> 4))
    for turn, way in enumerate(WAYS):
        for target in many_runs(block, border - 601 + turn * 16 * runs, runs, "uint8").values():
            write_by(way, block, source, target, turn)
    block.check("targets on both sides of byte 2**24")


def write_by(way: str, block: LargeBlock, source: LargeBlock, target: View, seed: int) -> None:
    """Write a value in one form."""
    found = {name: (value, should) for name, value, should in ways(block, source, target, seed)}
    block.write(target, *found[way])


@guarantee(5)
def test_g05_every_count_of_axes_is_written_element_by_element(kit: Kit) -> None:
    rng = np.random.default_rng(kit.effort.seed)
    counts = AXES[kit.effort.profile]
    values = [f"{axes} axes, device value" for axes in range(PLENTY + 1)]
    reached = Reached([f"{axes} axes" for axes in counts] + values)
    block, source = LargeBlock(kit, MIB), LargeBlock(kit, MIB, noise(5, MIB))
    besides = ONES[kit.effort.profile]
    for axes in counts:
        for turn, ones in enumerate(besides if axes <= DEEP else besides[:1]):
            dtype = DTYPES[(axes * len(besides) + turn) % len(DTYPES)] if axes <= DEEP else dtype_of("uint8")
            target = comb(block, 4096, axes, ones, dtype, rng)
            what = f"{target}, which has {axes} axes of several elements,"
            for name, value, should in ways(block, source, target, axes):
                if not name.endswith("device value"):
                    block.write(target, value, should)
                    block.check(f"{what} was set to a {name}")
            if len(target.shape) <= DEEP and dtype.kind == "int":
                should = elements(axes + 9, target.shape, dtype)
                block.write(target, should.tolist() if should.ndim else should.item(), should)
                block.check(f"{what} was set to a list nested as deep")
            reached.note(f"{axes} axes")
            for value in (View.contiguous(source.memory, 64, target.shape, dtype), like(source, target, 4096)):
                taken = block.write_or_refuse(target, value, source.over(value))
                assert taken or len(target.shape) > PLENTY, f"{value} for {target} was refused"
                if taken and axes <= PLENTY:
                    reached.note(f"{axes} axes, device value")
                block.check(f"{what} was set to {value}" + ("" if taken else ", which was refused"))
    reached.check()


def like(source: LargeBlock, target: View, begin: int) -> View:
    """Return a view of another block with a target's strides, in all reversed directions."""
    strides = tuple(-stride for stride in target.strides)
    low = sum((extent - 1) * stride for extent, stride in zip(target.shape, strides, strict=True) if stride < 0)
    return View(source.memory, begin - low, target.shape, strides, target.dtype)


@guarantee(3, requires=("async_h2d", "can_hold_stream"))
def test_g03_the_call_returns_while_held_for_values_of_any_size(kit: Kit) -> None:
    lengths = [255, 4096, 16_385, 65_535, 65_536, 65_537, 262_145, MIB, 3 * MIB + 1]
    reached = Reached([*PAST][:3])
    for shape in ("contiguous", "strided"):
        block, at, tickets = LargeBlock(kit, 2 * sum(lengths) + GAP * (len(lengths) + 1)), GAP, []
        before = block.should.copy()
        other = kit.device.stream()
        with kit.held(block.stream):
            for length in lengths if shape == "contiguous" else lengths[:-3]:
                step = 1 if shape == "contiguous" else 2
                target = View(block.memory, at, (length,), (step,), dtype_of("uint8"))
                value = noise(15, length)
                ticket = block.set(target, value)
                assert not ticket.done(), f"the ticket of {length} bytes ({shape}) is done, but its stream is held"
                assert ticket.mode == "async", f"the ticket of {length} bytes says {ticket.mode!r}"
                tickets.append(ticket)
                block.over(target)[...] = value
                at += step * length + GAP
                for many in past(length):
                    reached.note(many)
            seen = backdoor.read(kit.device, block.memory, other)
            wrong = np.flatnonzero(seen != before)
            assert not len(wrong), f"byte {wrong[0]} was written while the stream is held ({shape})"
        for ticket in tickets:
            arrive(ticket)
        block.check(f"values of {lengths} bytes on a stream that was held ({shape})")
    reached.check()


@guarantee(4, requires=("async_h2d", "can_hold_stream"), also=(1,))
@pytest.mark.parametrize(
    ("value", "length"),
    [*(("array", length) for length in ((1 << 16) - 1, 1 << 16, MIB, 9 * MIB)), ("fill of 0", 16 * MIB)],
)
def test_g04_a_large_value_comes_after_small_writes_to_its_bytes(kit: Kit, value: str, length: int) -> None:
    """Small writes, a large one over them, and small ones again, all queued while their stream is held. The fill is so
    large that it ends after the small ones if another queue makes it."""
    block, tickets, what = LargeBlock(kit, length + 2 * GAP), [], f"{value} of {length} bytes"
    given = 0 if value == "fill of 0" else noise(16, length)

    def small(fill: int, past: int) -> None:
        for at in (0, length // 2, length - 32):
            target = block.at(GAP + at + past, (7,))
            tickets.append(block.set(target, np.full(7, fill, np.uint8)))
            block.over(target)[...] = fill

    with kit.held(block.stream, f"{what} between small writes to its bytes"):
        small(1, 0)
        target = block.at(GAP, (length,))
        tickets.append(block.set(target, given))
        block.over(target)[...] = given
        small(2, 16)
        why = f"{what}, on a stream that is held: its ticket"
        assert_raises(TicketTimeout, lambda: tickets[3].wait(A_WHILE), why)
    for ticket in tickets:
        arrive(ticket)
    block.check(f"{what} between small writes to its bytes, on a stream that was held")


MEETINGS = 6
"""Rounds in which two copies go on at once."""
TAIL = 64
"""Bytes of the end of a source, which change before each value that is taken from it."""


@guarantee(1, requires="async_h2d", also=(2, 4))
def test_g01_a_large_device_value_is_taken_at_its_place_in_the_stream(kit: Kit) -> None:
    """Copied out, copied within the device and overwritten, all queued before any ticket is waited for."""
    for nbytes in sizes(kit, "bytes of a value on the device"):
        take_device_values(kit, nbytes, 6 if nbytes < 4 * MIB else 2)


def take_device_values(kit: Kit, nbytes: int, rounds: int) -> None:
    """Take so many values from one source, on a stream of each kind."""
    __tracebackhide__ = True
    what, source = f"a device value of {nbytes} bytes", LargeBlock(kit, nbytes, noise(17, nbytes))
    small, targets = LargeBlock(kit, rounds * TAIL), [LargeBlock(kit, nbytes) for _ in range(rounds)]
    full, words, last = (nbytes // 8,), (TAIL // 8,), nbytes - TAIL
    for name, stream in stream_cases(kit):
        copies: list[CopyTicket] = []
        for block in (source, small, *targets):
            block.stream = stream
        with kit.held(stream, what):
            for turn, target in enumerate(targets):
                fresh, value = noise(18 + turn, TAIL).view(np.int64), source.at(0, full, "int64")
                queue(source, source.at(last, words, "int64"), fresh)  # too early a copy misses it
                taken = queue(target, target.at(0, full, "int64"), value, source.over(value))
                copies.append(kit.device.copy_out(target.memory, [ByteRange(last, TAIL)], stream))
                tail = target.at(last, words, "int64")
                queue(small, small.at(turn * TAIL, words, "int64"), tail, fresh)
                queue(target, tail, noise(turn, TAIL).view(np.int64))  # too late a copy writes over it
            if kit.can_hold:
                why = f"{what}, on a stream that is held: its ticket"
                assert_raises(TicketTimeout, partial(taken.wait, A_WHILE), why)
        for turn, copy in enumerate(copies):
            assert_copied(copy, noise(18 + turn, TAIL), f"the copy out after {what}, number {turn + 1}, on {name}")
        for block in (source, small, *targets):
            block.check(f"{rounds} values of {nbytes} bytes on the device, each copied on and written over, on {name}")


def queue(block: LargeBlock, target: View, value: Array | View, elements: Array | None = None) -> Ticket:
    """Set a value without waiting, and expect it; ``elements`` are those of a view."""
    ticket = block.set(target, value)
    block.over(target)[...] = value if elements is None else elements
    return ticket


@guarantee(1, also=(5,))
def test_g01_a_call_that_moves_many_bytes_moves_each(kit: Kit) -> None:
    """From the host, between two memories and to the host; looked at near each power of two and at the ends."""
    stream = kit.device.default_stream
    for nbytes in sizes(kit, "bytes that a call moves"):
        need(4 * nbytes, "a value and its copies")
        source, target = kit.device.allocate(nbytes), kit.device.allocate(nbytes)
        given = np.zeros(nbytes, np.uint8)
        places = sorted({*(1 << power for power in range(8, nbytes.bit_length())), nbytes - 1} - {nbytes})
        for number, at in enumerate(places):
            given[at - 1 : at + 1] = number + 1, number + 101
        over = [View.contiguous(one, 0, (nbytes,), dtype_of("uint8")) for one in (source, target)]
        arrive(kit.bound.async_set_value(target=over[0], value=given, stream=stream))
        arrive(kit.bound.async_set_value(target=over[1], value=255, stream=stream))
        moved = {"from the host": source}
        try:
            arrive(kit.bound.async_set_value(target=over[1], value=over[0], stream=stream))
            moved["between two memories"] = target
        except InvalidValue as error:  # a list of the value's elements does not fit the device's staging ring
            assert_says(error, device=kit.bound.name, hook="async_set_value", argument="ring")
        for what, memory in moved.items():
            copy = kit.device.copy_out(memory, [ByteRange(0, nbytes)], stream)
            arrive(copy)
            got = copy.data[0][:nbytes]
            wrong = [at for at in places if (got[at - 1 : at + 1] != given[at - 1 : at + 1]).any()]
            assert not wrong, f"of {nbytes} bytes that were moved {what}, those beside {wrong} are other ones"
            assert np.array_equal(got, given), f"{nbytes} bytes that were moved {what} are other ones"


@guarantee(1, requires=("async_h2d", "can_hold_stream"), also=(4, 6))
def test_g01_strided_device_values_on_two_streams_do_not_meet(kit: Kit) -> None:
    """Both are queued on held streams, which are released together. A shared buffer shows only in some rounds."""
    count, streams = MIB // 8, [kit.device.stream() for _ in range(2)]
    given = [noise(31 + at, count * 16).view(np.int64) for at in range(2)]
    sources, targets = (
        [LargeBlock(kit, count * 16, one.view(np.uint8)) for one in given],
        [LargeBlock(kit, count * 8) for _ in range(2)],
    )
    for turn in range(MEETINGS):
        with kit.held(streams[0], "a strided value"), kit.held(streams[1], "a strided value"):
            for at, (source, target) in enumerate(zip(sources, targets, strict=True)):
                value = source.at(0, (2 * count,), "int64")[turn % 2 :: 2]
                target.stream = streams[at]
                queue(target, target.at(0, (count,), "int64"), value, given[at][turn % 2 :: 2])
        for at, target in enumerate(targets):
            target.check(f"a strided value of {count * 8} bytes on stream {at} of two, round {turn + 1}")


@guarantee(1)
def test_g01_what_is_copied_out_past_4_gib_lies_there(kit: Kit, huge_block: HugeBlock) -> None:
    """Every window has different bytes; they are copied together, and one by one."""
    huge_block.tell_apart()
    huge_block.check("every window was given other bytes")
    for begin, part in zip(huge_block.windows, huge_block.parts(), strict=True):
        copied = kit.device.copy_out(huge_block.memory, [part], huge_block.stream)
        huge_block.compare(copied, [begin], "every window was given other bytes, and one was copied")


@guarantee(5)
def test_g05_offsets_past_4_gib_are_not_cut(kit: Kit, huge_block: HugeBlock) -> None:
    huge_block.check("writing by a plan around 2 GiB, 4 GiB and the end")
    kind, memory = dtype_of("int32"), huge_block.memory
    for turn, (name, border) in enumerate(BORDERS.items()):
        target = View.contiguous(memory, border - 16, (8,), kind)
        value = np.arange(100 * turn, 100 * turn + 8, dtype=np.int32)
        huge_block.set(target, value, [item.tobytes() for item in value])
        huge_block.check(f"an array across {name}")
        target = View(memory, border + 64, (6,), (-8,), kind)
        huge_block.set(target, 7 + turn, [np.int32(7 + turn).tobytes()] * 6)
        huge_block.check(f"a scalar, backwards, past {name}")
    for step in (1 << 31, 1 << 32):
        target = View(memory, 256, (2,), (step,), kind)
        huge_block.set(target, [step >> 20, 2], [np.int32(step >> 20).tobytes(), np.int32(2).tobytes()])
        target = View(memory, 512 + step, (2, 2), (-step, 4), kind)
        huge_block.set(target, 5, [np.int32(5).tobytes()] * 4)
        huge_block.check(f"strides of {step} bytes")


@guarantee(5, also=(9,))
def test_g05_device_values_and_records_past_4_gib_are_not_cut(kit: Kit, huge_block: HugeBlock) -> None:
    kind, memory = dtype_of("int64"), huge_block.memory
    below, above = View.contiguous(memory, 1024, (8,), kind), View.contiguous(memory, (1 << 32) + 1032, (8,), kind)
    value = elements(16, (8,), kind)
    huge_block.set(below, value, [item.tobytes() for item in value])
    huge_block.set(above, below, [item.tobytes() for item in value])
    huge_block.check("a device value from below to past 4 GiB")
    other = elements(17, (8,), kind)
    huge_block.set(above, other, [item.tobytes() for item in other])
    huge_block.set(below, above[::-1], [item.tobytes() for item in other[::-1]])
    huge_block.check("a device value from past 4 GiB to below")
    stride = 1 << 30  # a slot's share: with it slot 4 is beyond 32 bits
    records = Records(
        np.array([4, 0, 2], np.int32), noise(18, 3 * 16).reshape(3, 16), np.array([(320, stride, 0, 16)], SCATTER_MAP)
    )
    registered = copy_of(hook_calls.working(kit).state)
    registered.scatter_map = records.scatter_map  # as of a state so large, which would take seconds to reset
    kit.device.register_state(registered)
    plan = WritePlan(memory, np.zeros(0, WRITE), [], records)
    arrive(kit.device.submit(plan, huge_block.stream))
    for slot, record in zip((4, 0, 2), records.data, strict=True):
        huge_block.expect(320 + slot * stride, record.tobytes())
    huge_block.check("records of slots past 4 GiB")
