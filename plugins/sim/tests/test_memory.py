"""Device memory: untouchable, poisoned, limited; pinned memory; lifetimes."""

import signal
import subprocess
import sys

import numpy as np
import pytest
from hal_core.errors import InvalidValue, OutOfMemory
from hal_sim import FREED_POISON, FRESH_POISON, Accelerator, DeviceFault, options


def test_the_host_cannot_touch_device_memory():
    code = (
        "import ctypes\nfrom hal_sim import Accelerator\n"
        "address = Accelerator(0).allocate(64)\nprint('ready', flush=True)\nctypes.string_at(address, 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "ready"
    assert done.returncode == -signal.SIGSEGV


def test_fresh_memory_shows_poison(lazy):
    assert lazy.device.peek(lazy.memory(64), 64) == bytes([FRESH_POISON]) * 64
    assert set(lazy.pinned(64).array) == {FRESH_POISON}


def test_freed_pinned_memory_shows_poison(lazy):
    buffer = lazy.pinned(64)
    stale = buffer.array
    stale[:] = 7
    buffer.close()
    assert set(stale) == {FREED_POISON}


def test_memory_of_a_device_is_limited_and_comes_back(lazy):
    with options(memory_mb=1, devices=8):
        bench = type(lazy)(Accelerator(7))  # of which no other test of the process can hold memory
        address = bench.memory(1 << 20)
        with pytest.raises(OutOfMemory, match="has 0 of 1048576 bytes free, 1 were asked for"):
            bench.memory(1)
        bench.device.free(address)
        bench.memory(1 << 20)


def test_a_limit_below_what_is_in_use_leaves_nothing_free(lazy):
    lazy.memory(3 << 20)
    with options(memory_mb=1), pytest.raises(OutOfMemory, match="has 0 of 1048576 bytes free"):
        lazy.memory(1)


def test_the_nth_allocation_fails_once(lazy):
    with options(fail_allocation=2):
        lazy.memory()
        with pytest.raises(OutOfMemory, match="on purpose"):
            lazy.pinned()
        lazy.memory()


def test_devices_are_separate(lazy):
    other = Accelerator(1)
    mine, theirs = lazy.memory(64), other.allocate(64)
    stream = lazy.stream()
    lazy.device.fill(theirs, 64, 1, 1, stream)
    with pytest.raises(DeviceFault, match="belongs to another device"):
        stream.synchronize()
    lazy.device.d2d(mine, theirs, 64, stream, src_device=1)
    stream.synchronize()
    assert lazy.device.peek(mine, 64) == other.peek(theirs, 64)
    with pytest.raises(InvalidValue, match="no block of this device"):
        lazy.device.free(theirs)
    other.free(theirs)
    with pytest.raises(InvalidValue, match="device 7 does not exist, there are 2"):
        Accelerator(7)


def test_a_second_free_is_refused(lazy):
    address = lazy.memory()
    lazy.device.free(address)
    with pytest.raises(InvalidValue, match="freed already"):
        lazy.device.free(address)


def test_freeing_memory_in_use_is_reported_and_its_work_has_no_effect(lazy):
    stream, address, neighbour = lazy.stream(), lazy.memory(), lazy.memory()
    lazy.device.fill(address, 64, 1, 1, stream)
    lazy.device.free(address)
    with pytest.raises(DeviceFault, match="was freed before the operation ran"):
        stream.synchronize()
    pending, late = lazy.device.races()
    assert (pending.kind, pending.first.kind, pending.second.kind) == ("lifetime", "kernel_fill", "free")
    assert "must wait for kernel_fill" in pending.missing_edge
    assert (late.kind, late.second) == ("lifetime", None)
    assert lazy.device.peek(neighbour, 64) == bytes([FRESH_POISON]) * 64


def test_freeing_pinned_memory_without_a_wait_is_reported_after_its_copy(bench):
    stream, address, buffer = bench.stream(), bench.memory(), bench.pinned()
    bench.device.h2d(address, buffer.address, 64, stream)
    buffer.close()  # in eager mode the copy is over, and only luck made it so
    stream._native.stream_wait(stream.handle, -1)
    assert {r.kind for r in bench.device.races()} == {"lifetime"}


def test_freeing_after_the_wait_is_fine(bench):
    stream, address, buffer = bench.stream(), bench.memory(), bench.pinned()
    bench.device.h2d(address, buffer.address, 64, stream)
    stream.synchronize()
    buffer.close()
    bench.device.free(address)
    assert bench.device.races() == []


def test_an_operation_never_reaches_a_block_that_was_made_after_it(lazy):
    mega, stream = 1 << 20, lazy.stream()
    with options(poison=0):  # these are large, and only their addresses matter
        old = lazy.device.allocate(64 * mega)
        targets = range(old, old + 64 * mega, 256 << 10)
        for target in targets:
            lazy.device.fill(target, 8, 1, 1, stream)
        lazy.device.free(old)
        for _ in range(600):  # so many that the old block's addresses are given out again
            lazy.device.free(lazy.device.allocate(64))
        fresh = [lazy.memory(mega) for _ in range(100)]
    reused = [t for t in targets if any(f <= t < f + mega for f in fresh)]
    if not reused:
        pytest.skip("the kernel gave none of the old addresses out again")
    lazy.device._native.stream_wait(stream.handle, -1)
    assert {lazy.device.peek(t, 8) for t in reused} == {bytes(8)}
    assert any("given to a new block" in r.what for r in lazy.device.races())


@pytest.mark.parametrize(("offset", "nbytes", "why"), [(60, 8, "beyond the end"), (1 << 30, 1, "not in a live")])
def test_an_access_outside_its_block_is_a_fault(lazy, offset, nbytes, why):
    stream, address = lazy.stream(), lazy.memory(64)
    target = address + offset
    lazy.device.fill(target, nbytes, 1, 1, stream)
    with pytest.raises(DeviceFault, match=why):
        stream.synchronize()
    stream.synchronize()  # reported once, and the device still works
    assert lazy.device.counters()["fault"] == 1


def test_a_host_address_is_no_device_address(lazy):
    stream, host = lazy.stream(), np.zeros(64, np.uint8)
    lazy.device.d2d(lazy.memory(), host.ctypes.data, 64, stream)
    with pytest.raises(DeviceFault, match="source is not in a live device block"):
        stream.synchronize()
    lazy.device.d2h(lazy.memory(), lazy.memory(), 64, stream)
    with pytest.raises(DeviceFault, match="a device address where a host one belongs"):
        stream.synchronize()
