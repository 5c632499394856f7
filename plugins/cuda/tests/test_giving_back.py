"""Resources released without a close, and memory that copies out keep while idle."""

import gc

import pytest
from hal_core import ByteRange, GroupLost, OutOfMemory
from hal_core.devices import blocks
from hal_cuda import memory as gpu_memory
from hal_cuda import nccl

from .conftest import stand_in

CUresult = stand_in().CUresult


def test_what_a_burst_of_copies_out_took_is_given_back(opened, monkeypatch):
    monkeypatch.setattr(blocks, "KEPT_BYTES", 1 << 20)
    monkeypatch.setattr(gpu_memory, "LARGE", 1 << 19)
    bound = opened()
    found, pinned = bound.device._runtime._memory, bound.device.blocks
    monkeypatch.setattr(found, "_host_pool", 6)  # as with a driver that has one
    memory = bound.device.allocate(1 << 19)
    copies = [
        bound.copy_out(memory=memory, parts=[ByteRange(0, 1 << 19)], stream=bound.default_stream) for _ in range(8)
    ]
    for copied in copies:
        copied.wait(10)
    assert len(found._pooled) == 8
    del copied, copies
    gc.collect()
    bound.copy_out(memory=memory, parts=[ByteRange(0, 64)], stream=bound.default_stream).wait(10)
    assert pinned.kept <= 1 << 20
    assert len(found._pooled) <= 2


def test_a_block_of_a_new_size_that_comes_back_while_the_last_device_is_closed(opened, monkeypatch):
    """Another thread opens a device while the driver frees a block."""
    bound = opened()
    runtime, api = bound.device._runtime, bound.device.driver.api
    found, free = runtime._memory, api.cuMemFreeHost
    runtime.free_host(runtime.allocate_host(4096))
    others = [runtime.allocate_host(12345)]

    def freeing(address):
        if others and not found._devices:
            found._idle.setdefault(12345, []).append(others.pop())
        return free(address)

    monkeypatch.setattr(api, "cuMemFreeHost", freeing)
    bound.close()
    assert not found._locked
    assert found._context is None


@pytest.mark.parametrize("fails", ["code", "pinned memory"])
def test_an_opening_that_fails_keeps_no_context(opened, monkeypatch, fails):
    held, library = [], stand_in().Library
    retain, release = library.cuDevicePrimaryCtxRetain, (CUresult.CUDA_SUCCESS,)
    monkeypatch.setattr(library, "cuDevicePrimaryCtxRetain", lambda self, of: (held.append(of), retain(self, of))[1])
    monkeypatch.setattr(
        library, "cuDevicePrimaryCtxRelease", lambda self, of: held.remove(of) or release, raising=False
    )
    refused = CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
    with monkeypatch.context() as patch:
        name = "cuModuleLoadData" if fails == "code" else "cuMemHostAlloc"
        patch.setattr(library, name, lambda *_: refused)
        with pytest.raises(OutOfMemory, match=name):
            opened()
        assert not held
    opened().close()
    assert not held


def test_a_driver_without_a_pool_on_the_host_has_none(opened):
    context = opened().device.context
    assert context.make_host_pool() is None


def test_a_hold_whose_launch_fails_gives_its_block_back(opened, monkeypatch):
    device = opened().device
    stream = device.default_stream

    def hold():
        with device.hold_stream(stream):
            pass
        stream.synchronize(10)

    def refused(*_):
        raise OutOfMemory("on purpose")

    hold()
    blocks = len(device._runtime._memory._locked)
    with monkeypatch.context() as patch:
        patch.setattr(device.kernels.hold, "launch", refused)
        for _ in range(20):
            with pytest.raises(OutOfMemory):
                hold()
    hold()
    assert len(device._runtime._memory._locked) == blocks


@pytest.mark.parametrize("what", ["ncclCommInitRankConfig", "ncclBroadcast"])
def test_a_group_that_cannot_be_opened_keeps_no_memory(opened, library, what):
    bound = opened()
    found = bound.device._runtime._memory
    library.nccl_fail(1)
    ids = [nccl.library().new_id() if what == "ncclBroadcast" else bytes(128)]
    ranks = (0, 1) if what == "ncclCommInitRankConfig" else (0,)
    with pytest.raises(GroupLost, match=what):
        bound.device.make_group(ranks, 0, lambda data: ids[0], 5.0)
    library.nccl_fail(0)
    gc.collect()
    bound.close()
    assert not found._out
    assert found._context is None
