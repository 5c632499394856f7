"""The cuda device on a GPU gives the same bytes as the cpu device after the same calls. Skipped without a GPU."""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import pytest
from hal_core import Request, SamplingParams, StateConfig, Task, TaskBatch, TaskKind, admit
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import HalError, InvalidValue, OutOfMemory
from hal_core.memory.views import ByteRange
from hal_core.output.sinks import MemorySink
from hal_core.runtime.bound import bind
from hal_core.slots.step import Step
from hal_cuda import CudaPlugin, insertion, staged_requests
from hal_cuda.structs import ENTRY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

found = CudaPlugin.probe()
pytestmark = pytest.mark.skipif(not found.available, reason=f"no GPU: {found.reason}")
SIZES = StateConfig(
    num_slots=12, max_model_len=700, block_size=4, max_draft_tokens=3, max_logprobs=2, max_stop_length=3
)
QUIET = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ids = st.integers(0, 9)


@pytest.fixture(scope="module")
def pair():
    """Open a cuda and a cpu device."""
    devices = bind(CudaPlugin.open(0, {})), bind(CpuPlugin.open(0, {}))
    yield devices
    for device in devices:
        device.close()


def contents(bound, state):
    copied = bound.device.copy_out(state.memory, [ByteRange(0, state.layout.nbytes)], bound.default_stream)
    copied.wait(10)
    return state.columns(copied.data[0], ByteRange(0, state.layout.nbytes))


def assert_same(pair, states):
    mine, theirs = (contents(bound, state) for bound, state in zip(pair, states, strict=True))
    for name in theirs:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)


params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 6),
    min_tokens=st.just(0),
    temperature=st.sampled_from([0.0, 0.75]),
    bad_words=st.lists(ids, max_size=4).map(tuple),
    stop_sequences=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    eos_token_ids=st.lists(ids, max_size=3).map(tuple),
)


@QUIET
@given(data=st.data(), speculative=st.booleans())
def test_g09_g12_insert_advance_and_output_equal_the_cpu_devices(pair, data, speculative):
    states = [bound.state(SIZES) for bound in pair]
    for turn in range(3):
        staged = data.draw(st.booleans(), label="staged")
        admitting = states[0].admit if staged else partial(admit, layout=states[0].layout)
        free = [slot for slot in range(SIZES.num_slots) if not states[0].host_table.admission_ids[slot]]
        slots = data.draw(st.lists(st.sampled_from(free), unique=True) if free else st.just([]), label="slots")
        requests = [
            admitting(Request(f"r{turn}-{slot}", data.draw(st.lists(ids, min_size=1, max_size=600)), data.draw(params)))
            for slot in slots
        ]
        tasks = [
            Task(
                TaskKind.PREFILL,
                slot,
                request,
                num_scheduled_tokens=request.total,
                blocks=range(-(-request.total // 4)),
            )
            for slot, request in zip(slots, requests, strict=True)
        ]
        sampled = data.draw(st.lists(ids, min_size=SIZES.num_slots, max_size=SIZES.num_slots), label="sampled")
        accepted = np.array(sampled * SIZES.max_accept).reshape(SIZES.num_slots, -1)
        counts = data.draw(
            st.lists(st.integers(-1, 5), min_size=SIZES.num_slots, max_size=SIZES.num_slots), label="counts"
        )
        step = Step(turn, {"target": np.arange(SIZES.num_slots)}, speculative=speculative)
        records = []
        for bound, state in zip(pair, states, strict=True):
            stream, sink = bound.default_stream, MemorySink()
            bound.insert_tasks(state=state, tasks=tasks, stream=stream)
            bound.async_set_value(target=state.view("sampled_token_ids"), value=sampled, stream=stream)
            bound.async_set_value(target=state.view("accept_tokens"), value=accepted, stream=stream)
            if speculative:
                bound.async_set_value(target=state.view("accept_num"), value=counts, stream=stream)
            bound.update_inputs(state=state, step=step, stream=stream)
            ticket = bound.save_output(state=state, step=step, sink=sink, stream=stream)
            records.append(state.take(ticket))
            ticket.observed = True  # counts out of bounds are drawn on purpose; both tickets raise
        assert records[0] == records[1]
        assert_same(pair, states)
        ended = np.flatnonzero(states[1].mirror["stop_flags"][:, 0]).tolist()
        for state in states:
            state.release([slot for slot in ended if state.host_table.admission_ids[slot]])


def _torch(dtype, shape):
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda")
    return tensor, lambda: tensor.float().cpu().numpy() if dtype == "bfloat16" else tensor.cpu().numpy()


def _cupy(dtype, shape):
    try:
        import cupy
    except Exception as error:  # noqa: BLE001 (CuPy does not import beside numpy 1.26)
        pytest.skip(f"CuPy does not import: {error}")
    if dtype == "bfloat16":
        pytest.skip("CuPy has no bfloat16")
    array = cupy.zeros(shape, dtype)
    return array, array.get


def _paddle(dtype, shape):
    paddle = pytest.importorskip("paddle")
    if not paddle.is_compiled_with_cuda():
        pytest.skip("a CPU build of Paddle")
    if dtype == "bfloat16":
        pytest.skip("made from NumPy, which has no bfloat16")
    tensor = paddle.to_tensor(np.zeros(shape, dtype), place=paddle.CUDAPlace(0))
    return tensor, tensor.numpy


@pytest.mark.parametrize("library", [_torch, _cupy, _paddle])
@pytest.mark.parametrize("dtype", ["int64", "int32", "float32", "float16", "bool", "uint8", "bfloat16"])
def test_g01_g05_tensors_of_other_libraries_are_targets(pair, library, dtype):
    """Whole, sliced, strided and reversed views: only the named elements change."""
    tensor, read = library(dtype, (6, 300))
    bound = pair[0]
    stream = bound.default_stream
    view = bound.device.resolve(tensor)
    expected = np.zeros((6, 300), read().dtype)
    rng = np.random.default_rng(0)
    for index in (
        (slice(None), slice(None)),
        (slice(1, 2), slice(0, 7)),
        (slice(0, 6, 2), slice(1, 300, 3)),
        (slice(None, None, -1), slice(299, None, -2)),
        (2, slice(None)),
    ):
        part = expected[index]
        value = rng.integers(0, 2, part.shape) > 0 if dtype == "bool" else rng.integers(0, 100, part.shape)
        bound.async_set_value(target=view[index], value=value, stream=stream).wait(10)
        expected[index] = value
        np.testing.assert_array_equal(read(), expected)
        bound.async_set_value(target=view[index], value=True if dtype == "bool" else 7, stream=stream).wait(10)
        expected[index] = 1 if dtype == "bool" else 7
        np.testing.assert_array_equal(read(), expected)


def test_a_slice_of_a_torch_tensor_is_a_target_as_it_stands(pair):
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((4, 8), device="cuda")
    pair[0].async_set_value(target=tensor[1:3, ::2], value=1.5, stream=pair[0].default_stream).wait(10)
    assert tensor.sum().item() == 8 * 1.5
    assert tensor[1:3, ::2].eq(1.5).all()


def test_g02_a_value_may_change_as_soon_as_the_call_returns(pair):
    torch = pytest.importorskip("torch")
    bound = pair[0]
    stream, value = bound.default_stream, np.full(1 << 16, 3, np.int64)
    tensor = torch.zeros(1 << 16, dtype=torch.int64, device="cuda")
    with bound.device.hold_stream(stream):
        ticket = bound.async_set_value(target=tensor, value=value, stream=stream)
        value[...] = 9
        assert not ticket.done()
    ticket.wait(10)
    assert tensor.eq(3).all()


def _write_often(bound, target, value, times):
    for _ in range(times):
        bound.async_set_value(target=target, value=value, stream=bound.default_stream)


def test_g03_nothing_waits_for_a_held_stream_and_a_full_ring_says_so():
    bound = bind(CudaPlugin.open(0, {"ring_start": 1 << 16, "ring_limit": 1 << 16, "deadline": 0.2}))
    state = bound.state(SIZES)
    stream, value = bound.default_stream, np.arange(600)
    target = state.view("token_ids")[0, :600]
    bound.async_set_value(target=target, value=value, stream=stream).wait(10)
    with bound.device.hold_stream(stream):
        tickets = [bound.async_set_value(target=target, value=value, stream=stream) for _ in range(8)]
        assert not any(ticket.done() for ticket in tickets)
        with pytest.raises(OutOfMemory, match="stayed full"):
            _write_often(bound, target, value, 20)
    tickets[-1].wait(10)
    bound.async_set_value(target=target, value=value, stream=stream).wait(10)
    bound.close()


def test_g10_submissions_grow_with_neither_requests_nor_fields(pair):
    bound, state = pair[0], pair[0].state(SIZES)
    counts = []
    for n in (1, SIZES.num_slots):
        requests = [admit(Request(f"r{n}-{i}", [1] * 500), state.layout) for i in range(n)]
        batch = TaskBatch.prefill(range(n), requests, [500] * n, [range(125)] * n)
        before = bound.counters()
        bound.insert_tasks(state=state, tasks=batch, stream=bound.default_stream)
        spent = bound.counters() - before
        counts.append(spent.submissions)
        assert spent.host_waits == 0
        state.release(range(n))
    assert counts[0] <= 2
    assert counts[1] == 2


def test_g10_staged_requests_take_at_most_one_upload_and_one_launch(pair):
    """For prompts of any length, in any order; on the native path a few bytes are read in place."""
    bound, state = pair[0], pair[0].state(SIZES)
    requests = [state.admit(Request(f"s{i}", [i] * 600)) for i in range(2 * SIZES.num_slots)]
    for chosen in (requests[::2], requests[1::2]):
        n = len(chosen)
        batch = TaskBatch.prefill(range(n), chosen, [600] * n, [range(150)] * n)
        before = bound.counters()
        bound.insert_tasks(state=state, tasks=batch, stream=bound.default_stream)
        spent = bound.counters() - before
        again, new = chosen[0] is not requests[0], n * (ENTRY.size + 4 * 150)  # the first upload had all tokens
        least = 0 if again and new <= insertion.NEAR else 1
        assert (spent.uploads, spent.launches, spent.host_waits) == (least, 1, 0)
        tokens = contents(bound, state)["token_ids"]
        assert (tokens[:, :600] == [[request.tokens[0]] for request in chosen]).all()
        assert (tokens[:, 600:] == -1).all()
        state.release(range(n))


def test_g10_chunks_of_staged_requests_are_used_again(pair, monkeypatch):
    """Many more requests than the pinned memory holds, in changing order: each slot gets its own request."""
    monkeypatch.setattr(staged_requests, "CHUNK", 1 << 15)
    bound = bind(CudaPlugin.open(0, {"admission_limit": 1 << 17}))
    state, n, random = bound.state(SIZES), SIZES.num_slots, np.random.default_rng(0)
    waiting, staged = [], 0
    for turn in range(60):
        waiting += [
            state.admit(Request(f"{turn}-{i}", random.integers(0, 99, random.integers(1, 600)))) for i in range(n)
        ]
        random.shuffle(waiting)
        chosen, waiting = waiting[:n], waiting[n : 2 * n]
        table = bound.device.staged_requests.table
        staged += sum([table[one.admission_id % len(table)][0] == one.admission_id for one in chosen])
        batch = TaskBatch.prefill(range(n), chosen, [r.total for r in chosen], [range(150)] * n)
        bound.insert_tasks(state=state, tasks=batch, stream=bound.default_stream)
        tokens = contents(bound, state)["token_ids"]
        for slot, request in enumerate(chosen):
            np.testing.assert_array_equal(tokens[slot, : request.total], request.tokens)
            assert (tokens[slot, request.total :] == -1).all()
        state.release(range(n))
        assert bound.device.staged_requests.held <= 1 << 17
    assert staged > 30 * n
    bound.close()


def test_g10_a_batch_over_the_rings_limit_takes_two_submissions_a_block():
    bound = bind(CudaPlugin.open(0, {"ring_start": 1 << 14, "ring_limit": 1 << 14}))
    states = [bound.state(SIZES)]
    requests = [admit(Request(f"r{i}", list(range(600))), states[0].layout) for i in range(SIZES.num_slots)]
    batch = TaskBatch.prefill(range(SIZES.num_slots), requests, [600] * SIZES.num_slots, [range(150)] * SIZES.num_slots)
    bound.insert_tasks(state=states[0], tasks=batch, stream=bound.default_stream).wait(10)
    assert (contents(bound, states[0])["token_ids"][:, :600] == np.arange(600)).all()
    bound.close()


def test_g22_a_copy_out_is_of_its_own_time(pair):
    """A write after the call of the copy does not change it."""
    bound = pair[0]
    state, stream = bound.state(SIZES), bound.default_stream
    part = ByteRange(state.layout.fields["step_idx"].offset, 8 * SIZES.num_slots)
    view = state.view("step_idx")
    with bound.device.hold_stream(stream):
        bound.async_set_value(target=view, value=1, stream=stream)
        copied = bound.device.copy_out(state.memory, [part], stream)
        bound.async_set_value(target=view, value=2, stream=stream)
    copied.wait(10)
    assert (copied.data[0].view(np.int64) == 1).all()


def test_bad_targets_are_refused(pair):
    torch = pytest.importorskip("torch")
    bound = pair[0]
    for target, complaint in (
        (torch.zeros(2), "on cpu"),
        (np.zeros(2), "not on GPU 0"),
        ("text", "not a tensor of this device"),
        (torch.zeros(1, device="cuda").expand(4), "overlapping elements"),
        (torch.zeros(8, device="cuda").unfold(0, 4, 1), "overlapping elements"),
    ):
        with pytest.raises(InvalidValue, match=complaint):
            bound.async_set_value(target=target, value=1, stream=bound.default_stream)


def test_steady_state_allocates_nothing(pair):
    bound, state = pair[0], pair[0].state(SIZES)
    requests = [admit(Request(f"r{i}", [1] * 100), state.layout) for i in range(400)]
    events, held, allocations = None, None, None
    for i, request in enumerate(requests):
        batch = TaskBatch.prefill([i % 4], [request], [100], [range(25)])
        bound.insert_tasks(state=state, tasks=batch, stream=bound.default_stream)
        bound.device.copy_out(state.memory, [ByteRange(0, 64)], bound.default_stream).wait(10)
        state.release([i % 4])
        if i == 100:
            gc.collect()
            events, held = bound.device.events.made, bound.device.staging.held
            allocations = bound.counters().allocations
    assert (bound.device.staging.held, bound.counters().allocations) == (held, allocations)
    assert bound.device.events.made <= events + 130


def test_closing_twice_and_using_what_is_closed():
    bound = bind(CudaPlugin.open(0, {}))
    state = bound.state(SIZES)
    bound.close()
    bound.close()
    with pytest.raises(HalError, match="closed"):
        bound.async_set_value(target=state.view("step_idx"), value=1, stream=0)
