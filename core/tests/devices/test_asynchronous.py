"""Ownership of memory in the asynchronous base, under every order of execution."""

import gc

import numpy as np
import pytest
from blocks_of_latched import INT64, RING, SIZE, bytes_of, drain, numbers, stored_numbers, write
from hal_core.devices.blocks import KEPT
from hal_core.errors import DeviceClosed, InvalidValue, OutOfMemory
from hal_core.memory.plan import SCATTER_MAP, PlanBuilder, Records, WritePlan, apply_to_host
from hal_core.memory.views import ByteRange, View
from hypothesis import given, settings
from hypothesis import strategies as st
from latched import LatchedDevice, RunByRun, at

from tests import share


class Side:
    """A block of memory that one stream writes, and its expected bytes."""

    def __init__(self, device):
        self.device, self.stream, self.memory = device, device.stream(), device.allocate(SIZE)
        drain(device)
        self.should = bytes_of(self.memory).copy()
        self.copies = []
        scatter_map = np.array([(0, 300, 0, 24), (1500, 300, 24, 8)], SCATTER_MAP)
        self.scatter_map = scatter_map
        device.table(scatter_map, 5)

    def value(self, begin, count, step, fill):
        view = View.contiguous(self.memory, 0, (SIZE // 8,), INT64)[begin : begin + count * step : step]
        value = np.int64(fill) if fill % 2 else np.arange(view.size, dtype=np.int64) * fill
        self.device.submit_value(view, value, self.stream)
        self.should[: SIZE // 8 * 8].view(np.int64)[begin : begin + count * step : step] = value
        if isinstance(value, np.ndarray):
            value[...] = -1  # G2

    def plan(self, slots, fill):
        records = Records(np.array(slots, np.int32), np.full((len(slots), 32), fill, np.uint8), self.scatter_map)
        builder = PlanBuilder(self.memory)
        builder.fill(np.array([2990]), 8, np.uint32(fill))
        writes = builder.build().writes
        plan = WritePlan(self.memory, writes, [b""], records)
        apply_to_host(plan, self.should)
        self.device.submit(plan, self.stream)
        records.data[...] = 0xFF

    def copy(self, begin, nbytes, keep):
        copied = self.device.copy_out(self.memory, [ByteRange(begin, nbytes), ByteRange(0, 8)], self.stream)
        if keep:
            self.copies.append((copied, self.should[begin : begin + nbytes].copy(), self.should[:8].copy()))


@settings(max_examples=share.of(100), deadline=None)
@given(data=st.data(), kind=st.sampled_from([LatchedDevice, RunByRun]))
def test_g01_g02_g03_every_byte_is_of_its_own_time_in_any_order(data, kind):
    """Two streams with values, plans and copies out in a small ring, executed in every order that the streams allow."""
    device = kind(**RING)
    sides, acts = [Side(device), Side(device)], ["value", "value", "plan", "copy", "run", "wait", "drop"]
    held = []
    for _ in range(data.draw(st.integers(1, 40), label="acts")):
        act, side = data.draw(st.sampled_from(acts), label="act"), data.draw(st.sampled_from(sides), label="side")
        if act == "value":
            begin, count = data.draw(st.integers(0, 300)), data.draw(st.integers(1, 375))
            side.value(begin, count, data.draw(st.integers(1, 3)), data.draw(st.integers(0, 9)))
        elif act == "plan":
            side.plan(data.draw(st.lists(st.integers(0, 4), unique=True, min_size=1)), data.draw(st.integers(0, 200)))
        elif act == "copy":
            side.copy(data.draw(st.integers(0, 100)), data.draw(st.integers(0, 2900)), data.draw(st.booleans()))
        elif act == "run":
            line = data.draw(st.sampled_from(device.primitives.lines), label="line")
            device.primitives.run(line, data.draw(st.integers(1, 9), label="entries"))
        elif act == "wait" and side.copies:
            copied, *should = side.copies.pop(0)
            copied.wait()
            held.append((copied.data, should))
        elif act == "drop":
            scratch = View.contiguous(device.allocate(512), 0, (64,), INT64)
            device.submit_value(scratch, np.arange(64), side.stream)
            del scratch
    drain(device)
    for side in sides:
        assert (bytes_of(side.memory) == side.should).all()
        for copied, *should in side.copies:
            copied.wait()
            held.append((copied.data, should))
    changed = [
        at for at, (got, should) in enumerate(held) if any((a != b).any() for a, b in zip(got, should, strict=True))
    ]
    assert changed == [], "an array of a copy out is not of its time"
    assert device.primitives.wrong == []
    side = copied = None
    del sides[:], held[:]
    device.close()
    gc.collect()
    assert device.primitives.wrong == []
    assert not device.primitives.blocks
    assert not device.primitives.host


@pytest.mark.parametrize("how", ["straight", "a plan", "over the limit", "runs"])
def test_g03_after_the_deadline_it_raises_and_nothing_is_half_queued(how):
    device = (RunByRun if how == "runs" else LatchedDevice)(**RING)
    memory, stream = device.allocate(16384), device.default_stream
    write(device, memory, 1).wait()
    for _ in range(3):
        device.submit_value(numbers(memory)[:256], np.full(256, 2), stream)
    device.primitives.hangs = True
    should, before, target = bytes_of(memory).copy(), device.counters(), numbers(memory)
    steps = {"a plan": slice(0, 700, 2), "runs": slice(0, 700, 2), "straight": slice(0, 400)}
    view = target[steps.get(how, slice(None))]
    with pytest.raises(OutOfMemory, match=r"stayed full for 0.01 s"):
        device.submit_value(view, np.full(view.shape, 3), stream)
    assert device.counters().launches == before.launches
    device.primitives.hangs = False
    drain(device)
    should[:2048].view(np.int64)[...] = 2
    assert (bytes_of(memory) == should).all()
    device.submit_value(view, np.full(view.shape, 3), stream).wait()
    assert (at(memory.address, 8).view(np.int64) == 3).all()


@pytest.mark.parametrize("primitive", ["event_create", "copy_in", "launch", "event_record"])
def test_a_failing_primitive_leaves_target_and_ring_unchanged(device, primitive):
    memory = device.allocate(2000)
    write(device, memory, 1).wait()
    if primitive == "event_create":
        device.events.free.clear()
    target = numbers(memory)[::2]
    device.primitives.fail = (primitive, 0)
    with pytest.raises(RuntimeError, match="on purpose"):
        device.submit_value(target, np.full(target.shape, 2), device.default_stream)
    drain(device)
    if primitive != "event_record":  # too late after a launch
        assert (stored_numbers(memory) == 1).all()
    for value in range(3, 12):
        device.submit_value(target, np.full(target.shape, value), device.default_stream)
    drain(device)
    assert (stored_numbers(memory)[::2] == 11).all()


@pytest.mark.parametrize("kind", [LatchedDevice, RunByRun])
def test_a_device_that_can_record_no_event_after_failed_work_names_that_fault(monkeypatch, kind):
    device = kind(**RING)
    target = numbers(device.allocate(2000))[::2]

    def broken(event, stream):
        raise RuntimeError("no event is recorded")

    monkeypatch.setattr(device.events, "_record", broken)
    monkeypatch.setattr(device.primitives, "event_record", broken)
    with pytest.raises(RuntimeError, match="no event is recorded"):
        device.async_set_value(device, target, np.full(target.shape, 2), device.default_stream)
    monkeypatch.undo()
    with pytest.raises(DeviceClosed, match=r"earlier work failed on the device: .*no event is recorded"):
        device.async_set_value(device, target, np.full(target.shape, 3), device.default_stream)


@pytest.mark.parametrize("primitive", ["launch", "event_record"])
def test_closing_waits_for_a_failed_calls_work_on_the_stream(primitive):
    device = LatchedDevice(**RING)
    memory = device.allocate(2000)
    target = numbers(memory)[::2]
    device.primitives.fail = (primitive, 0)
    with pytest.raises(RuntimeError, match="on purpose"):
        device.submit_value(target, np.full(target.shape, 2), device.default_stream)
    assert any(line.work for line in device.primitives.lines)
    device.close()
    drain(device)
    assert device.primitives.wrong == [], "the ring was given back too early"


def test_blocks_of_unread_copies_are_released_after_the_copies(device):
    memory = device.allocate(64)
    dropped = [device.copy_out(memory, [ByteRange(0, 64)], device.default_stream) for _ in range(2 * KEPT)]
    dropped.clear()
    gc.collect()
    device.copy_out(memory, [ByteRange(0, 64)], device.default_stream).wait()
    for _ in range(3):
        device.copy_out(memory, [ByteRange(0, 64)], device.default_stream).wait()
    assert device.primitives.wrong == []
    assert len([block for block, _ in device.primitives.host.values() if block == 4096]) <= KEPT + 2


@pytest.mark.parametrize("primitive", ["copy_out", "stream_wait", "event_record"])
def test_a_copy_out_that_fails_keeps_its_block_until_it_is_over(device, primitive):
    memory = device.allocate(64)
    write(device, memory, 7).wait()
    device.primitives.fail = (primitive, 1 if primitive == "copy_out" else 0)
    with pytest.raises(RuntimeError, match="on purpose"):
        device.copy_out(memory, [ByteRange(0, 8), ByteRange(8, 8)], device.default_stream)
    copied = device.copy_out(memory, [ByteRange(0, 64)], device.default_stream)
    drain(device)
    copied.wait()
    assert (copied.data[0].view(np.int64) == 7).all()


def test_g22_a_write_waits_for_copies_of_the_same_bytes_by_any_view(device):
    memory, stream = device.allocate(64), device.default_stream
    write(device, memory, 1).wait()
    copied = device.copy_out(memory, [ByteRange(0, 64)], stream)
    again = type(memory)(device, memory.address, 64, memory)  # as a framework's tensor is resolved once more
    write(device, again, 2)
    device.primitives.run(stream.raw)  # the write's stream executes before the copy's stream, unless it waits for it
    copied.wait()
    assert (copied.data[0].view(np.int64) == 1).all()


def test_a_host_block_is_not_used_again_while_an_array_over_it_lives(device):
    memory = device.allocate(64)
    kept = []
    for value in range(20):
        write(device, memory, value)
        copied = device.copy_out(memory, [ByteRange(0, 64)], device.default_stream)
        copied.wait()
        kept.append(copied.data[0][8:16])
        device.copy_out(memory, [ByteRange(0, 64)], device.default_stream)  # and one without a reader
    del copied
    gc.collect()
    assert [int(part.view(np.int64)[0]) for part in kept] == list(range(20))
    count = len(device.primitives.host)
    kept.clear()
    for _ in range(20):
        device.copy_out(memory, [ByteRange(0, 64)], device.default_stream).wait()
    assert len(device.primitives.host) <= count


def test_dropped_memory_is_freed_once_its_work_is_done(device):
    stream, other = device.stream(), device.stream()
    memory, address = device.allocate(800), 0
    address = memory.address
    write(device, memory, 1, stream)
    write(device, memory, 1, other)
    del memory
    device.allocate(8)
    assert address in device.primitives.blocks
    device.primitives.run(stream.raw)
    device.allocate(8)
    assert address in device.primitives.blocks, "the other stream's work is not over"
    device.primitives.run(other.raw)
    device.allocate(8)
    assert address not in device.primitives.blocks


def test_without_room_memory_that_is_about_to_be_free_is_waited_for():
    device = LatchedDevice(room=20000, **RING)
    memory = device.allocate(9000)
    device.submit_value(numbers(memory)[:64], np.arange(64), device.default_stream)
    del memory
    again = device.allocate(9000)
    with pytest.raises(OutOfMemory, match="latched:0: no room"):
        device.allocate(9000)
    del again


def test_streams_and_events_of_other_devices(device):
    other = LatchedDevice(1, **RING)
    with pytest.raises(InvalidValue, match="stream is of another opened device"):
        write(device, device.allocate(64), 1, other.stream())
    mine, theirs, memory = device.stream(), other.stream(), other.allocate(64)
    write(other, memory, 1, theirs)
    mine.wait(theirs.record())
    device.primitives.run(mine.raw)
    assert (stored_numbers(memory) == 1).all(), "it came after the other device's work"
    with pytest.raises(InvalidValue, match=r"latched:0: the event is of another kind of device"):
        mine.wait(object())
    other.close()


def test_events_are_used_again_and_only_when_they_have_passed(device):
    device.events._rerecords = False
    memory = device.allocate(64)
    for _ in range(50):
        write(device, memory, 1)
        drain(device)
    made = device.events.made
    for _ in range(50):
        write(device, memory, 1)
        drain(device)
    assert device.events.made == made
    device.events.free.clear()
    first = device.default_stream.record()
    raw = first.raw
    del first  # it returns to the pool before it has passed
    assert device.default_stream.record().raw is not raw
    drain(device)
    assert device.default_stream.record().raw is raw
