"""Resources released without a close, and memory that copies out keep while idle."""

from __future__ import annotations

import gc
from collections import deque

import numpy as np
import pytest
from hal_core import ByteRange, StateConfig
from hal_core.devices import blocks, stream_device
from hal_cuda import memory as gpu_memory
from hal_cuda.driver import Driver
from hal_cuda.native_device import open_gpu

SIZES = StateConfig(num_slots=4, max_model_len=64)


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """Leave out devices that other tests dropped with work that never ends."""
    monkeypatch.setattr(stream_device, "_dropped", deque())


def another(bound):
    """Open a device over the same driver, to which the fixture keeps no reference."""
    driver = bound.device.driver
    return open_gpu(0, {"stream": 1}, Driver(driver.api, driver.native.module, driver.api.library))


def used(device):
    state_memory = device.allocate(1 << 16)
    data = np.ones(1 << 16, np.uint8)
    device.upload(state_memory.address, data, device.default_stream).wait(10)
    device.copy_out(state_memory, [ByteRange(0, 64)], device.default_stream).wait(10)


def test_a_device_that_is_dropped_without_a_close_gives_its_memory_back(opened):
    bound = opened()
    library = bound.device.driver.api.library
    before = library.stand_in_count(0)
    for _ in range(3):
        device = another(bound)
        used(device)
        del device
        gc.collect()
    pinned = bound.device._runtime._memory
    assert not stream_device._dropped
    idle, events = sum(map(len, pinned._idle.values())), 3
    assert library.stand_in_count(0) - before <= idle + events, "what is idle is used again"
    assert sum(map(len, pinned._idle.values())) <= 8


def test_a_dropped_device_is_kept_until_its_work_is_done(opened):
    bound = opened()
    library = bound.device.driver.api.library
    device = another(bound)
    used(device)
    stream = device.stream()
    handle = stream.handle
    library.stand_in_hold(handle, 1)
    memory = device.allocate(64)
    device.upload(memory.address, np.ones(64, np.uint8), stream)
    del device, stream, memory
    gc.collect()
    assert len(stream_device._dropped) == 1
    library.stand_in_hold(handle, 0)
    stream_device.give_back_dropped()
    assert not stream_device._dropped


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
