"""The sim device beyond the conformance kit: counts, faults, lifetimes, options; in every mode, adversarial.

Every test ends with no finding of the checker, unless it caused the report itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from contextlib import closing, nullcontext, suppress

import numpy as np
import pytest
from hal_core import MemorySink, Request, StateConfig, Step, Task, TaskKind, admit
from hal_core.devices import blocks
from hal_core.errors import DeviceClosed, InvalidValue, OutOfMemory, TicketTimeout
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.plan import PlanBuilder, apply_to_host
from hal_core.memory.views import ByteRange, View
from hal_core.runtime.bound import bind
from hal_sim import DeviceFault, Mode, SimPlugin, SimTensor, SubmissionRefused, options
from hal_sim.device import SimDevice

INT64 = dtype_of("int64")


@pytest.fixture(params=[mode.name.lower() for mode in Mode])
def bound(request):
    """An opened device in each mode; pageable memory would be read when the copy runs."""
    with options(mode=Mode.WORKER, staged=0), bind(SimPlugin.open(0, {"mode": request.param})) as device:
        yield device
        accelerator = device.device.accelerator
        accelerator.synchronize()
        device.device.retired.reap()
        races = accelerator.races()
        accelerator.reset()
        assert [str(race) for race in races] == []


@pytest.fixture
def worker():
    """An opened device whose test makes the checker report something, or the device fail."""
    with options(mode=Mode.WORKER), closing(SimPlugin.open(0, {})) as device:
        yield device
        device.accelerator._native.device_wait(0, -1)
        device.accelerator.reset()


def tasks(state, slots, tokens=4):
    return [
        Task(TaskKind.PREFILL, slot, admit(Request(f"r{slot}", list(range(tokens))), state.layout), 0, tokens, [slot])
        for slot in slots
    ]


class MakesStreamsLate(SimDevice):
    """Makes the stream beside another one when it is used first, in a hook."""

    def copy_out(self, memory, parts, stream):
        stream = self.own(stream)
        stream.beside = self._made()
        return super().copy_out(memory, parts, stream)


@pytest.mark.parametrize("kind", [SimDevice, MakesStreamsLate])
def test_no_hook_makes_a_stream(kind):
    """While a stream is held, no stream can be made here, as with some drivers."""
    with options(mode=Mode.WORKER, creation_waits=1), closing(kind(0, {})) as device:
        bound, stream, held = bind(device), device.default_stream, device.stream()
        state = bound.state(StateConfig(num_slots=4, max_model_len=16, block_size=4))
        with device.hold_stream(held), options(wait_limit_ms=50):
            late = kind is MakesStreamsLate
            with pytest.raises(TicketTimeout, match="no stream is made") if late else nullcontext():
                bound.insert_tasks(state=state, tasks=tasks(state, [1]), stream=stream)
                bound.async_set_value(target=state.view("temperature")[1], value=0.5, stream=stream)
                bound.copy_out(memory=state.memory, parts=[ByteRange(0, 8)], stream=stream).wait(10)
                bound.update_inputs(state=state, step=Step(0, {state.name: np.array([1])}), stream=stream)
                bound.save_output(
                    state=state, step=Step(0, {state.name: np.array([1])}), sink=MemorySink(), stream=stream
                ).wait(10)


def content(memory):
    return np.frombuffer(memory.device.accelerator.peek(memory.address, memory.nbytes), np.uint8)


def int64s(device, count):
    return View.contiguous(device.allocate(8 * count), 0, (count,), INT64)


def test_an_insertion_of_1_or_128_is_one_upload_and_one_launch(bound):
    state = bound.state(StateConfig(num_slots=256, max_model_len=64))
    for slots in (range(1), range(1, 129)):
        before, below = bound.counters(), bound.device.probe_counts()
        bound.insert_tasks(state=state, tasks=tasks(state, slots), stream=bound.default_stream).wait()
        spent, seen = bound.counters() - before, bound.device.probe_counts() - below
        assert (spent.uploads, spent.launches, spent.submissions, spent.host_waits) == (1, 1, 2, 0)
        assert (seen.uploads, seen.launches, seen.submissions) == (1, 1, 2)


def test_the_host_cannot_touch_the_state(bound):
    address = bound.state(StateConfig(num_slots=2, max_model_len=8)).memory.address
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(address, 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_a_plan_over_the_ring_is_uploaded_in_pieces_and_launched_once(bound):
    device = bound.device
    device.staging.limit = 1 << 20
    memory = device.allocate(3 << 20)
    data = np.random.default_rng(1).integers(0, 256, 5 << 19, np.uint8)
    builder = PlanBuilder(memory)
    builder.copy(np.arange(10) * (5 << 14) * 3 % (memory.nbytes - (1 << 18)), 1 << 18, data)
    plan, before = builder.build(), bound.counters()
    device.submit(plan, bound.default_stream).wait()
    spent, should = bound.counters() - before, np.full(memory.nbytes, 0xCB, np.uint8)
    apply_to_host(plan, should)
    assert spent.launches == 1
    assert spent.uploads == -(-plan.payload.nbytes // (256 << 10)) + 1
    assert (content(memory) == should).all()


def test_a_value_above_its_limit_is_refused_whole_on_a_held_stream(bound):
    device, stream = bound.device, bound.default_stream
    target = int64s(device, 1 << 18)
    bound.async_set_value(target=target, value=7, stream=stream).wait()
    patience, device.staging.limit, device.staging.deadline = device.staging.deadline, 1 << 20, 0.05
    device.value_limit = 0
    with device.hold_stream(stream), pytest.raises(OutOfMemory, match=r"sim:0: async_set_value: ring: .*was busy"):
        bound.async_set_value(target=target, value=np.arange(target.size), stream=stream)
    device.staging.deadline = patience
    stream.synchronize()
    assert (content(target.memory).view(np.int64) == 7).all()
    bound.async_set_value(target=target, value=np.arange(target.size), stream=stream).wait()
    assert (content(target.memory).view(np.int64) == np.arange(target.size)).all()
    assert bound.counters().host_waits > 0


@pytest.mark.parametrize("nth", [1, 2])
def test_a_refused_submission_leaves_nothing_half_done(bound, nth):
    state, stream = bound.state(StateConfig(num_slots=4, max_model_len=8)), bound.default_stream
    stream.synchronize()
    before, batch = content(state.memory), tasks(state, range(3))
    with options(fail_submission=nth), pytest.raises(SubmissionRefused, match=r"sim:0: insert_tasks: .*submit again"):
        bound.insert_tasks(state=state, tasks=batch, stream=stream)
    stream.synchronize()
    assert (content(state.memory) == before).all()
    bound.insert_tasks(state=state, tasks=batch, stream=stream).wait()


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_out_of_memory_anywhere_is_an_error_and_the_device_continues(bound, nth):
    """The state's block, then the table of its records, then the block of a copy out."""

    def work():
        state = bound.state(StateConfig(num_slots=2, max_model_len=8))
        bound.insert_tasks(state=state, tasks=tasks(state, [1]), stream=bound.default_stream)
        copied = bound.device.copy_out(state.memory, [ByteRange(0, state.layout.nbytes)], bound.default_stream)
        return copied.wait()

    with options(fail_allocation=nth), pytest.raises(OutOfMemory, match="sim:0"):
        work()
    work()


def test_memory_goes_back_only_when_the_work_on_it_is_over(bound):
    device, stream = bound.device, bound.default_stream
    used = device.accelerator.memory_used
    with device.hold_stream(stream):
        view = int64s(device, 1 << 16)
        bound.async_set_value(target=view, value=1, stream=stream)
        copied = device.copy_out(view.memory, [ByteRange(0, 64)], stream)
        del view
        assert device.accelerator.memory_used >= used + (1 << 19), "it is written yet"
    copied.wait()
    data = copied.data[0]
    del copied
    stream.synchronize()
    device.retired.reap()
    assert device.accelerator.memory_used < used + (1 << 19)
    assert (data.view(np.int64) == 1).all(), "the array keeps its block"


def test_arrays_of_a_copy_stay_as_they_are_while_later_copies_go_on(bound):
    view, stream = int64s(bound.device, 8), bound.default_stream
    kept = []
    for number in range(20):
        bound.async_set_value(target=view, value=number, stream=stream)
        copied = bound.device.copy_out(view.memory, [ByteRange(0, 64)], stream)
        copied.wait()
        kept.append(copied.data[0].view(np.int64))
    assert [int(row[0]) for row in kept] == list(range(20))


@pytest.mark.parametrize("shift", [-3, 2, 0])
def test_an_overlapping_device_value_is_read_before_it_is_written(bound, shift):
    whole, stream = int64s(bound.device, 24), bound.default_stream
    bound.async_set_value(target=whole, value=np.arange(24), stream=stream)
    should = np.arange(24)
    should[8 + shift : 16 + shift] = should[8:16].copy()
    bound.async_set_value(target=whole[8 + shift : 16 + shift], value=whole[8:16], stream=stream).wait()
    assert content(whole.memory).view(np.int64).tolist() == should.tolist()


@pytest.mark.parametrize("value", [3, "array"])
def test_a_view_with_more_axes_than_the_strided_kernel_takes(bound, value):
    shape = (2,) * 11
    whole = View.contiguous(bound.device.allocate(8 << 11), 0, shape, INT64)
    target = whole[(slice(None, None, -1),) * 11]
    given = np.arange(1 << 11).reshape(shape) if value == "array" else value
    bound.async_set_value(target=target, value=given, stream=bound.default_stream).wait()
    should = np.broadcast_to(given, shape)[(slice(None, None, -1),) * 11]
    assert (content(whole.memory).view(np.int64) == should.reshape(-1)).all()


def test_tickets_are_waited_for_from_any_thread_and_time_out(bound):
    view, stream = int64s(bound.device, 1), bound.default_stream
    with bound.device.hold_stream(stream):
        ticket = bound.async_set_value(target=view, value=1, stream=stream)
        with pytest.raises(TicketTimeout, match="ticket stays pending"):
            ticket.wait(0.01)
        with pytest.raises(TicketTimeout, match="sim:0: the stream is busy"):
            stream.synchronize(0.01)
        waiting = threading.Thread(target=ticket.wait, args=(30,))
        waiting.start()
    waiting.join(30)
    assert ticket.done()


def test_a_closed_device_waits_for_its_work_and_closes_once(bound):
    other = SimPlugin.open(0, {})
    view = int64s(other, 4)
    ticket = bind(other).async_set_value(target=view, value=5, stream=other.default_stream)
    other.close()
    other.close()
    assert ticket.done()
    assert (content(view.memory).view(np.int64) == 5).all()
    with pytest.raises(DeviceClosed, match="sim:0: the device is closed"):
        other.allocate(8)


def test_devices_do_not_take_each_other_s_memory_or_streams(bound):
    with bind(SimPlugin.open(1, {})) as other:
        tensor, stream = SimTensor.of(other.device, np.arange(4)), bound.default_stream
        with pytest.raises(InvalidValue, match="memory of another opened device"):
            bound.async_set_value(target=tensor, value=1, stream=stream)
        with pytest.raises(InvalidValue, match="the value is on another opened device"):
            bound.async_set_value(target=int64s(bound.device, 4), value=tensor, stream=stream)
        with pytest.raises(InvalidValue, match="stream: the stream is of another opened device"):
            bound.async_set_value(target=int64s(bound.device, 4), value=1, stream=other.default_stream)
        other.async_set_value(target=tensor[1:3], value=9, stream=other.default_stream).wait()
        assert tensor.numpy().tolist() == [0, 9, 9, 3]


@pytest.mark.parametrize("target", [np.zeros(3), [1], "text", None])
def test_what_is_no_tensor_of_the_device_is_refused(bound, target):
    with pytest.raises(InvalidValue, match=r"sim:0: async_set_value: target: \w+ is not a tensor of this device"):
        bound.async_set_value(target=target, value=1, stream=bound.default_stream)


@pytest.mark.parametrize(
    "guard", ["order of writes after copies out", "fence of the ring", "memory kept until it is over"]
)
def test_the_checker_sees_each_guard_that_is_taken_away(worker, monkeypatch, guard):
    """With the guard there is no finding."""
    stream, device = worker.default_stream, bind(worker)

    def work():
        with worker.hold_stream(stream):
            view = int64s(worker, 64)
            for number in range(40):
                device.async_set_value(target=view, value=np.full(64, number), stream=stream)
                worker.copy_out(view.memory, [ByteRange(0, 8)], stream)
        worker.accelerator.synchronize()

    work()
    assert worker.races() == []
    if guard == "order of writes after copies out":
        monkeypatch.setattr(worker.reads, "order", lambda memory, stream: None)
    elif guard == "fence of the ring":
        monkeypatch.setattr(worker.staging, "fence", lambda span, event: setattr(worker.staging, "_taken", None))
    else:
        monkeypatch.setattr(blocks, "KEPT", 1)
        monkeypatch.setattr(blocks.HostBlocks, "give_after", lambda kept, event, block: kept.give(block))
    with suppress(DeviceFault, DeviceClosed):
        work()
    assert worker.races() != []


def test_a_fault_is_told_by_the_ticket_and_ends_the_device(worker):
    """The target's memory is gone when the write runs."""
    device, stream = bind(worker), worker.default_stream
    view = int64s(worker, 4)
    with worker.hold_stream(stream):
        ticket = device.async_set_value(target=view, value=1, stream=stream)
        worker.accelerator.free(view.memory.address)
    with pytest.raises(DeviceFault, match=r"sim:0: .*was freed before the operation ran"):
        ticket.wait()
    with pytest.raises(DeviceClosed, match=r"earlier work failed on the device.*open the device again"):
        device.async_set_value(target=view, value=1, stream=stream)
    view.memory._free = lambda: None
    assert {report.kind for report in worker.races()} == {"lifetime"}


def test_a_fault_that_nobody_waited_for_is_raised_by_the_next_call(worker):
    device, stream = bind(worker), worker.default_stream
    view, good = int64s(worker, 4), int64s(worker, 4)
    with worker.hold_stream(stream):
        ticket = device.async_set_value(target=view, value=1, stream=stream)
        worker.accelerator.free(view.memory.address)
    while not ticket.done():
        pass
    view.memory._free = lambda: None
    with pytest.raises(DeviceFault, match="was freed"):
        device.async_set_value(target=good, value=1, stream=stream)


def test_copies_of_one_stream_do_not_wait_for_those_of_another(bound):
    device = bound.device
    one, other = device.stream(), device.stream()
    blocks = [device.allocate(4096) for _ in range(2)]
    with device.hold_stream(one):
        held = device.copy_out(blocks[0], [ByteRange(0, 4096)], one)
        free = device.copy_out(blocks[1], [ByteRange(0, 4096)], other)
        free.wait(60)
        assert not held.done()
    held.wait(60)


def test_closing_waits_for_the_copies_of_every_stream():
    with options(mode=Mode.WORKER, staged=0):
        device = SimPlugin.open(0, {})
        stream, block = device.stream(), device.allocate(1 << 20)
        copies = [device.copy_out(block, [ByteRange(0, 1 << 20)], stream) for _ in range(4)]
        device.close()
        assert all(copy.done() for copy in copies)
        device.accelerator.synchronize()
        device.accelerator.reset()


def test_timed_events_are_used_again_and_need_both_to_have_passed(bound):
    stream, memory = bound.device.stream(), SimTensor.of(bound.device, np.zeros(8, np.uint8))
    first = bound.timed_event(stream=stream)
    assert first.wait(5)
    with bound.device.hold_stream(stream):
        bound.async_set_value(target=memory, value=1, stream=stream)
        second = bound.timed_event(stream=stream)
        with pytest.raises(InvalidValue, match="has not passed"):
            second.seconds_since(first)
    assert second.wait(5)
    assert second.seconds_since(first) >= 0 >= first.seconds_since(second)
    with bind(SimPlugin.open(0, {})) as other, pytest.raises(InvalidValue, match="no timed event of this device"):
        second.seconds_since(other.timed_event(stream=other.default_stream))
    for wrong in (stream.record(), None):
        with pytest.raises(InvalidValue, match="no timed event of this device"):
            second.seconds_since(wrong)
    raw = {second.raw.handle, first.raw.handle}
    del first, second
    again = [bound.timed_event(stream=stream) for _ in range(2)]
    assert {one.raw.handle for one in again} == raw, "an event is made for each use"


def test_a_closed_device_gives_no_timed_event():
    device = bind(SimPlugin.open(0, {}))
    stream = device.default_stream
    device.close()
    with pytest.raises(DeviceClosed):
        device.timed_event(stream=stream)
