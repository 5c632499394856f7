"""Asynchronous copies: when host memory is read and written."""

import ctypes

import numpy as np
import pytest
from hal_conformance.test_memory import heap
from hal_sim import PENDING_POISON, label, options


def test_there_and_back(bench):
    stream, address = bench.stream(), bench.memory(4096)
    source = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    back = np.zeros_like(source)
    bench.device.h2d(address, source.ctypes.data, 4096, stream)
    bench.device.d2h(back.ctypes.data, address, 4096, stream)
    stream.synchronize()
    np.testing.assert_array_equal(back, source)
    assert bench.device.races() == []


@pytest.mark.parametrize(("staged", "seen"), [(0, 9), (1, 1)], ids=["read when it runs", "read at the call"])
def test_pageable_memory(lazy, staged, seen):
    stream, address, source = lazy.stream(), lazy.memory(8), np.full(8, 1, np.uint8)
    with options(staged=staged):
        lazy.device.h2d(address, source.ctypes.data, 8, stream)
        lazy.device.host_write(source.ctypes.data, 8)
        source[:] = 9
        stream.synchronize()
    assert lazy.device.peek(address, 8) == bytes([seen]) * 8
    assert [r.kind for r in lazy.device.races()] == ([] if staged else ["race"])


def test_pinned_memory_is_read_when_the_copy_runs(lazy):
    stream, address, source = lazy.stream(), lazy.memory(8), lazy.pinned(8)
    source.array[:] = 1
    lazy.device.h2d(address, source.address, 8, stream)
    source.array[:] = 9
    stream.synchronize()
    assert lazy.device.peek(address, 8) == bytes([9]) * 8


def test_a_copy_to_pageable_memory_waits_when_it_is_staged_both_ways(lazy):
    stream, address, back = lazy.stream(), lazy.memory(8), np.zeros(8, np.uint8)
    lazy.device.fill(address, 8, 4, 1, stream)
    with options(staged=2):
        lazy.device.d2h(back.ctypes.data, address, 8, stream)
    assert set(back) == {4}


def test_the_target_shows_poison_until_the_copy_ran(bench):
    stream, address, out = bench.stream(), bench.memory(8), bench.pinned(8)
    bench.device.fill(address, 8, 4, 1, stream)
    with stream.held():
        bench.device.d2h(out.address, address, 8, stream)
        assert set(out.array) == {PENDING_POISON}
    stream.synchronize()
    assert set(out.array) == {4}


def test_poison_spares_bytes_that_pending_work_still_needs(lazy):
    stream, first, second, buffer = lazy.stream(), lazy.memory(8), lazy.memory(8), lazy.pinned(8)
    lazy.device.fill(second, 8, 2, 1, stream)
    buffer.array[:] = 1
    lazy.device.h2d(first, buffer.address, 8, stream)
    lazy.device.d2h(buffer.address, second, 8, stream)
    stream.synchronize()
    assert lazy.device.peek(first, 8) == bytes([1]) * 8
    assert set(buffer.array) == {2}
    assert lazy.device.races() == []


def test_copies_of_the_host_itself(bench):
    address, data, back = bench.memory(8), np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    bench.device.h2d_now(address, data.ctypes.data, 8)
    bench.device.d2h_now(back.ctypes.data, address, 8)
    np.testing.assert_array_equal(back, data)
    assert bench.device.counters()["submissions"] == 0
    assert bench.device.races() == []


def test_every_operation_is_traced_and_counted(bench):
    stream, address, buffer = bench.stream(), bench.memory(8), bench.pinned(8)
    start = bench.device.trace()[-1].sequence
    with label("upload"):
        bench.device.h2d(address, buffer.address, 8, stream)
    bench.device.fill(address, 8, 1, 1, stream)
    stream.synchronize()
    copy, fill, wait = bench.device.trace(after=start)
    assert (copy.kind, copy.dst, copy.src, copy.nbytes, copy.label) == (
        "async_h2d",
        address,
        buffer.address,
        8,
        "upload",
    )
    assert (fill.kind, fill.label, fill.stream) == ("kernel_fill", "", stream.number)
    assert 0 < copy.ran < fill.ran
    assert wait.kind == "wait_stream"
    counters = bench.device.counters()
    assert {k: counters[k] for k in ("async_h2d", "submissions", "copies", "launches", "host_waits")} == {
        "async_h2d": 1,
        "submissions": 2,
        "copies": 1,
        "launches": 1,
        "host_waits": 1,
    }


def test_the_trace_is_bounded_and_says_what_it_dropped(lazy):
    lazy.device.reset()
    with options(trace_capacity=4):
        for _ in range(10):
            lazy.device.synchronize()
    assert len(lazy.device.trace()) == 4
    assert lazy.device.dropped == (6, 0)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library does not tell its heap")
def test_the_trace_takes_its_memory_once_and_not_while_it_fills(lazy):
    lazy.device.synchronize()
    lazy.device.reset()
    before = heap()
    for _ in range(10_000):
        lazy.device.synchronize()
    assert heap() - before < 10_000 * 10  # a record has a hundred bytes; other threads of the process allocate too
    assert len(lazy.device.trace()) == 10_000
