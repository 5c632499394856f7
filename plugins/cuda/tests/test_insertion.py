"""Staged batches over the stand-in driver: the same bytes as on the cpu device, by one upload and one launch."""

import sys
import threading
from functools import partial

import numpy as np
import pytest
from hal_core import TIMEOUTS, Request, StateConfig, Task, TaskKind
from hal_core.slots.admission import admit
from hal_cuda import insertion, staged_requests
from hal_cuda.driver import CudaError
from hal_cuda.structs import ENTRY

from .states import contents, is_staged, prefill

SIZES = StateConfig(num_slots=20, max_model_len=90, block_size=4, max_stop_length=3, max_bad_words=4)
entering = partial(prefill, block_size=SIZES.block_size)


@pytest.fixture(autouse=True)
def near(request, monkeypatch):
    """Set how many bytes the native path reads in place. The default is none: then everything is uploaded, entries
    included."""
    monkeypatch.setattr(insertion, "NEAR", getattr(request, "param", 0))
    monkeypatch.setattr(insertion, "FEW", 0)
    return insertion.NEAR


@pytest.mark.parametrize("count", [3, 20])
def test_requests_admitted_without_the_state_take_the_general_way(opened, count):
    bound = opened()
    state = bound.state(SIZES)
    requests = [state.admit(Request(f"s{i}", [i] * 9)) for i in range(count - 1)]
    requests.append(admit(Request("bare", [7] * 9), state.layout))
    del bound.device.driver.api.calls[:]
    bound.insert_tasks(state=state, tasks=entering(range(count), requests), stream=bound.default_stream)
    assert "hal_enter" not in bound.device.driver.api.calls
    assert "hal_write" in bound.device.driver.api.calls
    tokens = contents(bound, state)["token_ids"]
    assert tokens[: count - 1, 0].tolist() == list(range(count - 1))
    assert tokens[count - 1, :9].tolist() == [7] * 9


def test_without_room_for_staging_the_general_way_is_taken(opened):
    bound = opened({"admission_limit": 0})
    state = bound.state(SIZES)
    requests = [state.admit(Request(f"s{i}", [i] * 9)) for i in range(20)]
    bound.insert_tasks(state=state, tasks=entering(range(20), requests), stream=bound.default_stream)
    assert contents(bound, state)["token_ids"][:, 0].tolist() == list(range(20))
    assert bound.device.staged_requests.held == 0


@pytest.mark.parametrize("count", [2, 20])
def test_g01_what_another_streams_batch_uploaded_is_waited_for(opened, count):
    """The first batch's upload, for another stream, contained the second's requests: its stream waits for it too."""
    bound = opened()
    state, first, second = bound.state(SIZES), bound.device.stream(), bound.device.stream()
    requests = [state.admit(Request(f"s{i}", [i] * 9)) for i in range(2 * count)]
    calls = bound.device.driver.api.calls
    bound.insert_tasks(state=state, tasks=entering(range(count), requests[:count]), stream=first)
    assert f"stream {first.handle} waits" in calls
    state.release(range(count))
    del calls[:]
    bound.insert_tasks(state=state, tasks=entering(range(count), requests[count:]), stream=second)
    assert f"stream {second.handle} waits" in calls


@pytest.mark.parametrize("count", [1, 20])
def test_bytes_not_uploaded_in_another_chunk_are_read_in_place(opened, monkeypatch, count):
    monkeypatch.setattr(staged_requests, "CHUNK", 1 << 15)
    bound = opened()
    state = bound.state(SIZES)
    requests = [state.admit(Request(f"s{i}", [i] * 80)) for i in range(count)]
    while len(bound.device.staged_requests.chunks) == 1:
        late = state.admit(Request("late", [5] * 80))
    del bound.device.driver.api.calls[:]
    bound.insert_tasks(state=state, tasks=entering(range(count), requests), stream=bound.default_stream)
    assert bound.device.driver.api.calls.count("copy") == 1
    assert contents(bound, state)["token_ids"][:count, 79].tolist() == list(range(count))
    state.release(range(count))
    bound.insert_tasks(state=state, tasks=entering([3], [late]), stream=bound.default_stream)
    assert contents(bound, state)["token_ids"][3, 79] == 5


def test_admission_from_other_threads_beside_insertions(opened, monkeypatch):
    """Threads admit while the device's thread inserts and chunks are reused all the time: each slot gets its
    request."""
    monkeypatch.setattr(staged_requests, "CHUNK", 1 << 15)
    bound = opened({"admission_limit": 1 << 17})
    state, ready, condition = bound.state(SIZES), [], threading.Condition()

    def admit_many(name):
        for i in range(120):
            request = state.admit(Request(f"{name}-{i}", [name * 10 + i % 10] * 40))
            with condition:
                ready.append(request)
                condition.notify()

    threads = [threading.Thread(target=admit_many, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(36):
        with condition:
            assert condition.wait_for(lambda: len(ready) >= 10, 30)
            chosen, ready[:] = ready[:10], ready[10:]
        bound.insert_tasks(state=state, tasks=entering(range(10), chosen), stream=bound.default_stream)
        tokens = contents(bound, state)["token_ids"]
        assert tokens[:10, 39].tolist() == [request.tokens[39] for request in chosen]
        state.release(range(10))
    for thread in threads:
        thread.join()


def test_threads_beside_the_one_that_works_look_now_and_then(opened, monkeypatch):
    """If they were woken with it, they would take the GIL from the next step."""
    bound = opened()
    runtime, patience = bound.device._runtime, {}
    event, other = bound.default_stream.record(), bound.default_stream.record()

    def passes(event, seconds, between):
        patience[threading.get_ident()] = between
        return True

    monkeypatch.setattr(runtime, "_passes", passes)
    thread = threading.Thread(target=other.wait)
    thread.start()
    thread.join(30)
    event.wait()
    assert patience == {threading.get_ident(): 0.0, thread.ident: TIMEOUTS.poll_background}


@pytest.mark.parametrize("count", [3, 20])
def test_a_backlog_does_not_take_the_fast_way_from_staged_requests(opened, monkeypatch, count):
    """If waiting requests leave the entries no room, the kernel reads them from the ring."""
    monkeypatch.setattr(staged_requests, "CHUNK", 1 << 15)
    bound = opened({"admission_limit": 1 << 15})
    state, waiting = bound.state(SIZES), []
    while not waiting or is_staged(bound.device, waiting[-1]):
        waiting.append(state.admit(Request(f"s{len(waiting)}", [len(waiting)] * 9)))
    calls = bound.device.driver.api.calls
    for turn in range(2):
        chosen, waiting = waiting[:count], waiting[count:]
        del calls[:]
        bound.insert_tasks(state=state, tasks=entering(range(count), chosen), stream=bound.default_stream)
        assert calls.count("hal_enter") == 1, turn
        assert calls.count("copy") <= 1
        tokens = contents(bound, state)["token_ids"]
        assert tokens[:count, 8].tolist() == [request.tokens[8] for request in chosen]
        state.release(range(count))


def test_a_mixed_batch_gives_back_the_places_of_its_requests(opened):
    bound = opened()
    state = bound.state(SIZES)
    first, second = (state.admit(Request(f"s{i}", [i] * 9)) for i in range(2))
    bound.insert_tasks(state=state, tasks=entering([0], [first]), stream=bound.default_stream)
    tasks = [
        Task(TaskKind.MORE_BLOCKS, 0, first, blocks=[7], first_block=3),
        Task(TaskKind.PREFILL, 1, second, num_scheduled_tokens=9, blocks=[1, 2, 3]),
    ]
    assert bound.device.staged_requests._waits.sum() == 1
    bound.insert_tasks(state=state, tasks=tasks, stream=bound.default_stream)
    assert bound.device.staged_requests._waits.sum() == 0


def test_a_driver_that_fails_for_good_is_named_on_a_stream_without_work_too(opened, monkeypatch):
    bound = opened()
    state, device = bound.state(SIZES), bound.device
    batch = entering([0], [state.admit(Request("a", [1] * 9))])
    stream = device.stream()

    def broken(*_):
        raise CudaError("cuEventRecord: CUDA_ERROR_LAUNCH_FAILED", cure="restart the process")

    monkeypatch.setattr(device.insertion, "_enter", broken)
    monkeypatch.setattr(device, "mark", broken)
    with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED"):
        device.insertion._from_ring(state.host_table.twin, batch, stream, device.events.take(stream))


def test_memory_for_staging_is_no_condition(opened, caplog):
    bound = opened()
    state, api = bound.state(SIZES), bound.device.driver.api
    api.fail = "alloc"
    requests = [state.admit(Request(f"s{i}", [i] * 9)) for i in range(20)]
    bound.insert_tasks(state=state, tasks=entering(range(20), requests), stream=bound.default_stream)
    api.fail = ""
    assert contents(bound, state)["token_ids"][:, 0].tolist() == list(range(20))
    assert "staged in 0 bytes from now on" in caplog.text


def test_what_was_uploaded_is_read_on_the_device_and_not_uploaded_again(opened):
    """The one request's entry has its address on the device; the chunk's new bytes are those added since."""
    bound = opened()
    state, staging = bound.state(SIZES), bound.device.staged_requests
    for turn in range(3):
        request = state.admit(Request(f"r{turn}", [turn] * 9))
        (chunk,) = staging.chunks
        assert chunk.uploaded < chunk.used
        at, place = chunk.used, staging.table[request.admission_id % len(staging.table)][1]
        before = bound.counters()
        bound.insert_tasks(state=state, tasks=entering([turn], [request]), stream=bound.default_stream)
        spent = bound.counters() - before
        assert (spent.submissions, spent.uploads, spent.launches) == (2, 1, 1)
        assert chunk.uploaded == chunk.used > at
        entry = chunk.block.buffer[at : at + ENTRY.size].view(np.int64)
        assert entry[8] == place
        assert chunk.block.mirror <= place < chunk.block.mirror + chunk.nbytes


def native_calls(bound, work):
    """Return the names of the native part's functions called during some work, in order."""
    module, found = bound.device.driver.native.module, []
    types = (module.Driver, module.HostTable)

    def note(frame, event, called):
        if event == "c_call" and (called.__module__ == module.__name__ or isinstance(called.__self__, types)):
            found.append(called.__name__)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("count", [1, 16])
def test_a_batch_is_four_native_calls_and_one_kernel(opened, count):
    """Two batches of any size: new requests, and tasks of which one is handed over and the rest grow."""
    bound = opened()
    state, stream, driver_calls = bound.state(SIZES), bound.default_stream, bound.device.driver.api.calls
    requests = [state.admit(Request(f"r{at}", [at] * 8)) for at in range(count)]
    handed = state.admit(Request("handed", [1] * 8))
    new = [Task(TaskKind.PREFILL, at, one, 0, 8, [at, at + 1]) for at, one in enumerate(requests)]
    tasks = [Task(TaskKind.MORE_BLOCKS, at, one, blocks=[9], first_block=2) for at, one in enumerate(requests)]
    tasks.append(Task(TaskKind.REMOTE_PREFILL, count, handed, 8, blocks=[1, 2], first_token=5))

    for given in (new, tasks):
        del driver_calls[:]

        def work(given=given):
            bound.insert_tasks(state=state, tasks=given, stream=stream)

        assert native_calls(bound, work) == ["gather_tasks", "sound", "enter", "commit"]
        assert [call.split()[0] for call in driver_calls] == ["copy", "stream", "hal_enter"]  # the stream waits for it
