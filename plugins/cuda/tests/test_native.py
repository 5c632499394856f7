"""The native part: when it releases the GIL, which arguments it refuses, and that it keeps no references."""

import gc
import sys
import threading

import numpy as np
import pytest
from hal_core import ByteRange, Request, StateConfig, Task, TaskKind
from hal_core.errors import InvalidBatch, InvalidValue, OutOfMemory
from hal_cuda import building, staged_requests
from hal_cuda.native import CALLS, NativeHostTable

from .states import prefill

SIZES = StateConfig(num_slots=8, max_model_len=64, block_size=8)


def rounds(bound, state, stream, count):
    for at in range(count):
        request = state.admit(Request(f"r{at}", [at + 1] * 9))
        bound.insert_tasks(state=state, tasks=prefill([at % 8], [request]), stream=stream)
        state.release([at % 8])


def test_a_full_launch_queue_holds_up_its_caller_alone(opened):
    """The stream is held until another Python thread has run: if the GIL were kept, neither could continue."""
    bound = opened()
    state, stream, library = bound.state(SIZES), bound.device.stream(), bound.device.driver.api.library
    library.stand_in_hold(stream.handle, 1)
    waits, inside = bound.counters().host_waits, library.stand_in_count(1)

    def release():
        while bound.counters().host_waits == waits and thread.is_alive():
            pass  # each turn needs the GIL, as does the call that releases the stream
        library.stand_in_hold(stream.handle, 0)

    thread = threading.Thread(target=release, daemon=True)
    thread.start()
    rounds(bound, state, stream, 1000)
    thread.join(30)
    assert bound.counters().host_waits > waits, "the queue was never full"
    assert library.stand_in_count(1) == inside, "a call waited inside the driver, where it has no deadline"
    stream.synchronize(30)


def until_refused(call, most):
    """Return how many calls succeeded, and the error of the next one."""
    for done in range(most):
        try:
            call()
        except OutOfMemory as error:
            return done, error
    return most, None


@pytest.mark.parametrize("way", ["scalar", "insert", "row", "output", "copies"])
@pytest.mark.parametrize("path", ["opened", "fallback"])
def test_g03_a_full_launch_queue_is_an_error_after_the_deadline(request, path, way):
    """As in CUDA: after 1,021 copies and launches on a stream a call waits. Events and waits take no room."""
    bound = request.getfixturevalue(path)({"deadline": 0.05})
    state, stream, library = bound.state(SIZES), bound.device.stream(), bound.device.driver.api.library
    rounds(bound, state, stream, 1)
    library.stand_in_work_limit(1021)
    library.stand_in_hold(stream.handle, 1)
    target, inside = state.view("temperature"), library.stand_in_count(1)
    calls = {
        "scalar": lambda: bound.async_set_value(target=target[1], value=0.5, stream=stream),
        "insert": lambda: rounds(bound, state, stream, 1),
        "row": lambda: bound.async_set_value(target=state.view("token_ids")[1], value=list(range(64)), stream=stream),
        "output": lambda: bound.copy_out(memory=state.memory, parts=[ByteRange(0, 8)], stream=stream),
        "copies": lambda: bound.copy_out(
            memory=state.memory, parts=[ByteRange(at, 8) for at in range(9)], stream=stream
        ),
    }
    try:
        done, refused = until_refused(calls[way], 1100)
        assert "stayed full for 0.05 s" in str(refused)
        assert done > (50 if way == "copies" else 250), "a worker that is ahead by a few steps is not held up"
        assert library.stand_in_count(1) == inside, "a call waited inside the driver, where it has no deadline"
    finally:
        library.stand_in_hold(stream.handle, 0)
    calls[way]().wait(30) if way != "insert" else rounds(bound, state, stream, 1)
    stream.synchronize(30)


def test_the_lock_is_kept_while_nothing_can_block(opened):
    bound = opened()
    state, streams = bound.state(SIZES), [bound.device.stream() for _ in range(40)]
    for stream in streams:
        rounds(bound, state, stream, 20)
    calls, held = bound.device.driver.native.calls, streams[0]
    assert calls.given_up() == 0
    bound.device.driver.api.library.stand_in_hold(held.handle, 1)
    rounds(bound, state, streams[1], 400)
    assert calls.given_up() == 0, "a stream that is held holds up no other"
    bound.device.driver.api.library.stand_in_hold(held.handle, 0)


def test_g03_beside_a_hundred_busy_streams_a_full_queue_has_its_deadline(opened):
    bound = opened({"deadline": 0.05})
    target, library = bound.state(SIZES).view("temperature")[1], bound.device.driver.api.library
    streams = [bound.device.stream() for _ in range(100)]
    library.stand_in_work_limit(1021)
    for stream in streams:
        library.stand_in_hold(stream.handle, 1)

    def write(stream):
        bound.async_set_value(target=target, value=0.5, stream=stream)

    try:
        for stream in streams:
            write(stream)
        for stream in (streams[-1], streams[0]):
            inside = library.stand_in_count(1)
            done, refused = until_refused(lambda stream=stream: write(stream), 1100)
            assert "stayed full for 0.05 s" in str(refused)
            assert done > 250
            assert library.stand_in_count(1) == inside, "a call waited inside the driver, where it has no deadline"
    finally:
        for stream in streams:
            library.stand_in_hold(stream.handle, 0)


def test_of_many_held_streams_none_is_taken_for_idle(opened):
    """With more streams than the queues that it can count, the GIL is released, as an uncounted queue may be full."""
    bound = opened()
    library, calls = bound.device.driver.api.library, bound.device.driver.native.calls
    streams, target = [bound.device.stream() for _ in range(400)], bound.state(SIZES).view("temperature")[1]
    for stream in streams:
        library.stand_in_hold(stream.handle, 1)
    for _ in range(10):
        for stream in streams:
            bound.async_set_value(target=target, value=0.5, stream=stream)
    most = 10 * 2 * 400
    assert 0 < calls.given_up() < most
    for stream in streams:
        library.stand_in_hold(stream.handle, 0)
        stream.synchronize(30)


def test_sources_that_do_not_compile_skip_no_test(opened, monkeypatch, tmp_path):
    opened()  # it skips this test where there is no compiler
    stand_in = sys.modules["hal_cuda_stand_in"]
    (tmp_path / "broken.c").write_text("int x = ;")
    monkeypatch.setattr(building, "FOLDER", tmp_path)
    monkeypatch.delenv("PYTEST_XDIST_TESTRUNUID", raising=False)  # whose build came from sources that compile
    with pytest.raises(building.NotBuilt, match=r"the compiler failed .*broken\.c"):
        stand_in.built.__wrapped__()
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert stand_in.built.__wrapped__().startswith("no C compiler")


def twins(bound):
    """Return a state whose checks exist natively and in Python."""
    state = bound.state(SIZES)
    assert isinstance(state.host_table.twin, NativeHostTable)
    return state


def test_g08_an_empty_batch_changes_nothing_on_the_native_path(opened):
    """An empty array's buffer may have any address, even an odd one."""
    bound = opened()
    bound.insert_tasks(state=twins(bound), tasks=[], stream=bound.default_stream)
    bound.insert_tasks(state=twins(bound), tasks=prefill([], []), stream=bound.default_stream)


def test_g08_a_batch_of_other_sizes_is_refused_on_the_native_path(opened):
    bound = opened()
    state, other = twins(bound), bound.state(StateConfig(num_slots=8, max_model_len=72, block_size=8), name="other")
    foreign = other.admit(Request("foreign", [1] * 9))
    with pytest.raises(InvalidValue, match="admitted for a state of other sizes"):
        bound.insert_tasks(state=state, tasks=prefill([0], [foreign]), stream=bound.default_stream)
    task = Task(TaskKind.PREFILL, 9, state.admit(Request("r", [1] * 9)), 0, 9, [0, 1])
    with pytest.raises(InvalidBatch, match="slots go from 0 to 7"):
        bound.insert_tasks(state=state, tasks=[task], stream=bound.default_stream)
    assert not state.host_table.live


def test_what_does_not_fit_is_refused_by_native_calls(opened):
    """Every call with too few, too many and wrong arguments raises, and the process continues."""
    bound = opened()
    state = twins(bound)
    calls, raw = bound.device.driver.native.calls, state.host_table.twin.raw
    batch = prefill([0], [state.admit(Request("r", [1] * 9))])
    columns = batch.ints, batch.rows
    for name in ("run", "put", "copy_out", "fill", "record", "wait", "query", "capturing", "exchange", "enter"):
        call = getattr(calls, name)
        for given_ in ((), ("x",), ("x",) * 6, (None,) * 12, (2**70,) * 5, (raw,) * 21, (b"x" * 4096, 0, 1, 0, 0, 0)):
            with pytest.raises((TypeError, ValueError, OverflowError, BufferError)):
                call(*given_)
    for name, wrong in (("sound", columns[:1]), ("sound", (*columns, 1)), ("commit", columns)):
        with pytest.raises(TypeError):
            getattr(raw, name)(*wrong)
    for at in range(2):
        for bad in (b"", b"x" * 7, b"\xff" * 400, None):
            given_ = [*columns]
            given_[at] = bad
            with pytest.raises((TypeError, ValueError)):
                raw.sound(*given_)
            with pytest.raises((TypeError, ValueError)):
                raw.commit(*given_, batch.requests)
    far = prefill([8], batch.requests)
    with pytest.raises(ValueError, match="does not fit the table"):
        raw.commit(far.ints, far.rows, batch.requests)
    with pytest.raises(ValueError, match="does not fit the table"):
        raw.commit(*columns, ())
    module = bound.device.driver.native.module
    for wrong in ((), (state.host_table.table, [], {}, 0, 8, 64, 8, 8), (np.zeros(3), [None] * 8, {}, 0, 8, 64, 8, 8)):
        with pytest.raises((TypeError, ValueError)):
            module.HostTable(*wrong)
    with pytest.raises(ValueError, match="missing"):
        module.Driver(None, None, (0,) * len(CALLS))


def test_nothing_is_kept(opened, monkeypatch):
    """Many calls of each kind leave the numbers of blocks and objects unchanged."""
    monkeypatch.setattr(staged_requests, "CHUNK", 1 << 14)  # emptied often, as a chunk keeps weak references until then
    bound = opened()
    state, stream, library = bound.state(SIZES), bound.default_stream, bound.device.driver.api.library
    view = state.view("temperature")[3]

    def work(count):
        rounds(bound, state, stream, count)
        for _ in range(count):
            bound.async_set_value(target=view, value=0.5, stream=stream)
            bound.async_set_value(target=view, value=0.7, stream=stream)
            with pytest.raises(TypeError):
                state.host_table.twin.raw.sound(1)
            state.host_table.twin.sound(prefill([9], [kept]))
        gc.collect()

    kept = state.admit(Request("kept", [1] * 9))
    work(800)  # the first calls create the events that count calls
    references = sys.getrefcount(None), sys.getrefcount(kept), sys.getrefcount(state.host_table.live)
    live, blocks = library.stand_in_count(0), sys.getallocatedblocks()
    work(400)
    assert library.stand_in_count(0) - live < 5, "events are made as needed, not for each call"
    assert sys.getallocatedblocks() - blocks < 200
    after = sys.getrefcount(None), sys.getrefcount(kept), sys.getrefcount(state.host_table.live)
    assert all(abs(now - then) < 100 for now, then in zip(after, references, strict=True))


def test_a_closed_device_has_given_everything_back(opened):
    left = []
    for _ in range(3):
        bound = opened()
        library, state = bound.device.driver.api.library, bound.state(SIZES)
        rounds(bound, state, bound.device.stream(), 200)
        held = library.stand_in_count(0)
        del state
        bound.close()
        gc.collect()
        left.append(library.stand_in_count(0))
        assert held > left[-1]
    assert left == left[:1] * 3, "blocks, and the events that count calls"


def test_a_failed_call_is_named_as_the_driver_names_it(opened):
    bound = opened()
    state, api = bound.state(SIZES), bound.device.driver.api
    for name, call in (("memset", "cuMemsetD32Async"), ("hal_fill", "cuLaunchKernel")):
        api.fail = name
        target, value = (state.view("temperature")[3], 0.5) if name == "memset" else (state.view("seed")[3], 7)
        with pytest.raises(RuntimeError, match=f"{call}: CUDA_ERROR_INVALID_VALUE"):
            bound.async_set_value(target=target, value=value, stream=bound.default_stream)
    api.fail = ""


def test_a_wait_gives_up_the_lock_for_the_wait_alone(opened, monkeypatch):
    """Beside a busy thread each call of the bindings takes 5 ms, so native calls change the capture mode."""
    bound, given_up = opened(), []

    def exchange(mode):
        given_up.append(mode)
        raise AssertionError("by the bindings")

    monkeypatch.setattr(bound.device.driver.api, "cuThreadExchangeStreamCaptureMode", exchange, raising=False)
    bound.device.stream().synchronize()
    assert given_up == []
