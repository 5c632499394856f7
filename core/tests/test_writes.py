"""``Writes`` against NumPy: rows of one number or one array of bounds, and neighbours that are one run."""

import numpy as np
import pytest
from hal_core.devices.cpu.device import CpuDevice
from hal_core.errors import InvalidValue, ShapeMismatch
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.plan import LONGEST, apply_to_host
from hal_core.memory.views import View
from hal_core.memory.writes import SlotRuns, Writes
from hypothesis import given
from hypothesis import strategies as st

SLOTS, WIDTH = 6, 5
INT64 = dtype_of("int64")


class Block:
    """A stand-in for device memory of any size; plans use only its size."""

    device, address = None, 0

    def __init__(self, nbytes=SLOTS * WIDTH * 8):
        self.nbytes = nbytes


def written(writes):
    """The descriptors of the one plan."""
    (plan,) = writes.plans()
    return plan.writes


@st.composite
def calls(draw):
    """One call: its name, slots (a slot may come twice), values or a value, bounds of each row."""
    slots = draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS))
    begins = draw(st.lists(st.integers(0, WIDTH), min_size=len(slots), max_size=len(slots)))
    ends = [draw(st.integers(begin, WIDTH)) for begin in begins]
    if draw(st.booleans()):  # whole rows, which join
        begins, ends = [0] * len(slots), [WIDTH] * len(slots)
    return draw(st.sampled_from(["fill", "rows", "ragged"])), slots, begins, ends, draw(st.integers(1, 99))


def bound(numbers):
    """Equal bounds as one number, others as an array."""
    return numbers[0] if len({*numbers}) == 1 else np.array(numbers)


@given(st.lists(calls(), min_size=1, max_size=4), st.booleans())
def test_g04_g05_writes_of_rows_equal_numpys(program, known):
    model, writes = np.full((SLOTS, WIDTH), -7), Writes()
    view = View.contiguous(Block(), 0, (SLOTS, WIDTH), INT64)
    for name, slots, begins, ends, value in program:
        given_slots = SlotRuns(slots) if known else slots
        if name == "fill":
            writes.fill(view, given_slots, value, bound(begins), bound(ends))
            rows = [np.full(end - begin, value) for begin, end in zip(begins, ends, strict=True)]
        elif name == "rows":
            values = np.arange(len(slots) * (WIDTH - begins[0])).reshape(len(slots), -1) + value
            writes.rows(view, given_slots, values, begins[0])
            rows, begins = values, [begins[0]] * len(slots)
        else:
            rows = [np.arange(end - begin) + value for begin, end in zip(begins, ends, strict=True)]
            lengths = [min(len(row), WIDTH - begins[0]) for row in rows]
            rows, begins = [row[:length] for row, length in zip(rows, lengths, strict=True)], [begins[0]] * len(slots)
            writes.ragged(view, given_slots, np.concatenate(rows), lengths, begins[0])
        for slot, begin, row in zip(slots, begins, rows, strict=True):
            model[slot, begin : begin + len(row)] = row
    buffer = np.full((SLOTS, WIDTH), -7).view(np.uint8).reshape(-1)
    for plan in writes.plans():
        apply_to_host(plan, buffer)
    np.testing.assert_array_equal(buffer.view(np.int64).reshape(SLOTS, WIDTH), model)


@pytest.mark.parametrize(("slots", "runs"), [([0, 1, 2, 3], 1), ([4, 5, 0, 1, 3], 3), ([2, 2], 2), ([3, 2, 1], 3)])
def test_neighbouring_whole_rows_are_one_run(slots, runs):
    column, table = View.contiguous(Block(), 0, (SLOTS,), INT64), View.contiguous(Block(), 0, (SLOTS, WIDTH), INT64)
    filled, copied, part = Writes(), Writes(), Writes()
    filled.fill(table, slots, 1)
    copied.rows(column, slots, np.arange(len(slots)))
    part.fill(table, slots, 1, end=WIDTH - 1)
    distinct = len({*slots})
    assert [len(written(one)) for one in (filled, copied)] == [min(runs, distinct)] * 2
    assert len(written(part)) == distinct


def test_runs_stay_below_what_a_descriptor_holds():
    width = LONGEST // 8 // 2  # two rows are less than 4 GiB, three are more
    view = View.contiguous(Block(2**40), 0, (6, width), INT64)
    writes = Writes()
    writes.fill(view, [0, 1, 4, 5], 1)
    assert written(writes)["nbytes"].tolist() == [2 * width * 8] * 2
    writes = Writes()
    writes.fill(view, [0, 1, 2], 1)
    assert written(writes)["nbytes"].tolist() == [width * 8] * 3
    with pytest.raises(InvalidValue, match="less than 4 GiB at once"):
        Writes().fill(View.contiguous(Block(2**40), 0, (2, LONGEST // 8 + 1), INT64), [0], 1)


def test_g05_a_column_of_a_wider_tensor_is_written_row_by_row():
    device = CpuDevice(0, {})
    array = np.zeros((4, 3), np.int64)
    view = device.resolve(array)
    writes = Writes()
    writes.rows(view[:, 1], [0, 1, 2], np.array([5, 6, 7]))
    device.submit_all(writes.plans(), device.default_stream)
    assert array.tolist() == [[0, 5, 0], [0, 6, 0], [0, 7, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("values", "lengths"), [([1, 2, 3], [1, 1]), ([1, 2], [1, 1, 0]), ([[1], [2]], [1, 1]), ([1, 2], [3, -1])], ids=str
)
def test_g26_rows_and_lengths_that_do_not_fit_are_refused(values, lengths):
    view = View.contiguous(Block(), 0, (SLOTS, WIDTH), INT64)
    with pytest.raises(ShapeMismatch, match="values and"):
        Writes().ragged(view, [0, 1], np.array(values), lengths)
    with pytest.raises(ShapeMismatch, match=r"elements 0 to 6 of slots 0 to 1"):
        Writes().ragged(view, [0, 1], np.arange(6), [6, 0])
    with pytest.raises(ShapeMismatch, match=r"of slots 0 to 6"):
        Writes().fill(view, [0, SLOTS], 1)
    with pytest.raises(ShapeMismatch, match=r"of slots -1 to 0"):
        Writes().fill(view, [-1], 1)


def test_g28_owners_are_all_whose_views_are_written_also_in_one_memory():
    """A state and its companions share one memory, and each has readers of its own."""
    block, other, owners = Block(), Block(), [object(), object(), object()]
    views = [
        View.contiguous(memory, 8 * SLOTS * at, (SLOTS, 1), INT64, owner)
        for at, (memory, owner) in enumerate(zip((block, block, other), owners, strict=True))
    ]
    writes = Writes()
    for view in (*views, views[0]):
        writes.fill(view, [0], 1)
    assert [*writes.owners.values()] == owners
