"""Copies out over the stand-in driver: the method of each, their order, and complete bytes."""

import ctypes

import numpy as np
import pytest
from hal_core import StateConfig
from hal_core.errors import InvalidValue
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, View
from hal_cuda import copies
from hal_cuda.copies import BY_KERNEL
from hal_cuda.driver import CudaError

LONG = 3 * BY_KERNEL


def filled(bound, nbytes):
    """Return memory with distinct bytes, and these bytes."""
    memory, data = bound.device.allocate(nbytes), np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    target = View.contiguous(memory, 0, (nbytes,), dtype_of("uint8"))
    bound.async_set_value(target=target, value=data, stream=bound.default_stream).wait(30)
    return memory, data


@pytest.mark.parametrize("threads", [1, 5, 64])
def test_g22_the_kernel_writes_the_bytes_and_no_others(opened, threads):
    """Begins and lengths of every alignment, any number of threads a block; the block behind is unchanged."""
    bound = opened()
    memory, data = filled(bound, LONG)
    bound.device.driver.api.library.stand_in_threads(threads)
    try:
        for begin, nbytes in [(b, n) for b in (0, 1, 4, 8, 48) for n in (1, 7, 16, 24, 4093, 9000)] + [(16, BY_KERNEL)]:
            bound.device.driver.api.calls.clear()
            size = max(4096, 1 << (nbytes - 1).bit_length())
            before = bound.device.blocks.take(size)
            before.buffer[:] = 0x5A
            bound.device.blocks.give(before)
            copy = bound.device.copy_out(memory, [ByteRange(begin, nbytes)], bound.default_stream)
            assert list(bound.device.driver.api.calls) == ["hal_copy_out"]
            copy.wait(30)
            assert copy._lease.block is before
            np.testing.assert_array_equal(copy.data[0], data[begin : begin + nbytes])
            assert (before.buffer[nbytes:] == 0x5A).all()
    finally:
        bound.device.driver.api.library.stand_in_threads(1)


@pytest.mark.parametrize("nbytes", [512, LONG])
def test_g01_g22_a_copy_is_of_its_own_time_whoever_writes_next(opened, nbytes):
    """A later write, on its own stream without a wait or on another with one, does not change the copy; the ticket is
    done when the copy is."""
    bound = opened()
    memory, data = filled(bound, nbytes)
    first, second, library = bound.device.stream(), bound.device.stream(), bound.device.driver.api.library
    target = View.contiguous(memory, 0, (nbytes,), dtype_of("uint8"))
    for stream in (first, second):
        held = first if nbytes <= BY_KERNEL else first.copy_stream
        library.stand_in_hold(held.handle, 1)
        copy = bound.device.copy_out(memory, [ByteRange(0, nbytes)], first)
        bound.device.driver.api.calls.clear()
        written = bound.async_set_value(target=target, value=0, stream=stream)
        waits = [call for call in bound.device.driver.api.calls if call.startswith("stream")]
        assert waits == [] if held is stream else waits == [f"stream {stream.handle} waits"]
        assert not copy.done()
        assert bytes((ctypes.c_char * nbytes).from_address(memory.address)) == data.tobytes(), "written under the copy"
        library.stand_in_hold(held.handle, 0)
        for ticket in (copy, written):
            assert ticket.wait(30) is None
        np.testing.assert_array_equal(copy.data[0], data)
        bound.async_set_value(target=target, value=data, stream=stream).wait(30)


def test_a_block_is_used_again_only_behind_its_copy(opened):
    """If a ticket is dropped at once, its block is reserved until the copy is done."""
    bound = opened()
    memory, data = filled(bound, 4096)
    stream, library = bound.device.stream(), bound.device.driver.api.library
    library.stand_in_hold(stream.handle, 1)
    blocks = [
        bound.device.copy_out(memory, [ByteRange(0, 4096)], stream)._lease.block,
        (second := bound.device.copy_out(memory, [ByteRange(0, 4096)], stream))._lease.block,
    ]
    assert blocks[0] is not blocks[1]
    library.stand_in_hold(stream.handle, 0)
    second.wait(30)
    third = bound.device.copy_out(memory, [ByteRange(0, 4096)], stream)
    assert third._lease.block is blocks[0]
    np.testing.assert_array_equal(second.data[0], data)


@pytest.mark.parametrize("nbytes", [512, LONG])
def test_a_captured_stream_is_refused_and_nothing_is_left_of_the_copy(opened, nbytes):
    bound = opened()
    memory, data = filled(bound, nbytes)
    stream, library = bound.device.stream(), bound.device.driver.api.library
    mark = stream.record()
    last = dict(bound.device.last)
    library.stand_in_capture(stream.handle, 1)
    with pytest.raises(InvalidValue, match="is being captured"):
        bound.copy_out(memory=memory, parts=[ByteRange(0, nbytes)], stream=stream)
    assert library.stand_in_count(5) == 0, "something went into the graph"
    assert library.stand_in_count(4) == 0, "the capture was spoilt"
    library.stand_in_capture(stream.handle, 0)
    mark.wait(30)
    assert bound.device.last.get(stream.stream_key) is last.get(stream.stream_key), "no event of what was not done"
    assert all(event.done() for event in bound.device.reads.under_way.values())
    copy = bound.copy_out(memory=memory, parts=[ByteRange(0, nbytes)], stream=stream)
    copy.wait(30)
    np.testing.assert_array_equal(copy.data[0], data)


def test_a_failed_launch_is_named_and_its_block_kept_until_work_ends(opened):
    bound = opened()
    memory, data = filled(bound, 512)
    api, stream = bound.device.driver.api, bound.device.stream()
    api.fail = "hal_copy_out"
    api.library.stand_in_hold(stream.handle, 1)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        bound.copy_out(memory=memory, parts=[ByteRange(0, 512)], stream=stream)
    api.fail = ""
    assert [event.done() for event in bound.device.reads.under_way.values()] == [False]
    api.library.stand_in_hold(stream.handle, 0)
    copy = bound.copy_out(memory=memory, parts=[ByteRange(0, 512)], stream=stream)
    copy.wait(30)
    np.testing.assert_array_equal(copy.data[0], data)


def test_nothing_to_copy_is_no_launch(opened):
    bound = opened()
    memory, _ = filled(bound, 64)
    bound.device.driver.api.calls.clear()
    copy = bound.copy_out(memory=memory, parts=[ByteRange(8, 0)], stream=bound.default_stream)
    copy.wait(30)
    assert (copy.data[0].tolist(), list(bound.device.driver.api.calls)) == ([], [])


def test_an_output_of_many_slots_is_short_enough_and_a_state_is_not(opened):
    bound = opened()
    state = bound.state(StateConfig(num_slots=256, max_model_len=512, max_draft_tokens=5))
    part, calls = state.output_range(topk=False), bound.device.driver.api.calls
    for one, way in ((part, ["hal_copy_out"]), (ByteRange(0, state.layout.nbytes), [])):
        calls.clear()
        bound.copy_out(memory=state.memory, parts=[one], stream=bound.default_stream).wait(30)
        assert [call for call in calls if not call.startswith("stream")] == way


def test_where_the_limit_is_chosen(opened, monkeypatch):
    """The bytes are the same by both methods."""
    bound = opened()
    memory, data = filled(bound, 512)
    for limit, way in ((512, ["hal_copy_out"]), (511, [])):
        monkeypatch.setattr(copies, "BY_KERNEL", limit)
        bound.device.driver.api.calls.clear()
        copy = bound.copy_out(memory=memory, parts=[ByteRange(0, 512)], stream=bound.default_stream)
        copy.wait(30)
        assert [call for call in bound.device.driver.api.calls if not call.startswith("stream")] == way
        np.testing.assert_array_equal(copy.data[0], data)


def test_a_held_stream_keeps_its_reads_and_no_others(opened):
    bound = opened()
    library = bound.device.driver.api.library
    memory, reads = bound.device.allocate(1 << 16), bound.device.reads
    held, other = bound.device.stream(), bound.device.stream()
    library.stand_in_hold(held.handle, 1)
    for at in range(100):
        bound.copy_out(memory=memory, parts=[ByteRange(at * 64, 64)], stream=held)
    for at in range(1000):
        bound.copy_out(memory=memory, parts=[ByteRange(at * 64, 64)], stream=other)
    assert 100 <= len(reads.under_way) <= 200
    library.stand_in_hold(held.handle, 0)


def test_g01_a_copy_of_a_thousand_ranges_waits_for_no_held_stream(opened):
    """A launch queue holds 1,021 calls. Copies that have passed on that stream do not count."""
    bound = opened({"deadline": 0.05})
    stream, library = bound.device.stream(), bound.device.driver.api.library
    memory, data = filled(bound, 1 << 16)
    few = [ByteRange(0, 8), ByteRange(64, 8)]
    for _ in range(30):
        bound.copy_out(memory=memory, parts=few, stream=stream).wait(10)
    library.stand_in_work_limit(1021)
    library.stand_in_hold(stream.handle, 1)
    try:
        copied = bound.copy_out(memory=memory, parts=[ByteRange(8 * at, 8) for at in range(1000)], stream=stream)
        assert not copied.done()
    finally:
        library.stand_in_hold(stream.handle, 0)
    copied.wait(10)
    assert (np.concatenate(copied.data) == data[:8000]).all()
