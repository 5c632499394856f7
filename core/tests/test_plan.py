"""Write plans against a dict of bytes: last write wins, outside bytes are unchanged, records are spread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hal_core import StateConfig
from hal_core.devices.cpu import CpuPlugin
from hal_core.devices.cpu.device import CpuDevice
from hal_core.devices.cpu.memory import FILL_BYTES, HostMemory
from hal_core.errors import InvalidValue
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.plan import SCATTER_MAP, WRITE, PlanBuilder, Records, WritePlan, apply_to_host
from hal_core.memory.views import View
from hal_core.runtime.bound import bind
from hypothesis import given
from hypothesis import strategies as st

SIZE = 96


@dataclass
class Block:
    """A stand-in for device memory; plans use only its size."""

    nbytes: int = SIZE
    address: int = 0
    device: object = None


PATTERNS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@st.composite
def writes(draw):
    """One write: ``(offset, bytes)`` to copy, or ``(offset, element, count)`` to fill."""
    if draw(st.booleans(), label="fill"):
        size = draw(st.sampled_from([1, 2, 4, 8]), label="element size")
        count = draw(st.integers(0, SIZE // size), label="count")
        value = draw(st.integers(0, 2 ** (8 * size) - 1), label="value")
        offset = draw(st.integers(0, SIZE - size * count), label="offset")
        return ("fill", offset, PATTERNS[size](value), count)
    data = draw(st.binary(max_size=40), label="data")
    return ("copy", draw(st.integers(0, SIZE - len(data)), label="offset"), data, 0)


def build(program):
    builder = PlanBuilder(Block())
    for kind, offset, value, count in program:
        at = np.array([offset], np.int64)
        if kind == "fill":
            builder.fill(at, count * value.itemsize, value)
        else:
            builder.copy(at, len(value), np.frombuffer(value, np.uint8))
    return builder.build()


@given(st.lists(writes(), max_size=8), st.binary(min_size=SIZE, max_size=SIZE))
def test_g04_g05_a_plan_equals_its_writes_one_after_the_other(program, before):
    model = dict(enumerate(before))
    for kind, offset, value, count in program:
        data = value.tobytes() * count if kind == "fill" else value
        model.update({offset + i: byte for i, byte in enumerate(data)})
    buffer = np.frombuffer(before, np.uint8).copy()
    apply_to_host(build(program), buffer)
    assert dict(enumerate(buffer.tolist())) == model


@given(st.lists(writes(), max_size=8))
def test_g04_the_writes_of_a_plan_never_overlap(program):
    plan = build(program)
    taken: set[int] = set()
    for dst, _, nbytes, _ in plan.writes.tolist():
        cells = set(range(dst, dst + nbytes))
        assert not cells & taken, f"bytes {sorted(cells & taken)} are written twice"
        taken |= cells


@given(
    slots=st.lists(st.integers(0, 5), unique=True, min_size=1),
    widths=st.lists(st.sampled_from([1, 2, 4, 8, 24]), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_g09_records_reach_each_field_of_their_slot_and_nothing_else(slots, widths, seed):
    """The packed form and its flat form write the same bytes: field after field, slot after slot."""
    rng = np.random.default_rng(seed)
    bases = np.cumsum([0, *[w * 6 for w in widths]])
    sources = np.cumsum([0, *widths])
    scatter_map = np.array([(bases[i], w, sources[i], w) for i, w in enumerate(widths)], SCATTER_MAP)
    data = rng.integers(0, 256, (len(slots), sources[-1]), np.uint8)
    before = rng.integers(0, 256, bases[-1], np.uint8)
    expected = before.copy()
    for i, slot in enumerate(slots):
        for base, source, width in zip(bases, sources, widths, strict=False):
            expected[base + slot * width : base + (slot + 1) * width] = data[i, source : source + width]
    records = Records(np.array(slots, np.int32), data, scatter_map)
    plan = WritePlan(Block(int(bases[-1])), np.zeros(0, WRITE), [], records)
    for form in (plan, plan.flat()):
        buffer = before.copy()
        apply_to_host(form, buffer)
        np.testing.assert_array_equal(buffer, expected)


def test_a_write_outside_the_memory_is_refused():
    builder = PlanBuilder(Block())
    builder.fill(np.array([SIZE - 4], np.int64), 8, np.uint64(1))
    with pytest.raises(InvalidValue, match="outside the memory"):
        builder.build()


@pytest.mark.parametrize("nbytes", [2, 8, 16])
def test_a_write_that_begins_before_the_memory_is_refused(nbytes):
    builder = PlanBuilder(Block())
    builder.copy(np.array([16, -8], np.int64), nbytes, np.zeros(2 * nbytes, np.uint8))
    with pytest.raises(InvalidValue, match="a write begins at offset -8"):
        builder.build()


def test_data_of_another_length_than_its_runs_is_refused():
    with pytest.raises(InvalidValue, match="7 bytes for runs of 8"):
        PlanBuilder(Block()).copy(np.array([0, 8], np.int64), 4, np.zeros(7, np.uint8))


@st.composite
def indices(draw, shape):
    parts = []
    for extent in draw(st.sampled_from([shape, shape[:-1]]), label="axes"):
        if draw(st.booleans(), label="whole number"):
            parts.append(draw(st.integers(-extent, extent - 1), label="index"))
        else:
            bound = st.none() | st.integers(-extent - 1, extent + 1)
            step = draw(st.sampled_from([None, 1, 2, 3, -1, -2]), label="step")
            parts.append(slice(draw(bound, label="start"), draw(bound, label="stop"), step))
    return tuple(parts)


@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
def test_g05_a_sliced_view_names_the_bytes_that_numpy_names(data, shape):
    """Shape, strides, runs and bounds agree with NumPy's own slicing of the same memory."""
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    index = data.draw(indices(shape), label="index")
    part, view = array[index], View.contiguous(Block(), 0, shape, dtype_of("int32"))[index]
    assert view.shape == part.shape
    offsets, nbytes = view.runs()
    cells = [at + 4 * k for at in offsets.tolist() for k in range(nbytes // 4)]
    assert cells == [int(value) * 4 for value in np.ravel(part)]
    if cells:
        assert view.bounds() == (min(cells), max(cells) + 4)


@given(
    axes=st.lists(st.tuples(st.integers(0, 4), st.integers(-12, 12)), max_size=4),
    dtype=st.sampled_from(["uint8", "int16", "float32"]),
)
def test_g05_elements_are_apart_where_no_byte_belongs_to_two(axes, dtype):
    """Expanded, overlapping, interleaved, reversed and empty views, against the bytes of all elements one by one."""
    shape, strides = tuple(extent for extent, _ in axes), tuple(step for _, step in axes)
    view = View(Block(), 48, shape, strides, dtype_of(dtype))
    size = view.dtype.itemsize
    begins = [sum(np.multiply(at, strides).tolist()) for at in np.ndindex(*shape)]
    cells = [begin + k for begin in begins for k in range(size)]
    assert view.elements_apart == (len(set(cells)) == len(cells))


def test_g05_a_huge_view_is_refused_only_if_its_strides_are_ambiguous():
    sound = View(Block(), 0, (1 << 14, 1 << 14), (1 << 14, 1), dtype_of("uint8"))
    assert sound.elements_apart
    interleaved = View(Block(), 0, (1 << 13, 1 << 14), (2, (1 << 14) - 3), dtype_of("uint8"))
    with pytest.raises(InvalidValue, match="too many elements to compare one by one"):
        interleaved.elements_apart  # noqa: B018 (the property raises)
    expanded = View(Block(), 0, (1 << 30, 1 << 30), (0, 1), dtype_of("uint8"))
    assert not expanded.elements_apart


def test_an_index_outside_the_view_is_refused():
    view = View.contiguous(Block(), 0, (3, 4), dtype_of("int32"))
    for index in (3, -4, (0, 4), (0, 0, 0)):
        with pytest.raises(InvalidValue, match="shape") as raised:
            view[index]
        assert raised.value.argument == "index"
        assert raised.value.cure
    with pytest.raises(InvalidValue, match="give a slice"):
        view[3:][0]


NO_INDICES = [
    *(1.7, True, np.True_, np.float32(1), "x", None, ..., [0, 2], np.array([0, 2]), np.array([True, False, True])),
    *((0, 1.5), (slice(None), [1]), slice("a", None), slice(1.5), slice(None, None, 0)),
]


@pytest.mark.parametrize("index", NO_INDICES, ids=repr)
def test_g26_a_view_is_sliced_by_whole_numbers_and_slices(index):
    with bind(CpuPlugin.open(0, {})) as device:
        view = device.state(StateConfig(num_slots=3, max_model_len=8)).view("token_ids")
        with pytest.raises(InvalidValue, match="give a whole number or a slice") as raised:
            view[index]
    assert (raised.value.device, raised.value.argument) == ("cpu:0", "index")


@pytest.mark.parametrize("index", [np.int64(1), np.array(1), -2, (np.uint8(2), slice(np.int64(1), None))], ids=repr)
def test_numpy_whole_numbers_index_a_view(index):
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    part, view = array[index], View.contiguous(Block(), 0, (3, 4), dtype_of("int32"))[index]
    assert (view.shape, view.strides) == (part.shape, part.strides)
    assert view.offset == part.flat[0] * 4


@given(
    runs=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0, 1, 4, 16])), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_g05_the_cpu_device_writes_a_plan_as_it_reads(runs, seed):
    """Rows of one length, many or few, among rows of different lengths, in any places: as one row after the next."""
    rng = np.random.default_rng(seed)
    rows = [size for count, size in runs for _ in range(count)]
    places = rng.permutation(len(rows)) * 16
    memory = HostMemory.allocate(None, 16 * len(rows))
    memory.buffer[...] = expected = rng.integers(0, 256, memory.nbytes, np.uint8)
    builder = PlanBuilder(memory)
    for (count, size), end in zip(runs, np.cumsum([count for count, _ in runs]), strict=True):
        builder.copy(places[end - count : end], size, rng.integers(0, 256, count * size, np.uint8))
        if rng.random() < 0.3:
            builder.fill(places[end - 1 : end], min(size, 8), np.uint8(7))
    plan = builder.build()
    apply_to_host(plan, expected)
    memory.write(plan.writes, plan.payload)
    np.testing.assert_array_equal(memory.buffer, expected)


def test_the_cpu_device_spreads_records_over_gaps_one_count_a_plan():
    device = CpuDevice(0, {})
    memory = device.allocate(256)
    should = np.zeros(256, np.uint8)
    device.submit(PlanBuilder(memory).build(), device.default_stream)
    assert device.counters().submissions == 0, "an empty plan is none"
    memory.buffer[:] = 0
    data = np.arange(1, 31, dtype=np.uint8).reshape(3, 10)  # the last two bytes of a record belong to no field
    scatter_map = np.array([(0, 40, 0, 3), (8, 40, 3, 5)], SCATTER_MAP)
    plan = WritePlan(memory, np.zeros(0, WRITE), [], Records(np.array([4, 0, 2], np.int32), data, scatter_map))
    apply_to_host(plan, should)
    assert should[[0, 8 + 4 * 40]].tolist() == [11, 4]
    device.submit(plan, device.default_stream)
    assert (memory.buffer == should).all()
    spent = device.counters()
    assert (spent.submissions, spent.launches, spent.uploads) == (1, 1, 0)


def test_fills_of_the_cpu_device_that_are_longer_than_a_cycle():
    nbytes = 3 * FILL_BYTES
    memory, expected = HostMemory.allocate(None, nbytes), np.zeros(nbytes, np.uint8)
    memory.buffer[:] = 0
    builder = PlanBuilder(memory)
    builder.fill(np.array([3], np.int64), 2 * FILL_BYTES + 5, np.uint8(7))
    builder.fill(np.array([2 * FILL_BYTES + 8], np.int64), FILL_BYTES - 16, np.uint64(0x0102_0304_0506_0708))
    plan = builder.build()
    memory.write(plan.writes, plan.payload)
    apply_to_host(plan, expected)
    assert memory.buffer.tobytes() == expected.tobytes()
    assert memory.buffer[[2, 3, 2 * FILL_BYTES + 7]].tolist() == [0, 7, 7]
