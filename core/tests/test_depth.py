"""Depth of a call: every frame between the caller and the device is one that a reader has to follow."""

import sys

from hal_core import Request, StateConfig, Step, TaskBatch
from hal_core.devices.cpu import CpuPlugin
from hal_core.output.sinks import MemorySink
from hal_core.runtime.bound import bind

MOST = 12


def deepest(call):
    """Return the Python frames of ``call`` at its deepest, innermost last, without the caller's own."""
    stack, found = [], []

    def trace(frame, event, _):
        if event == "call":
            stack.append(f"{frame.f_code.co_filename.rpartition('hal_core/')[2]}:{frame.f_code.co_qualname}")
            if len(stack) > len(found):
                found[:] = stack
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_save_output_into_memory_is_twelve_frames_deep_at_most():
    with bind(CpuPlugin.open(0, {})) as bound:
        state, sink = bound.state(StateConfig(num_slots=4, max_model_len=16, block_size=4)), MemorySink()
        tasks = TaskBatch.prefill([0, 1], [state.admit(Request(f"r{i}", [1, 2])) for i in range(2)], [2, 2], [[0], [1]])
        bound.insert_tasks(state=state, tasks=tasks, stream=bound.default_stream).wait()

        def save(number):
            step = Step(number, {state.name: [0, 1]})
            bound.async_set_value(target=state.view("sampled_token_ids"), value=7, stream=bound.default_stream)
            bound.update_inputs(state=state, step=step, stream=bound.default_stream)
            return lambda: bound.save_output(state=state, step=step, sink=sink, stream=bound.default_stream)

        save(0)()  # imports and layouts of the first call
        frames = deepest(save(1))
        assert frames[0].endswith("save.<locals>.<lambda>")
        assert len(frames) - 1 <= MOST, "\n".join(frames)
        assert [record.step for record in sink.records] == [0, 1]
