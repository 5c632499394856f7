"""Ranks over NCCL as far as testable without a GPU: which GPUs they get, why they are unavailable, how devices
close."""

import gc
from types import SimpleNamespace

import hal_cuda
import numpy as np
import pytest
from hal_core import Request, StateConfig, devices
from hal_core.devices.stream_device import SPARES
from hal_core.errors import Unavailable
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, View
from hal_core.slots.state import SlotState
from hal_cuda import conformance, launching
from hal_cuda.conformance import CudaSupport
from hal_cuda.native_device import open_gpu

from .states import is_staged

ENDPOINTS = [f"127.0.0.1:{9000 + rank}" for rank in range(4)]


def absent():
    raise Unavailable("NCCL does not load")


def support(monkeypatch, gpus, visible=None, library=lambda: None):
    monkeypatch.setattr(conformance, "gpu_count", lambda: gpus)
    monkeypatch.setattr(conformance, "library", library)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return CudaSupport()


@pytest.mark.parametrize(
    ("gpus", "visible", "firsts"),
    [
        (2, None, ["0", "1", "0", "1"]),
        (3, None, ["0", "1", "2", "0"]),
        (8, None, ["0", "1", "2", "3"]),
        (2, "5,GPU-6f", ["5", "GPU-6f", "5", "GPU-6f"]),
    ],
)
def test_ranks_of_one_group_get_a_gpu_each_and_see_all(monkeypatch, gpus, visible, firsts):
    lent = support(monkeypatch, gpus, visible)
    assert lent.ranks
    assert not lent.loss_ends_ranks
    assert lent.four_ranks == (gpus >= 4)
    environments = [lent.rank_environment(rank, ENDPOINTS) for rank in range(4)]
    orders = [one["CUDA_VISIBLE_DEVICES"].split(",") for one in environments]
    assert [order[0] for order in orders] == firsts
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert orders[0][0] != orders[1][0]
    assert orders[2][0] != orders[3][0]
    assert [one["PADDLE_TRAINER_ID"] for one in environments] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("gpus", "library", "why"),
    [(1, lambda: None, "two GPUs are needed, and 1 is visible"), (2, absent, "NCCL does not load")],
    ids=["one GPU", "no NCCL"],
)
def test_without_ranks_the_kit_gets_the_reason(monkeypatch, gpus, library, why):
    lent = support(monkeypatch, gpus, library=library)
    assert not lent.ranks
    assert why in lent.why_not("several_ranks")
    assert "HAL_CUDA_TENSORS" in lent.why_not("tensors")
    assert "several_ranks" not in lent.offers(SimpleNamespace())


def test_gpus_that_cuda_does_not_count_are_not_given_to_ranks(monkeypatch):
    """CUDA ignores everything from the first unknown name on."""
    assert support(monkeypatch, 2, "0,1,77")._gpus == ["0", "1"]


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    def load(name):
        raise OSError(name)

    monkeypatch.setattr(hal_cuda.ctypes, "CDLL", load)
    assert hal_cuda.gpu_count() == 0


def test_a_rank_has_opened_its_device_before_a_collective_can_wait_for_it(monkeypatch):
    calls = []

    def note(name):
        return lambda *arguments, **named: calls.append((name, *arguments, *named.values()))

    device = SimpleNamespace(groups_by="nccl by hal", make_group="its own way", close=note("close"))
    monkeypatch.setattr(devices, "join_world", note("join_world"))
    monkeypatch.setattr(devices, "open_groups", note("open_groups"))
    monkeypatch.setattr(conformance.CudaPlugin, "open", lambda index, options: calls.append(("open", index)) or device)
    support(monkeypatch, 2).join(((0, 1), (2, 3)), 2.0, "a test")
    assert [name for name, *_ in calls] == ["join_world", "open", "open_groups", "close"]
    assert calls[2][1:] == (((0, 1), (2, 3)), "nccl by hal", 2.0, "its own way")


def tracked(kept):
    """Return a ``make`` of ``opened`` that keeps the addresses of allocated memory in the set ``kept``."""

    def make(options, driver):
        api = driver.api
        free = api.cuMemFreeHost

        def allocating(call):
            def allocate(*arguments):
                status, address = call(*arguments)
                kept.add(address)
                return status, address

            return allocate

        api.cuMemHostAlloc = allocating(api.cuMemHostAlloc)
        api.cuMemAllocFromPoolAsync = allocating(api.cuMemAllocFromPoolAsync)
        api.cuMemFreeHost = lambda address: (kept.remove(address), free(address))[1]  # cuMemFreeAsync calls it
        return open_gpu(0, options, driver)

    return make


@pytest.mark.parametrize("lost", ["rank 1 is gone", ""])
def test_closing_does_not_wait_behind_a_lost_group(opened, lost):
    kept, left, contexts = set(), [], []
    device = opened(make=tracked(kept)).device
    api, stream = device.driver.api, device.stream()
    state, handle = SlotState(device, StateConfig(num_slots=2, max_model_len=8)), stream.handle
    assert is_staged(device, state.admit(Request("early", [1])))
    api.library.stand_in_hold(handle, int(bool(lost)))
    copied = device.copy_out(state.memory, [ByteRange(0, 64)], stream)
    device._communicators[0, 1] = SimpleNamespace(lost=lost, close=lambda: left.append(1))
    api.cuDevicePrimaryCtxRelease = lambda device: (contexts.append(1), (api.CUresult.CUDA_SUCCESS,))[1]
    pinned = set(kept)
    device.close()
    device.close()
    assert left == [1]
    if lost:
        assert not copied.done(), "closing waited for the held stream"
        assert kept == pinned, "memory behind the lost group was released"
    else:
        assert len(kept) == 2, "the state and the copy's array are still held, nothing else"
        assert contexts == [1], "the context that the device alone has left"
    assert not is_staged(device, state.admit(Request("late", [1]))), "a closed device stages nothing"
    assert device.staged_requests.listed.tolist() == [0], "nor does native code know of its chunks"
    api.library.stand_in_hold(handle, 0)
    del copied, state
    gc.collect()
    if not lost:
        assert (contexts, kept) == ([1, 1], set())


def test_calls_that_wait_for_the_whole_device_are_made_only_at_the_end(opened):
    """``cuMemFree`` and ``cuMemFreeHost`` wait for held streams of other owners; hooks free memory meanwhile."""
    kept, freed = set(), []
    device = opened({"ring_start": 4096, "ring_limit": 1 << 16}, make=tracked(kept)).device
    api = device.driver.api
    free = api.cuMemFreeHost
    api.cuMemFreeHost = lambda address: (freed.append(address), free(address))[1]
    api.cuMemFreeAsync = lambda address, stream: free(address)
    memory = device.allocate(1 << 18)
    for nbytes in (1 << 12, 1 << 14, 1 << 16, 1 << 18):  # the ring grows; larger values use separate memory
        target = View.contiguous(memory, 0, (nbytes,), dtype_of("uint8"))
        for value in (np.ones(nbytes, np.uint8), np.ones((nbytes, 2), np.uint8)[:, 0]):
            device.async_set_value(device, target, value, device.default_stream)
        copies = [device.copy_out(memory, [ByteRange(0, nbytes)], device.default_stream) for _ in range(20)]
        del copies
        device.allocate(nbytes)
    assert not freed
    del memory, target
    device.close()
    assert freed
    assert not kept


def test_memory_that_outlived_its_device_is_used_again_without_a_wait(opened):
    """Dropping the last array frees it, perhaps by the collector in the middle of a hook of another device."""
    kept, freed = set(), []
    first, second = (opened(make=tracked(kept)).device for _ in range(2))
    for device in (first, second):
        free = device.driver.api.cuMemFreeHost
        device.driver.api.cuMemFreeAsync = lambda address, stream, free=free: free(address)
        device.driver.api.cuMemFreeHost = lambda address, free=free: (freed.append(address), free(address))[1]

    def outlive(device):
        memory = device.allocate(4096)
        return memory, device.copy_out(memory, [ByteRange(0, 16)], device.default_stream).data

    outlived = outlive(first)
    (address,) = [array.ctypes.data for array in outlived[1]]
    first.close()
    del outlived
    gc.collect()
    assert not freed
    (again,) = [array.ctypes.data for array in outlive(second)[1]]
    assert again == address
    second.close()
    gc.collect()
    assert address in freed
    assert not kept


def test_a_closed_device_gives_modules_streams_and_its_pool_back(opened):
    device = opened().device
    api, made, gone = device.driver.api, [], []
    for name in ("cuModuleUnload", "cuStreamDestroy", "cuMemPoolDestroy", "cuEventDestroy"):
        setattr(api, name, lambda *arguments, name=name: (gone.append(name), (api.CUresult.CUDA_SUCCESS,))[1])
    create = api.cuStreamCreate
    api.cuStreamCreate = lambda flags: (made.append(flags), create(flags))[1]
    for _ in range(5):
        device.stream().synchronize()
        device.allocate(1)
    assert len(made) == 2, "a stream that nobody holds is used again, with the one beside it"
    api.cuStreamQuery = lambda stream: (api.CUresult.CUDA_ERROR_NOT_READY,)
    device.stream().synchronize()
    assert len(made) == 4, "but not while it has something to do"
    assert not gone
    device.close()
    assert gone.count("cuModuleUnload") == 3
    assert gone.count("cuMemPoolDestroy") == 1
    assert gone.count("cuStreamDestroy") == 3 + SPARES + len(made), (
        "two for uploads, the pool's, spares, those made since"
    )
    assert "cuEventDestroy" in gone


def test_devices_of_a_gpu_share_the_modules_of_the_kernels(opened):
    """Loading and unloading wait for held streams of other devices, so a second device does neither."""
    calls = []

    def noting(options, driver):
        for name in ("cuModuleLoadData", "cuModuleUnload"):
            call = getattr(driver.api, name)
            setattr(driver.api, name, lambda module, name=name, call=call: (calls.append(name), call(module))[1])
        return open_gpu(0, options, driver)

    first = opened(make=noting)
    assert calls == ["cuModuleLoadData"] * 3
    second = opened(make=noting)
    first.close()
    assert calls == ["cuModuleLoadData"] * 3
    second.close()
    assert calls[3:] == ["cuModuleUnload"] * 3


def test_a_gpu_whose_first_opening_failed_opens_the_next_time(opened, monkeypatch):
    def without_compiler(name, arch):
        raise Unavailable("no compiler", cure="install one")

    with monkeypatch.context() as broken:
        broken.setattr(launching, "cubin", without_compiler)
        with pytest.raises(Unavailable, match="no compiler"):
            opened()
    bound = opened()
    assert bound.device.kernels.write is not None
    bound.device.stream().synchronize()


@pytest.mark.parametrize(("nbytes", "calls"), [(1 << 16, ["copy"]), ((1 << 16) + 1, ["hal_copy_out"])])
def test_g03_one_call_writes_a_value_whether_or_not_it_fits_the_ring(opened, nbytes, calls):
    """If it were written in pieces, a ring that remains full could refuse the rest after its beginning was written."""
    device = opened({"ring_start": 4096, "ring_limit": 1 << 16}).device
    memory, value = device.allocate(nbytes), np.arange(nbytes, dtype=np.uint8)
    api, target = device.driver.api, View.contiguous(memory, 0, (nbytes,), dtype_of("uint8"))
    api.calls.clear()
    device.async_set_value(device, target, value, device.default_stream)
    made = [call for call in api.calls if call in ("copy", "hal_copy_out")]
    assert made == calls or (made[-1:] == calls and len(made) > 2), "pieces go to separate memory first"
    got = device.copy_out(memory, [ByteRange(0, nbytes)], device.default_stream)
    got.wait()
    assert (got.data[0] == value).all()
