"""The sim device beyond the conformance kit: counts, faults, lifetimes, options; in every mode, adversarial.

Every test ends with no finding of the checker, unless it caused the report itself.
"""

import ctypes
import os
import signal
from contextlib import closing, nullcontext, suppress

import numpy as np
import pytest
from hal_core import MemorySink, Request, StateConfig, Step, Task, TaskKind, admit
from hal_core.devices import blocks
from hal_core.errors import DeviceClosed, InvalidValue, TicketTimeout
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
        stream = self.own_stream(stream)
        stream.copy_stream = self._new_stream()
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


@pytest.mark.parametrize("value", [3, "array"])
def test_a_view_with_more_axes_than_the_strided_kernel_takes(bound, value):
    shape = (2,) * 11
    view = View.contiguous(bound.device.allocate(8 << 11), 0, shape, INT64)
    target = view[(slice(None, None, -1),) * 11]
    given = np.arange(1 << 11).reshape(shape) if value == "array" else value
    bound.async_set_value(target=target, value=given, stream=bound.default_stream).wait()
    should = np.broadcast_to(given, shape)[(slice(None, None, -1),) * 11]
    assert (content(view.memory).view(np.int64) == should.reshape(-1)).all()


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


def test_a_fault_is_reported_by_the_ticket_and_ends_the_device(worker):
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
