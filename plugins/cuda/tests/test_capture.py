"""Beside a graph capture, over a driver as strict as CUDA in its default mode: what is refused, and what goes on."""

from __future__ import annotations

import numpy as np
import pytest
from hal_core import MemorySink, Request, StateConfig, Step, TaskBatch
from hal_core.errors import InvalidValue

SIZES = StateConfig(num_slots=4, max_model_len=32)
SPOILT = 4


@pytest.fixture
def capturing(opened):
    """``(bound, state, batch, stream, library)``: the stream's work goes into a graph."""
    bound = opened()
    state, stream, library = bound.state(SIZES), bound.device.stream(), bound.device.driver.api.library
    request = state.admit(Request("r", [1] * 9))
    batch = TaskBatch.prefill([0], [request], [9], [np.array([1], np.int32)])
    library.stand_in_capture(stream.handle, 1)
    yield bound, state, batch, stream, library
    library.stand_in_capture(stream.handle, 0)


native = pytest.mark.parametrize("opened", ["native"], indirect=True)


@native
@pytest.mark.parametrize("hook", ["insert_tasks", "async_set_value", "save_output"])
@pytest.mark.parametrize("reader", [False, True])
def test_a_stream_that_is_captured_is_refused_before_the_capture_is_spoilt(capturing, hook, reader):
    bound, state, batch, stream, library = capturing
    if reader:  # a step under way: the policy would let the stream wait for it
        other = bound.device.stream()
        library.stand_in_hold(other.handle, 1)
        state.add_reader(None, other.record())
    step = Step(1, {"target": np.array([0], np.int32)})
    given = {
        "insert_tasks": {"state": state, "tasks": batch},
        "async_set_value": {"target": state.view("seed")[0], "value": 1},
        "save_output": {"state": state, "step": step, "sink": MemorySink()},
    }
    with pytest.raises(InvalidValue, match=f"{hook}.*is being captured into a graph"):
        getattr(bound, hook)(**given[hook], stream=stream)
    assert library.stand_in_count(SPOILT) == 0
    assert not state.host_table.live
    if reader:
        library.stand_in_hold(other.handle, 0)
    library.stand_in_capture(stream.handle, 0)
    bound.insert_tasks(state=state, tasks=batch, stream=stream).wait()


@native
def test_hooks_on_another_stream_go_on_beside_a_capture_and_do_not_spoil_it(capturing):
    bound, state, batch, _, library = capturing
    stream, before = bound.device.stream(), library.stand_in_count(3)
    library.stand_in_hold(stream.handle, 1)
    ticket = bound.insert_tasks(state=state, tasks=batch, stream=stream)
    assert not ticket.done(), "an event was looked at, which such a capture forbids"
    library.stand_in_hold(stream.handle, 0)
    assert ticket.done()
    assert library.stand_in_count(SPOILT) == 0
    assert library.stand_in_count(3) == before, "the thread's mode is as it was"
