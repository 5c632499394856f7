"""The kernels against NumPy: a packed plan, a strided copy, and a step's update, byte for byte."""

import numpy as np
import pytest

pytest.importorskip("hal_opencl", reason="paddle-hal-opencl is missing: pip install './plugins/opencl[pocl]'")

from hal_core import ByteRange, View
from hal_core.devices import (
    SCATTER_MAP,
    PlanBuilder,
    apply_to_host,
    dtype_of,
)
from hal_core.memory.plan import WRITE, Records, WritePlan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hal
from tests import share

PATIENCE = 60.0
SIZE = 1 << 12


@pytest.fixture(scope="module")
def bound(runtime):
    with hal.open_device("opencl") as opened:
        yield opened


@pytest.fixture(scope="module")
def device(bound):
    return bound.device


def filled(device, nbytes, seed=0):
    """Device memory with random bytes, and those."""
    memory, data = device.allocate(nbytes), np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    target = View.contiguous(memory, 0, (nbytes,), dtype_of("uint8"))
    device.submit_value(target, data, device.default_stream).wait(PATIENCE)
    return memory, data.copy()


def read(device, memory):
    copy = device.copy_out(memory, [ByteRange(0, memory.nbytes)], device.default_stream)
    copy.wait(PATIENCE)
    return copy.data[0].copy()


@st.composite
def plans(draw):
    """Runs and fills of any length at any place, some overlapping, long ones among them."""
    writes = []
    for _ in range(draw(st.integers(1, 8))):
        offset = draw(st.integers(0, SIZE - 1))
        nbytes = draw(st.integers(1, SIZE - offset))
        item = draw(st.sampled_from([0, 1, 2, 4, 8]))
        writes.append((offset, nbytes - nbytes % (item or 1), item))
    return writes


@settings(max_examples=share.of(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(writes=plans(), seed=st.integers(0, 99))
def test_g05_a_plan_is_what_the_host_makes_of_it(device, writes, seed):
    memory, should = filled(device, SIZE, seed)
    random, builder = np.random.default_rng(seed), PlanBuilder(memory)
    for offset, nbytes, item in writes:
        if item == 0:
            builder.copy(np.array([offset]), nbytes, random.integers(0, 256, nbytes, np.uint8))
        elif nbytes:
            builder.fill(np.array([offset]), nbytes, _item(random, item))
    plan = builder.build()
    apply_to_host(plan, should)
    device.submit(plan, device.default_stream).wait(PATIENCE)
    assert (read(device, memory) == should).all()


def _item(random, size):
    return np.frombuffer(random.bytes(size), f"u{size}")[0]


def test_g05_a_record_of_a_slot_beyond_the_last_writes_nothing(device):
    """Writes that a spoilt block requests outside the plan's memory do not happen."""
    memory, should = filled(device, SIZE)
    scatter_map = np.array([(64, 128, 0, 16), (16, 128, 16, 8)], SCATTER_MAP)
    device.table(scatter_map, 8)
    data = np.random.default_rng(1).integers(0, 256, (3, 24), np.uint8)
    for slots, written in (([0, 5, 7], True), ([8, 9, 1000], False)):
        records = Records(np.array(slots, np.int32), data, scatter_map)
        plan = WritePlan(memory, np.zeros(0, WRITE), [], records)
        if written:
            apply_to_host(plan, should)
        device.submit(plan, device.default_stream).wait(PATIENCE)
        assert (read(device, memory) == should).all()


@pytest.mark.parametrize("axes", [1, 3, 8, 11])
def test_g05_a_strided_copy_takes_any_count_of_axes(device, axes):
    shape = (2,) * axes
    bytes_of = 3 * 2**axes
    source, given_bytes = filled(device, bytes_of, 1)
    target, should = filled(device, bytes_of, 2)
    strides = tuple(3 << axis for axis in range(axes))  # column-major, with two bytes after each element
    one = View(source, 0, shape, strides, dtype_of("uint8"))
    other = View(target, 1, shape, strides[::-1], dtype_of("uint8"))
    np.ndarray(shape, np.uint8, should, 1, strides[::-1])[...] = np.ndarray(shape, np.uint8, given_bytes, 0, strides)
    device.copy_within(other, one, device.default_stream).wait(PATIENCE)
    assert (read(device, target) == should).all()
