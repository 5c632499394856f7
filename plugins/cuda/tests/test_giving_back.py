"""Resources released without a close, and memory that copies out keep while idle."""

import gc

from hal_core import ByteRange
from hal_core.devices import blocks
from hal_cuda import memory as gpu_memory


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


def test_a_driver_without_a_pool_on_the_host_has_none(opened):
    context = opened().device.context
    assert context.make_host_pool() is None
