"""Hooks beside a graph capture, over a driver as strict as CUDA: which are refused, and which leave it valid."""

import gc
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from hal_core import Group, MemorySink, Request, StateConfig, Step, Task, TaskKind, View
from hal_core.devices import dtype_of
from hal_core.errors import InvalidValue
from hal_core.ranks.channel import BroadcastChannel
from hal_cuda import staged_requests
from hal_cuda.driver import CudaError

from .states import Alone, prefill

SIZES = StateConfig(num_slots=4, max_model_len=32, block_size=8)
MODE, SPOILT, NODES = 3, 4, 5
MODES = {"global": 1, "thread-local": 2, "relaxed": 3}


def enter(state, slots, length=9):
    return prefill(list(slots), [state.admit(Request(f"r{slot}", [slot + 1] * length)) for slot in slots])


@contextmanager
def capture(library, stream, mode=1):
    """Capture the stream into a graph; another thread begins the capture, as in a worker."""
    begun, over = threading.Event(), threading.Event()

    def begin():
        library.stand_in_capture(stream.handle, mode)
        begun.set()
        over.wait(60)

    thread = threading.Thread(target=begin)
    thread.start()
    assert begun.wait(30)
    try:
        yield
    finally:
        over.set()
        thread.join()
        library.stand_in_capture(stream.handle, 0)


HOOKS = (
    "insert_tasks",
    "async_set_value",
    "save_output",
    "broadcast_tokens",
    "update_inputs",
    "set_drafts",
    "copy_out",
)


def call(bound, state, name, stream):
    """Call a hook, or a function on which hooks are built."""
    step = Step(1, {"target": np.array([1], np.int32)})
    given = {
        "insert_tasks": lambda: {"state": state, "tasks": enter(state, [0])},
        "async_set_value": lambda: {"target": state.view("seed")[0], "value": 1},
        "save_output": lambda: {"state": state, "step": step, "sink": MemorySink()},
        "broadcast_tokens": lambda: {"state": state, "group": Group((0, 1), 0)},
        "update_inputs": lambda: {"state": state, "step": step},
        "set_drafts": lambda: {"state": state, "step": step, "drafts": {1: [5]}},
        "copy_out": lambda: {"memory": state.memory, "parts": [state.output_range(topk=False)]},
    }
    return getattr(bound, name)(**given[name](), stream=stream)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("reader", [False, True])
@pytest.mark.parametrize("leaving", [False, True])
@pytest.mark.parametrize("path", ["opened", "fallback"])
def test_a_stream_that_is_captured_is_refused_before_the_capture_is_spoilt(request, path, hook, reader, leaving):
    """``reader``: a step in flight, for which the policy lets the stream wait. ``leaving``: an output that needs
    cleaning up afterwards."""
    bound = request.getfixturevalue(path)()
    state, stream, other = (
        bound.state(StateConfig(4, 32, 8, max_draft_tokens=2)),
        bound.device.stream(),
        bound.device.stream(),
    )
    library, table = bound.device.driver.api.library, state.host_table
    bound.insert_tasks(state=state, tasks=enter(state, [1, 2]), stream=stream)
    if hook == "set_drafts":
        call(bound, state, "update_inputs", stream)
    if leaving:
        bound.insert_tasks(state=state, tasks=[Task(TaskKind.PREEMPTED, 2, table.requests[2])], stream=stream)
    channel = state.channels[0, 1] = BroadcastChannel(bound.device, state, Group((0, 1), 0), Alone())
    if reader:
        library.stand_in_hold(other.handle, 1)
        state.add_reader(None, other.record())
    booked = table.table.copy(), dict(table.preempted), state.updates, state.drafts.saved, bound.counters()
    with capture(library, stream):
        with pytest.raises(InvalidValue, match=f"{hook}.*is being captured into a graph"):
            call(bound, state, hook, stream)
        assert library.stand_in_count(SPOILT) == 0
        assert library.stand_in_count(NODES) == 0, "nothing of it is in the graph"
    now = table.table, table.preempted, state.updates, state.drafts.saved, bound.counters()
    np.testing.assert_array_equal(now[0], booked[0])
    assert now[1:4] == booked[1:4]
    assert now[4].submissions == booked[4].submissions
    assert (channel.number, channel.expected) == (0, b"")
    library.stand_in_hold(other.handle, 0)
    if hook != "broadcast_tokens":  # it needs a framework's collectives
        call(bound, state, hook, stream)
    stream.synchronize(30)


VALUES = {
    "a word": lambda state, large: (state.view("temperature")[0], 0.5),
    "an element": lambda state, large: (state.view("seed")[0], 7),
    "a column": lambda state, large: (state.view("seed"), 7),
    "a few bytes": lambda state, large: (state.view("token_ids")[0, :4], [1, 2, 3, 4]),
    "an upload": lambda state, large: (large, np.arange(4096)),
    "a plan": lambda state, large: (state.view("token_ids")[:, ::2], np.ones((4, 16), np.int64)),
    "a copy": lambda state, large: (state.view("seed")[0], state.view("seed")[1]),
}


@pytest.mark.parametrize("way", VALUES)
@pytest.mark.parametrize("path", ["opened", "fallback"])
def test_every_way_of_a_value_is_refused_on_a_captured_stream(request, path, way):
    """No staging memory is kept for work that was not submitted."""
    bound = request.getfixturevalue(path)()
    state, stream, library = bound.state(SIZES), bound.device.stream(), bound.device.driver.api.library
    large = View.contiguous(bound.device.allocate(1 << 15), 0, (4096,), dtype_of("int64"))
    (target, value), entries = VALUES[way](state, large), bound.device.staging._segment.entries
    before = len(entries)
    with capture(library, stream):
        for _ in range(3):
            with pytest.raises(InvalidValue, match=r"async_set_value.*is being captured into a graph"):
                bound.async_set_value(target=target, value=value, stream=stream)
        assert (library.stand_in_count(SPOILT), library.stand_in_count(NODES)) == (0, 0)
        assert len(entries) == before
    bound.async_set_value(target=target, value=value, stream=stream).wait(30)


@contextmanager
def strict(bound, mode):
    """Capture for the block; check that the capture is valid at the end, and this thread's mode unchanged. Yield the
    names of calls that were allowed only because the mode was relaxed."""
    library, names = bound.device.driver.api.library, []
    with capture(library, bound.device.stream(), MODES[mode]):
        yield names
        assert library.stand_in_count(SPOILT) == 0
        assert library.stand_in_count(MODE) == 0
        names += bound.device.driver.api.calls.relaxed


@pytest.mark.parametrize("mode", MODES)
def test_hooks_go_on_beside_a_capture_and_do_not_spoil_it(opened, mode):
    """Events are queried and waited for, on a held and on a finished stream."""
    bound = opened()
    state, stream = bound.state(SIZES), bound.device.stream()
    library, sink = bound.device.driver.api.library, MemorySink()
    step = Step(1, {"target": np.arange(4, dtype=np.int32)})
    with strict(bound, mode) as names:
        library.stand_in_hold(stream.handle, 1)
        ticket = bound.insert_tasks(state=state, tasks=enter(state, range(4)), stream=stream)
        assert not ticket.done()
        for _ in range(200):  # enough for the native part to query its own events
            bound.async_set_value(target=state.view("sampled_token_ids"), value=7, stream=stream)
        bound.update_inputs(state=state, step=step, stream=stream)
        library.stand_in_hold(stream.handle, 0)
        assert ticket.done()
        ticket.wait()
        saved = bound.save_output(state=state, step=step, sink=sink, stream=stream)
        saved.record()
        stream.synchronize()
        assert [list(row.tokens) for row in state.take(saved).rows()] == [[7]] * 4
    assert "cuEventQuery" in names if mode == "global" else not names


@pytest.mark.parametrize("mode", MODES)
def test_memory_grows_and_goes_beside_a_capture(opened, mode, monkeypatch):
    """The staging ring, the chunks of admission, blocks of copies out, states, streams; and all bytes are right."""
    monkeypatch.setattr(staged_requests, "CHUNK", 1 << 12)
    bound = opened({"ring_start": 1 << 12})
    stream, library = bound.device.stream(), bound.device.driver.api.library
    with strict(bound, mode) as names:
        state = bound.state(StateConfig(num_slots=16, max_model_len=600, block_size=8))
        held = bound.device.staging.held, bound.device.staged_requests.held
        library.stand_in_hold(stream.handle, 1)
        for slot in range(16):
            bound.insert_tasks(state=state, tasks=enter(state, [slot], 500), stream=stream)
            bound.async_set_value(target=state.view("token_ids")[slot, 500:], value=np.arange(100), stream=stream)
            bound.async_set_value(target=state.view("stop_seqs")[slot], value=np.arange(128), stream=stream)
            again = np.full(200, slot + 1)  # too long for a launch's parameters, so through the ring
            bound.async_set_value(target=state.view("token_ids")[slot, 300:500], value=again, stream=stream)
        library.stand_in_hold(stream.handle, 0)
        assert bound.device.staging.held > held[0]
        assert bound.device.staged_requests.held > held[1]
        place = state.layout.fields["token_ids"]
        copied = bound.copy_out(memory=state.memory, parts=[state.layout.groups["step_input"]], stream=stream)
        copied.wait(30)
        tokens = bound.copy_out(memory=state.memory, parts=[range_of(state, place)], stream=stream)
        tokens.wait(30)
        rows = tokens.data[0].view(np.int64).reshape(16, 600)
        assert (rows[:, :500] == np.arange(1, 17)[:, None]).all()
        assert (rows[:, 500:] == np.arange(100)).all()
        del state, copied, tokens, rows
        bound.device.stream()
        gc.collect()
        bound.device.allocate(64)  # unreferenced memory is released
        bound.device.stream()
        second = opened()
        second.device._runtime.wait_for_default_stream(10.0)
        second.close()
    expected = {"cuMemAlloc", "cuMemFree", "cuStreamSynchronize", "cuStreamQuery"}
    assert set(names) >= expected if mode == "global" else not names


def range_of(state, place):
    from hal_core import ByteRange

    return ByteRange(place.offset, place.stride * state.sizes.num_slots)


def test_the_first_device_opens_and_the_last_one_closes_beside_a_capture(opened):
    """They create and release the pool of the GPU's memory, page-locked memory, and the kernels' modules."""
    other = opened()  # for a stream to capture; of a GPU of its own
    library, stream = other.device.driver.api.library, other.device.stream()
    from hal_cuda import memory

    memory._gpus.clear()
    with capture(library, stream):
        bound = opened()
        bound.state(SIZES)
        gc.collect()
        bound.close()
        assert library.stand_in_count(SPOILT) == 0
        names = set(other.device.driver.api.calls.relaxed)
    assert names >= {"cuMemPoolCreate", "cuMemPoolDestroy", "cuMemAlloc", "cuMemFree"}
    assert names >= {"cuModuleLoadData", "cuModuleUnload"}


def test_an_event_that_was_captured_is_reported_by_name(opened):
    bound = opened()
    library, stream = bound.device.driver.api.library, bound.device.stream()
    with capture(library, stream):
        event = stream.record()
        with pytest.raises((CudaError, InvalidValue), match="CAPTURED_EVENT"):
            event.done()


def test_paddle_allocates_beside_a_capture(opened, monkeypatch):
    """Paddle allocates a state's memory if it is loaded; a capture forbids its calls too."""
    bound = opened()
    library, modes = bound.device.driver.api.library, []
    keep = np.zeros(64, np.int64)

    def to_tensor(zeros, place):
        modes.append(library.stand_in_count(MODE))
        return SimpleNamespace(data_ptr=lambda: keep.ctypes.data)

    stream = SimpleNamespace(cuda_stream=1)
    cuda = SimpleNamespace(current_stream=lambda index: stream)
    paddle = SimpleNamespace(
        is_compiled_with_cuda=lambda: True,
        device=SimpleNamespace(cuda=cuda),
        to_tensor=to_tensor,
        CUDAPlace=lambda index: index,
    )
    monkeypatch.setitem(sys.modules, "paddle", paddle)
    bound.device.allocate(64)
    assert (modes, library.stand_in_count(MODE)) == ([2], 0)
