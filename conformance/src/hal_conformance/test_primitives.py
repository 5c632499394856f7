"""The primitives on which all else relies: plans (G4, G5), copies out (G1), and copies within the device (G2, G5)."""

from __future__ import annotations

import numpy as np
from hal_core.devices.base import DeviceBase
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.plan import SCATTER_MAP, PlanBuilder, Records, WritePlan
from hal_core.memory.views import ByteRange, View
from hypothesis import strategies as st

from .draw.views import BLOCK_BYTES, draw_view
from .fixtures.block import Block
from .harness import backdoor
from .harness.asserts import assert_no_error
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .harness.places import method
from .kit import Draw, Kit, examples

COPIED = "async_set_value of a value on the device"


def copy_within(kit: Kit) -> str:
    """Return what copies from view to view, with its place, for messages: a device may have a hook of its own."""
    own = getattr(type(kit.device), "async_set_value", None) is not DeviceBase.async_set_value
    return f"{method(kit.device, 'async_set_value' if own else 'copy_within')} copied"


def draw_writes(draw: Draw, block: Block) -> PlanBuilder:
    """Return copies and fills that may overlap; the block expects them in their order."""
    builder = PlanBuilder(block.memory)
    for _ in range(draw(st.integers(1, 6), "writes")):
        offset = draw(st.integers(0, 60), "offset")
        data = np.frombuffer(draw(st.binary(min_size=1, max_size=24), "bytes"), np.uint8)
        if draw(st.booleans(), "a fill"):
            element = np.frombuffer(data[:1].tobytes() * 8, draw(st.sampled_from(["u1", "u2", "u4", "u8"]), "of"))[0]
            element = element.dtype.type(int(element) ^ 1)
            count = draw(st.integers(1, 5), "elements")
            builder.fill(np.array([offset]), count * element.itemsize, element)
            data = np.frombuffer(element.tobytes() * count, np.uint8)
        else:
            builder.copy(np.array([offset]), len(data), data)
        block.should[offset : offset + len(data)] = data
    return builder


@guarantee(1, also=(2, 3, 5))
def test_g01_a_copy_within_the_device_keeps_order_and_never_waits(kit: Kit) -> None:
    block, source = Block(kit), Block(kit)
    rows, columns, int32 = 3, 4, dtype_of("int32")
    numbers = np.arange(1, rows * columns + 1, dtype=np.int32).reshape(rows, columns)
    backdoor.write(kit.device, source.memory, 0, numbers.view(np.uint8).reshape(-1), source.stream)
    target = View(block.memory, 16, (rows, columns), (2 * columns * 4, 8), int32)  # every second element
    value = View.contiguous(source.memory, 0, (rows, columns), int32)
    with kit.held(block.stream, COPIED):
        ticket = block.set(target, value)
    arrive(ticket)
    block.expect_bytes(target, [number.tobytes() for number in numbers.reshape(-1)])
    block.check(f"{copy_within(kit)} {value} to {target}")


@guarantee(4)
@examples()
def test_g04_of_two_writes_to_one_place_in_one_plan_the_last_wins(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    builder = draw_writes(draw, block)
    arrive(kit.device.submit(builder.build(), block.stream))
    block.check("a plan whose writes overlap")


@guarantee(5)
@examples()
def test_g05_records_are_spread_over_the_slots_they_name(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    widths = draw(st.lists(st.sampled_from([1, 4, 8, 16, 24]), min_size=1, max_size=3), "bytes of each field")
    slots = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True), "slots")
    scatter_map, base, source = [], 64, 0
    for width in widths:
        scatter_map.append((base, width, source, width))
        base, source = base + -(-5 * width // 64) * 64, source + width
    size = len(slots) * source
    data = np.frombuffer(draw(st.binary(min_size=size, max_size=size), "records"), np.uint8).reshape(len(slots), source)
    records = Records(np.array(slots, np.int32), data.copy(), np.array(scatter_map, SCATTER_MAP))
    plan = WritePlan(block.memory, PlanBuilder(block.memory).build().writes, [], records)
    arrive(kit.device.submit(plan, block.stream))
    for record, slot in zip(data, slots, strict=True):
        for start, stride, at, width in scatter_map:
            block.should[start + slot * stride :][:width] = record[at : at + width]
    block.check(f"records for slots {slots}")


@guarantee(2)
@examples(0.5)
def test_g02_a_plan_may_be_changed_once_it_was_submitted(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    data = np.frombuffer(draw(st.binary(min_size=8, max_size=64), "bytes"), np.uint8).copy()
    builder = PlanBuilder(block.memory)
    builder.copy(np.array([64]), len(data), data)
    block.should[64 : 64 + len(data)] = data
    with kit.held(block.stream):
        ticket = kit.device.submit(builder.build(), block.stream)
        data[...] = ~data
    arrive(ticket)
    block.check("the plan's payload was overwritten by its caller")


@guarantee(1)
@examples()
def test_g01_ranges_are_copied_out_as_they_are_in_stream_order(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    parts = []
    for _ in range(draw(st.integers(1, 5), "ranges")):
        offset = draw(st.integers(0, BLOCK_BYTES), "offset")
        parts.append(ByteRange(offset, draw(st.integers(0, BLOCK_BYTES - offset), "bytes")))
    draw_writes(draw, block)
    should = block.should.copy()
    with kit.held(block.stream):
        backdoor.put(kit.device, block.memory, [(0, should.tobytes())], block.stream)
        why = f"{method(kit.device, 'copy_out')} of {parts}"
        copied = assert_no_error(lambda: kit.device.copy_out(block.memory, parts, block.stream), why)
        backdoor.put(kit.device, block.memory, [(0, backdoor.poisoned(BLOCK_BYTES).tobytes())], block.stream)
    arrive(copied)
    assert len(copied.data) == len(parts), f"{len(copied.data)} arrays were copied out for the ranges {parts}"
    for part, data in zip(parts, copied.data, strict=True):
        there = should[part.offset : part.end]
        assert data.tobytes() == there.tobytes(), f"{part} was copied out as {data}, not {there}"


@guarantee(1)
@examples(0.5)
def test_g01_a_stream_that_waits_for_an_event_sees_what_came_before_it(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    first, second = block.stream, kit.device.stream()
    byte = draw(st.integers(0, 255), "byte")
    block.should[...] = byte
    with kit.held(first):
        backdoor.put(kit.device, block.memory, [(0, block.should.tobytes())], first)
        event = kit.device.event(first)
        second.wait(event)
        if kit.can_hold:
            assert not event.done(), "an event behind held work is done"
        copied = kit.device.copy_out(block.memory, [ByteRange(0, BLOCK_BYTES)], second)
    arrive(copied)
    block.compare(copied.data[0], "a copy on a stream that waits for the write's event")


@guarantee(2)
@examples(0.5)
def test_g02_a_value_on_the_device_is_read_in_stream_order(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    target = draw_view(draw, block.memory)
    source = Block(kit, fill=7)
    value = source.view(target.shape, target.dtype)
    other, elsewhere = Block(kit), kit.device.stream()
    spare = other.view((1,), target.dtype)
    with kit.held(block.stream, COPIED):  # the work that makes the value, uses it and overwrites it is all in flight
        source.set(value, 0)
        ticket = block.set(target, value)
        for _ in range(50):  # time for a copy that did not wait for the stream
            arrive(kit.bound.async_set_value(target=spare, value=0, stream=elsewhere))
        source.set(value, 1)
    arrive(ticket)
    block.expect_bytes(target, [bytes(target.dtype.itemsize)] * target.size)
    block.check(f"{copy_within(kit)} a value that was made just before it and overwritten just after")


@guarantee(5)
@examples(0.5)
def test_g05_a_device_value_lands_element_by_element(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    target = draw_view(draw, block.memory)
    source = Block(kit, fill=3)
    value = source.view(target.shape, target.dtype)[tuple(slice(None, None, -1) for _ in target.shape)]
    arrive(block.set(target, value))
    block.expect_bytes(target, source.elements(value))
    block.check(f"{copy_within(kit)} {value} to {target}")
    source.check(f"{copy_within(kit)} it to another block")
