"""The method by which a value is written, over the stand-in driver."""

import ctypes

import numpy as np
import pytest
from hal_core import Group, StateConfig
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, View
from hal_core.ranks.channel import BroadcastChannel

from .states import Alone

SIZES = StateConfig(num_slots=4, max_model_len=32)


def written(bound, target, value, before):
    """Return the bytes of ``target``'s memory after one call, and the names of the calls that put work on a stream."""
    device, stream = bound.device, bound.default_stream
    raw = View.contiguous(target.memory, 0, (target.memory.nbytes,), dtype_of("uint8"))
    bound.async_set_value(target=raw, value=before.view(np.uint8).reshape(-1), stream=stream)
    device.driver.api.calls.clear()
    bound.async_set_value(target=target, value=value, stream=stream).wait()
    calls = [call for call in device.driver.api.calls if not call.startswith("stream")]
    return device.copy_out(target.memory, [ByteRange(0, target.memory.nbytes)], stream).data[0], calls


@pytest.mark.parametrize(
    ("dtype", "value", "way"),
    [
        ("float32", 0.7, "memset"),
        ("int32", -5, "memset"),
        ("int64", 0, "memset"),
        ("int64", -1, "memset"),
        ("int64", 7, "hal_fill"),
        ("int16", 9, "hal_fill"),
        ("bool", True, "hal_fill"),
    ],
)
def test_g05_an_element_of_one_word_goes_by_the_drivers_own_kernel(opened, dtype, value, way):
    bound, kind = opened(), dtype_of(dtype)
    before = np.arange(64 // kind.itemsize).astype(kind.storage)
    target = View.contiguous(bound.device.allocate(64), 0, (len(before),), kind)[3]
    should = before.copy()
    should[3] = value
    got, calls = written(bound, target, value, before)
    assert got.tobytes() == should.tobytes()
    assert calls == [way]


@pytest.mark.parametrize("path", ["opened", "fallback"])
def test_g05_a_value_of_the_same_memory_may_overlap_its_target(request, path):
    """The kernel's threads run in any order: without separate memory some would read bytes already overwritten."""
    bound = request.getfixturevalue(path)()
    before = np.arange(600).astype(np.int64)
    view = View.contiguous(bound.device.allocate(before.nbytes), 0, (60, 10), dtype_of("int64"))
    for to, source in ((slice(0, 20), slice(10, 30)), (slice(10, 30), slice(0, 20))):
        should = before.copy().reshape(60, 10)
        should[to] = should[source].copy()
        got, calls = written(bound, view[to], view[source], before)
        assert got.tobytes() == should.tobytes()
        assert calls == ["hal_copy_strided", "hal_copy_strided"]
    _, calls = written(bound, view[0:20], view[20:40], before)
    assert calls == ["hal_copy_strided"], "what does not overlap goes at once"


def test_g14_a_broadcasts_header_is_one_launch(opened):
    """The source's part of a broadcast besides the collective; each copied header belongs to its own broadcast."""
    bound = opened()
    state, stream, calls = bound.state(SIZES), bound.default_stream, bound.device.driver.api.calls
    channel = BroadcastChannel(bound.device, state, Group((0, 1), 0), Alone())
    part = state.broadcast_range()
    headers = []
    for _ in range(2):
        calls.clear()
        channel.begin(stream)
        copy = bound.device.copy_out(state.memory, [ByteRange(part.offset, 64)], stream)
        assert list(calls) == ["hal_small", "hal_copy_out"], "in the order of their stream, which waits for none"
        headers.append((copy, channel.expected))
    for copy, expected in headers:
        copy.wait()
        assert copy.data[0].tobytes() == expected


def test_g14_a_broadcasts_header_is_written_in_the_order_of_its_stream(opened):
    """With held streams: after the stream's own work, and after a copy out that still reads the former header."""
    bound = opened()
    state, stream, library = bound.state(SIZES), bound.device.stream(), bound.device.driver.api.library
    channel = BroadcastChannel(bound.device, state, Group((0, 1), 0), Alone())
    part = ByteRange(state.broadcast_range().offset, 64)

    def header():
        """Return the state's current bytes, read beside all streams."""
        return bytes((ctypes.c_char * 64).from_address(state.memory.address + part.offset))

    channel.begin(stream)
    stream.synchronize(30)
    assert header() == (first := channel.expected)
    library.stand_in_hold(stream.handle, 1)
    bound.async_set_value(target=state.view("sampled_token_ids"), value=5, stream=stream)
    channel.begin(stream)
    assert header() == first, "the stream is held"
    library.stand_in_hold(stream.handle, 0)
    stream.synchronize(30)
    assert header() == (second := channel.expected) != first
    other = bound.device.stream()
    library.stand_in_hold(other.handle, 1)
    copy = bound.device.copy_out(state.memory, [part], other)
    channel.begin(stream)
    assert header() == second, "a copy out has yet to read it"
    library.stand_in_hold(other.handle, 0)
    copy.wait(30)
    stream.synchronize(30)
    assert copy.data[0].tobytes() == second
    assert header() == channel.expected != second
