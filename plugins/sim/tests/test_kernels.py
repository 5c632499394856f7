"""The kernels of the hooks against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_sim import FIELD, WRITE, Accelerator, DeviceFault, Mode, Spread, options
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import share

STATE = 256


def staging(entries: list[tuple[int, bytes | int, int, int]]) -> np.ndarray:
    """A staging block: the table of writes, then the payload."""
    table = np.zeros(len(entries), WRITE)
    payload = b""
    for i, (target, source, nbytes, fill) in enumerate(entries):
        if fill:
            table[i] = (target, source, nbytes, fill)
        else:
            table[i] = (target, table.nbytes + len(payload), nbytes, 0)
            payload += source
    return np.frombuffer(table.tobytes() + payload, np.uint8)


def apply(state: bytearray, entries: list[tuple[int, bytes | int, int, int]]) -> None:
    for target, source, nbytes, fill in entries:
        data = source if not fill else (source.to_bytes(8, "little")[:fill] * nbytes)[:nbytes]
        state[target : target + nbytes] = data


@st.composite
def writes(draw: st.DrawFn) -> tuple[int, bytes | int, int, int]:
    nbytes = draw(st.integers(0, 24))
    target = draw(st.integers(0, STATE - nbytes))
    fill = draw(st.sampled_from([0, 1, 2, 4, 8]))
    source = draw(st.integers(0, 2**64 - 1) if fill else st.binary(min_size=nbytes, max_size=nbytes))
    return target, source, nbytes, fill


@settings(max_examples=share.of(60), deadline=None)
@given(st.lists(writes(), max_size=12), st.booleans())
def test_scatter_applies_a_plan_in_order(entries, from_pinned):
    with options(mode=Mode.WORKER):
        device = Accelerator(0)
        stream, state = device.stream(), device.allocate(STATE)
        block = staging(entries)
        before = bytes(range(256))
        device.poke(state, before)
        buffer = device.pinned(max(1, block.nbytes))
        buffer.array[: block.nbytes] = block
        where = device.allocate(max(1, block.nbytes))
        if not from_pinned:
            device.h2d(where, buffer.address, block.nbytes, stream)
        device.scatter(buffer.address if from_pinned else where, block.nbytes, len(entries), stream, base=state)
        stream.synchronize()
        expected = bytearray(before)
        apply(expected, entries)
        assert device.peek(state, STATE) == bytes(expected)
        assert device.races() == []
        device.free(state)
        device.free(where)
        buffer.close()
        stream.close()
        device.reset()


def test_one_upload_and_one_launch_whatever_the_plan(bench):
    stream, state = bench.stream(), bench.memory(STATE)
    entries = [(i, i, 1, 1) for i in range(100)]
    block = staging(entries)
    buffer, where = bench.pinned(block.nbytes), bench.memory(block.nbytes)
    buffer.array[:] = block
    before = bench.device.counters()
    bench.device.h2d(where, buffer.address, block.nbytes, stream)
    bench.device.scatter(where, block.nbytes, 100, stream, base=state)
    after = bench.device.counters()
    assert after["submissions"] - before["submissions"] == 2
    assert after["host_waits"] == before["host_waits"]
    stream.synchronize()
    assert bench.device.peek(state, 100) == bytes(range(100))


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ((STATE - 4, b"12345678", 8, 0), "reaches beyond the end of its block"),
        ((0, 1, 8, 3), "write 0 of the plan is malformed"),
    ],
)
def test_a_bad_plan_is_a_fault(lazy, entry, why):
    stream, state = lazy.stream(), lazy.memory(STATE)
    block = staging([entry])
    where = lazy.upload(block)
    lazy.device.scatter(where, block.nbytes, 1, stream, base=state)
    with pytest.raises(DeviceFault, match=why):
        stream.synchronize()
    with pytest.raises(InvalidValue, match="9 writes do not fit"):
        lazy.device.scatter(where, block.nbytes, 9, stream)


@settings(max_examples=share.of(40), deadline=None)
@given(st.data())
def test_spread_gives_each_slot_its_record(data):
    slots = 6
    widths = data.draw(st.lists(st.sampled_from([1, 4, 8, 12]), min_size=1, max_size=4), label="field widths")
    chosen = data.draw(st.lists(st.integers(0, slots - 1), max_size=5), label="slots")
    index = np.array(chosen, data.draw(st.sampled_from([np.int32, np.int64]), label="index type"))
    record_nbytes = sum(widths)
    rng = np.random.default_rng(len(chosen))
    records = rng.integers(0, 256, (len(chosen), record_nbytes), dtype=np.uint8)
    with options(mode=Mode.WORKER):
        device = Accelerator(0)
        stream = device.stream()
        state = device.allocate(slots * record_nbytes)
        expected = np.frombuffer(device.peek(state, slots * record_nbytes), np.uint8).copy()
        fields = np.zeros(len(widths), FIELD)
        base = offset = 0
        for f, width in enumerate(widths):
            fields[f] = (state + base, width, offset, width)
            view = expected[base : base + slots * width].reshape(slots, width)
            for i, slot in enumerate(chosen):
                view[slot] = records[i, offset : offset + width]
            base, offset = base + slots * width, offset + width
        inputs = [device.allocate(max(1, a.nbytes)) for a in (records, index, fields)]
        for address, array in zip(inputs, (records, index, fields), strict=True):
            device.poke(address, array.tobytes())
        spread = Spread(
            records=inputs[0], record_nbytes=record_nbytes, count=len(chosen), slots=inputs[1],
            slot_nbytes=index.itemsize, fields=inputs[2], field_count=len(widths), slot_limit=slots,
        )  # fmt: skip
        device.spread(spread, stream)
        stream.synchronize()
        assert device.peek(state, expected.nbytes) == expected.tobytes()
        for address in (state, *inputs):
            device.free(address)
        stream.close()
        device.reset()


@pytest.mark.parametrize("slot", [3, -1])
def test_spread_refuses_a_slot_that_does_not_exist(lazy, slot):
    stream, state = lazy.stream(), lazy.memory(24)
    records, index = lazy.upload(np.zeros((1, 8), np.uint8)), lazy.upload(np.array([slot], np.int32))
    fields = lazy.upload(np.array([(state, 8, 0, 8)], FIELD))
    spread = Spread(records=records, record_nbytes=8, count=1, slots=index, fields=fields, field_count=1, slot_limit=3)
    lazy.device.spread(spread, stream)
    with pytest.raises(DeviceFault, match="slot of record 0 does not exist"):
        stream.synchronize()
    assert set(lazy.device.peek(state, 24)) == {0xCB}


@pytest.mark.parametrize(
    ("to", "source"),
    [
        pytest.param(np.s_[1:3, 2:5], np.s_[0:2, 0:3], id="rectangle"),
        pytest.param(np.s_[::2, ::-1], np.s_[1:4, :], id="reversed"),
        pytest.param(np.s_[:, :], np.s_[:, :], id="whole"),
        pytest.param(np.s_[2, 1:4], np.s_[0:3, 1], id="column to row"),
        pytest.param(np.s_[0:0, :], np.s_[0:0, :], id="empty"),
    ],
)
def test_strided_copies_touch_nothing_else(lazy, to, source):
    a = np.arange(30, dtype=np.int32).reshape(5, 6)
    b = a + 100
    src, dst, stream = lazy.upload(b), lazy.upload(a), lazy.stream()
    view, read = a[to], b[source]
    lazy.device.strided(
        dst=dst + view.ctypes.data - a.ctypes.data, src=src + read.ctypes.data - b.ctypes.data, shape=view.shape,
        dst_strides=view.strides, src_strides=read.strides, item_nbytes=4, stream=stream,
    )  # fmt: skip
    stream.synchronize()
    expected = a.copy()
    expected[to] = read
    np.testing.assert_array_equal(lazy.download(dst, a), expected)


def test_a_whole_plan_is_one_launch_records_first(bench):
    """Offsets instead of addresses, as plans have them: everything is relative to the state and to the payload."""
    state, stream = bench.memory(64), bench.stream()
    records = np.array([[1, 2], [3, 4]], np.int64)
    slots = np.array([2, 0], np.int32)
    table = np.array([(16, 0, 8, 0), (40, 9, 8, 8)], WRITE)  # slot 2 of the first field again, slot 1 of the second
    payload = np.array([77], np.int64)
    parts = [records, slots, table, payload]
    starts = np.cumsum([0] + [part.nbytes for part in parts])
    block = bench.upload(np.frombuffer(b"".join(part.tobytes() for part in parts), np.uint8))
    fields = bench.upload(np.array([(0, 8, 0, 8), (32, 8, 8, 8)], FIELD))
    spread = Spread(
        records=block, record_nbytes=16, count=2, slots=block + int(starts[1]), fields=fields, field_count=2,
        slot_limit=4, base=state,
    )  # fmt: skip
    before = bench.device.counters()["submissions"]
    bench.device.poke(state, bytes(64))
    bench.device.plan(
        spread, block, int(starts[-1]), 2, stream, table=int(starts[2]), base=state, payload=int(starts[3])
    )
    stream.synchronize()
    assert bench.device.counters()["submissions"] - before == 1
    got = np.frombuffer(bench.device.peek(state, 64), np.int64).tolist()
    assert got == [3, 0, 77, 0, 4, 9, 2, 0]
    assert bench.device.races() == []
