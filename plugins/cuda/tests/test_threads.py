"""Every public call works from any thread, whether its current context is none or another GPU's."""

import threading

import numpy as np
import pytest
from hal_core import ByteRange, MemorySink, Request, StateConfig, Step, Task, TaskKind, View
from hal_core.memory.dtypes import dtype_of

SIZES = StateConfig(num_slots=8, max_model_len=64, block_size=4)
LONG = 256 << 10
OTHER = 99


def insert(bound, state, stream):
    request = state.admit(Request("r", [1] * 9))
    task = Task(TaskKind.PREFILL, 1, request, 0, 9, [0, 1, 2])
    bound.insert_tasks(state=state, tasks=[task], stream=stream).wait(10)


def advance(bound, state, stream):
    bound.update_inputs(state=state, step=Step(0, {"target": np.array([1], np.int32)}), stream=stream).wait(10)


def save(bound, state, stream):
    step = Step(1, {"target": np.array([1], np.int32)})
    state.take(bound.save_output(state=state, step=step, sink=MemorySink(), stream=stream))


def values(bound, state, stream):
    row, column = state.view("token_ids")[1], state.view("temperature")
    for target, value in ((column[1], 0.5), (column, 2.0), (row, list(range(row.size))), (row, row)):
        bound.async_set_value(target=target, value=value, stream=stream).wait(10)


def large(bound, state, stream):
    memory = bound.device.allocate(LONG)
    target = View.contiguous(memory, 0, (LONG,), dtype_of("uint8"))
    bound.async_set_value(target=target, value=np.ones(LONG, np.uint8), stream=stream).wait(10)
    bound.copy_out(memory=memory, parts=[ByteRange(0, LONG)], stream=stream).wait(10)


def make(bound, state, stream):
    made = bound.device.stream()
    made.wait(stream.record())
    made.synchronize(10)
    bound.state(StateConfig(num_slots=4, max_model_len=16))
    with bound.device.hold_stream(made):
        pass
    made.synchronize(10)


def graphs(bound, state, stream):
    bound.launch_graphs(graphs=(5,), stream=stream)


CALLS = {
    "graphs": graphs,
    "insert": insert,
    "values": values,
    "advance": advance,
    "save": save,
    "large": large,
    "make": make,
}


@pytest.mark.parametrize("current", [0, OTHER], ids=["no context", "another context"])
def test_every_call_works_from_a_thread_of_its_own(opened, current):
    bound = opened()
    state, stream = bound.state(SIZES), bound.default_stream
    library, met, left = bound.device.driver.api.library, [], []

    def run(call):
        if current:
            library.cuCtxSetCurrent(current)
        try:
            call(bound, state, stream)
        except Exception as error:  # noqa: BLE001 (compared below)
            met.append((call.__name__, error))
        left.append(bound.device.driver.api.cuCtxGetCurrent()[1])

    for call in CALLS.values():  # some of them create streams, events and pinned memory
        thread = threading.Thread(target=run, args=(call,))
        thread.start()
        thread.join(30)
    assert met == []
    assert left == [current] * len(CALLS), "a thread's own context was changed"
    thread = threading.Thread(target=bound.close)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
