"""The device without the native part: the core's asynchronous base over the driver's primitives."""

import numpy as np
import pytest
from hal_core import Request, StateConfig, Step, Task, TaskKind
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import CapabilityMissing
from hal_core.runtime.bound import bind
from hal_cuda.device import SLOWER
from hal_engine.cli.run_output import reasons

from .states import contents, prefill

SIZES = StateConfig(num_slots=8, max_model_len=64, block_size=8)


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


def test_hal_run_has_one_note_of_the_fallback(fallback):
    """The closing line counts it, and ``-v`` prints it."""
    (note,) = reasons(fallback())
    assert note == (
        "insert_tasks and save_output and broadcast_tokens fall back: it was opened without the native part"
    )
