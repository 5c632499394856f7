"""The cuda device on a GPU gives the same bytes as the cpu device after the same calls. Skipped without a GPU."""

import gc

import numpy as np
import pytest
from hal_core import Request, StateConfig, TaskBatch, admit
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import InvalidValue
from hal_core.memory.views import ByteRange
from hal_core.runtime.bound import bind
from hal_cuda import CudaPlugin, staged_requests

from .states import contents

found = CudaPlugin.probe()
pytestmark = pytest.mark.skipif(not found.available, reason=f"no GPU: {found.reason}")
SIZES = StateConfig(
    num_slots=12, max_model_len=700, block_size=4, max_draft_tokens=3, max_logprobs=2, max_stop_length=3
)


@pytest.fixture(scope="module")
def pair():
    """Open a cuda and a cpu device."""
    devices = bind(CudaPlugin.open(0, {})), bind(CpuPlugin.open(0, {}))
    yield devices
    for device in devices:
        device.close()


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
