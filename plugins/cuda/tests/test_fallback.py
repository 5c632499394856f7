"""The device without the native part: the core's asynchronous base over the driver's primitives."""

from collections import deque

import numpy as np
import pytest
from hal_core import ByteRange, MemorySink, Request, StateConfig, Step, Task, TaskBatch, TaskKind, View
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import CapabilityMissing, InvalidValue, OutOfMemory
from hal_core.memory.dtypes import dtype_of
from hal_core.runtime.bound import bind
from hal_cuda.device import SLOWER
from hal_engine.cli.run_output import reasons

SIZES = StateConfig(num_slots=8, max_model_len=64, block_size=8)


def prefill(slots, requests):
    return TaskBatch.prefill(slots, requests, [r.total for r in requests], [range(-(-r.total // 8)) for r in requests])


def contents(bound, state):
    span = ByteRange(0, state.layout.nbytes)
    copied = bound.copy_out(memory=state.memory, parts=[span], stream=bound.default_stream)
    copied.wait(30)
    return {name: column.copy() for name, column in state.columns(copied.data[0], span).items()}


def test_g07_the_fallback_is_declared_with_its_reason(fallback, opened):
    able = fallback().capabilities
    assert able.fallbacks == dict.fromkeys(SLOWER, "it was opened without the native part")
    with pytest.raises(CapabilityMissing, match="it was opened without the native part"):
        able.check({"insert_tasks": "async"}, "cuda")
    assert fallback().note.startswith("path: fallback; ")
    native = opened().capabilities
    assert native.fallbacks == {}
    for name in (
        "async_h2d", "async_d2h", "fused_scatter", "async_update", "several_memories", "can_hold_stream", "timed_events"
    ):  # fmt: skip
        assert getattr(able, name) is getattr(native, name) is True


def test_g10_a_batch_and_an_update_are_one_kernel_each(fallback):
    bound, cpu = fallback(), bind(CpuPlugin.open(0, {}))
    states = [one.state(SIZES) for one in (bound, cpu)]
    calls = bound.device.driver.api.calls
    for one, state in zip((bound, cpu), states, strict=True):
        requests = [state.admit(Request(f"r{i}", [i + 1] * 9)) for i in range(3)]
        calls.clear()
        one.insert_tasks(state=state, tasks=prefill([0, 1, 2], requests), stream=one.default_stream)
        assert [call for call in calls if not call.startswith("stream")] == ["copy", "hal_write"] * (one is bound)
        tasks = [Task(TaskKind.MORE_BLOCKS, 0, requests[0], blocks=[7], first_block=2)]
        one.insert_tasks(state=state, tasks=tasks, stream=one.default_stream)
        step = Step(0, {"target": np.array([0, 1], np.int32)})
        calls.clear()
        one.update_inputs(state=state, step=step, stream=one.default_stream)
        assert list(calls) == ["hal_update_inputs"] * (one is bound)
    for name, expected in contents(cpu, states[1]).items():
        if name == "request_serial":  # differs from state to state
            continue
        np.testing.assert_array_equal(contents(bound, states[0])[name], expected, err_msg=name)


@pytest.mark.parametrize("source", [slice(0, 20), slice(10, 30)])
def test_g05_device_values_are_copied_by_a_kernel(fallback, source):
    """Overlapping views go through separate memory, which is kept until both kernels have run."""
    bound = fallback()
    data = np.arange(600).reshape(60, 10)
    view = View.contiguous(bound.device.allocate(data.nbytes), 0, data.shape, dtype_of("int64"))
    bound.async_set_value(target=view, value=data, stream=bound.default_stream).wait(30)
    calls = bound.device.driver.api.calls
    calls.clear()
    bound.async_set_value(target=view[20:40], value=view[source], stream=bound.default_stream).wait(30)
    assert list(calls) == ["hal_copy_strided"] * (1 if source.stop <= 20 else 2)
    copied = bound.copy_out(memory=view.memory, parts=[ByteRange(0, data.nbytes)], stream=bound.default_stream)
    copied.wait(30)
    data[20:40] = data[source].copy()
    np.testing.assert_array_equal(copied.data[0].view(np.int64).reshape(data.shape), data)


def test_g03_a_full_launch_queue_is_an_error_after_the_deadline(fallback):
    bound = fallback({"deadline": 0.05})
    state, stream, library = bound.state(SIZES), bound.device.stream(), bound.device.driver.api.library
    calls = {
        "scalar": lambda: bound.async_set_value(target=state.view("temperature")[1], value=0.5, stream=stream),
        "copies": lambda: bound.copy_out(
            memory=state.memory, parts=[ByteRange(at, 8) for at in range(9)], stream=stream
        ),
    }
    for call in calls.values():
        inside = library.stand_in_count(1)
        library.stand_in_work_limit(1021)
        library.stand_in_hold(stream.handle, 1)  # copies wait for it on a stream beside it
        try:
            with pytest.raises(OutOfMemory, match=r"stayed full for 0\.05 s"):
                deque((call() for _ in range(1100)), maxlen=0)
            assert library.stand_in_count(1) == inside, "a call waited inside the driver, where it has no deadline"
        finally:
            library.stand_in_hold(stream.handle, 0)
        call().wait(30)


def test_a_captured_stream_is_refused_by_each_hook(fallback):
    bound = fallback()
    state, stream, library = bound.state(SIZES), bound.device.stream(), bound.device.driver.api.library
    request, temperature = state.admit(Request("r", [1] * 9)), state.view("temperature")
    step = Step(0, {"target": np.array([0], np.int32)})
    calls = [
        lambda: bound.insert_tasks(state=state, tasks=prefill([0], [request]), stream=stream),
        lambda: bound.async_set_value(target=temperature, value=0.5, stream=stream),
        lambda: bound.async_set_value(target=temperature, value=np.zeros(8, np.float32), stream=stream),
        lambda: bound.async_set_value(target=temperature[0:4], value=temperature[4:8], stream=stream),
        lambda: bound.update_inputs(state=state, step=step, stream=stream),
        lambda: bound.copy_out(memory=state.memory, parts=[ByteRange(0, 8)], stream=stream),
        lambda: bound.save_output(state=state, step=step, sink=MemorySink(), stream=stream),
    ]
    library.stand_in_capture(stream.handle, 1)
    for call in calls:
        with pytest.raises(InvalidValue, match="is being captured"):
            call()
    assert library.stand_in_count(5) == 0, "something went into the graph"
    assert library.stand_in_count(4) == 0, "the capture was spoilt"
    library.stand_in_capture(stream.handle, 0)


def test_hal_run_has_one_note_of_the_fallback(fallback):
    """The closing line counts it, and ``-v`` prints it."""
    (note,) = reasons(fallback())
    assert note == (
        "insert_tasks and save_output and broadcast_tokens fall back: it was opened without the native part"
    )
