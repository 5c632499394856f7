"""Conversion of values (G6, G2), compared with exact arithmetic (``exact_conversion.py``)."""

import math

import numpy as np
import pytest
from hal_core.errors import ConversionRefused, ShapeMismatch
from hal_core.memory.convert import convert, convert_scalar
from hal_core.memory.dtypes import BFLOAT16, BOOL, DTYPES, FLOAT16, FLOAT32, FLOAT64, INT64
from hypothesis import given, settings
from hypothesis import strategies as st

from core.tests.exact_conversion import (
    FLOATS,
    INFINITY,
    LAYOUTS,
    REFUSED,
    check,
    decode,
    expected,
    ints,
    patterns,
    stored,
    values,
)
from tests import share

quick = settings(max_examples=share.of(15), deadline=None, database=None)
many = settings(max_examples=share.of(150), deadline=None, database=None)


# --- All pairs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", DTYPES, ids=repr)
@pytest.mark.parametrize("source", DTYPES, ids=repr)
def test_g06_an_array_of_every_type_becomes_what_exact_arithmetic_says(source, target):
    @quick
    @given(st.lists(values(source), min_size=1, max_size=6), st.sampled_from(sorted(LAYOUTS)))
    def holds(items, layout):
        given_as = source if source is BFLOAT16 else None
        check(stored(items, source), items, (len(items),), target, given_as)
        fine = [v for v in items if expected(v, target) != REFUSED]
        if fine:
            laid = LAYOUTS[layout](stored(fine, source))
            flat = np.array(laid, source.storage, order="C", subok=False).reshape(-1)
            elements = [decode(b, source) for b in flat.view(f"u{source.itemsize}").tolist()]
            check(laid, elements, laid.shape, target, given_as)

    holds()


@many
@given(values(), st.sampled_from(DTYPES))
def test_g06_a_python_scalar_counts_as_its_class_and_fills(v, target):
    want = expected(v, target)
    with np.errstate(all="raise"):
        if want == REFUSED:
            for attempt in (lambda: convert_scalar(v, target), lambda: convert(v, target, (2, 3))):
                with pytest.raises(ConversionRefused, match=target.name):
                    attempt()
            return
        got = convert_scalar(v, target)
        assert got.dtype == target.storage
        assert patterns(np.array([got]), target) == [want]
        full = convert(v, target, (2, 3))
        assert full.shape == (2, 3)
        assert patterns(full, target) == [want] * 6


@pytest.mark.parametrize("source", DTYPES, ids=repr)
def test_g06_numpy_scalars_and_arrays_without_dimensions_fill(source):
    @many
    @given(values(source), st.sampled_from(DTYPES), st.booleans())
    def holds(v, target, swap):
        one = stored([v], source)
        zero = (one.astype(one.dtype.newbyteorder()) if swap else one).reshape(())
        want = expected(v, target)
        given_as = source if source is BFLOAT16 else None
        for value in (one[0], zero, zero[()]):
            with np.errstate(all="raise"):
                if want == REFUSED:
                    with pytest.raises(ConversionRefused, match=target.name):
                        convert_scalar(value, target, given_as)
                else:
                    assert patterns(np.array([convert_scalar(value, target, given_as)]), target) == [want]
                    assert patterns(convert(value, target, (3, 1), given_as), target) == [want] * 3

    holds()


@many
@given(st.data(), st.sampled_from(DTYPES), st.integers(1, 3), st.integers(1, 4))
def test_g06_lists_convert_element_by_element(data, target, rows, columns):
    kind = data.draw(st.sampled_from([values(), ints(), st.booleans(), st.floats(), st.integers(0, 1) | st.booleans()]))
    items = data.draw(st.lists(kind, min_size=rows * columns, max_size=rows * columns))
    if data.draw(st.booleans()):
        items = [v if expected(v, target) != REFUSED else True for v in items]
    nested = [items[i * columns : (i + 1) * columns] for i in range(rows)]
    check(items, items, (len(items),), target)
    check(nested, items, (rows, columns), target)
    check(tuple(map(tuple, nested)), items, (rows, columns), target)


# --- Rounding, exhaustively where it is cheap ----------------------------------------------------------------------


@pytest.mark.parametrize("target", [FLOAT16, BFLOAT16], ids=repr)
@pytest.mark.parametrize("sign", [1, -1])
def test_g06_ties_of_16_bit_floats_go_to_even_and_neighbours_do_not(target, sign):
    bits = np.arange(INFINITY[target.name] - 1, dtype=np.uint16)
    values = np.array([decode(int(b), target) for b in range(INFINITY[target.name])])
    middle = (values[:-1] + values[1:]) / 2  # exact: a double has more than one bit to spare
    minus = np.uint16(0x8000 if sign < 0 else 0)
    for v, want in (
        (middle, bits + bits % 2),
        (np.nextafter(middle, 0), bits),
        (np.nextafter(middle, np.inf), bits + 1),
    ):
        got = convert(sign * v, target, v.shape)
        np.testing.assert_array_equal(got.view(np.uint16), want.astype(np.uint16) | minus)
    single = middle.astype(np.float32)
    if target is FLOAT16:  # a bfloat16's smallest ties are no longer exact in binary32
        assert (single == middle).all()
    exact = single == middle
    got = convert(sign * single[exact], target, (int(exact.sum()),))
    np.testing.assert_array_equal(got.view(np.uint16), (bits + bits % 2)[exact] | minus)


@pytest.mark.parametrize("narrow", [FLOAT16, BFLOAT16], ids=repr)
@pytest.mark.parametrize("wide", [FLOAT32, FLOAT64], ids=repr)
def test_g06_all_16_bit_floats_survive_the_way_through_a_wider_type(narrow, wide):
    bits = np.arange(0x10000, dtype=np.uint16)
    nan = (bits & 0x7FFF) > INFINITY[narrow.name]
    there = convert(bits.view(narrow.storage), wide, bits.shape, narrow)
    back = convert(there, narrow, bits.shape).view(np.uint16)
    np.testing.assert_array_equal(there[~nan], [decode(int(b), narrow) for b in bits[~nan]])
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    assert np.isnan(there[nan]).all()
    assert ((back[nan] & 0x7FFF) > INFINITY[narrow.name]).all()


def test_g06_a_double_is_rounded_once_not_twice():
    just_above_a_tie = 1 + 2.0**-8 + 2.0**-40  # through binary32 it would become the tie, and be rounded down to even
    assert convert_scalar(just_above_a_tie, BFLOAT16) == 0x3F81
    assert convert([just_above_a_tie] * 2, BFLOAT16, (2,)).tolist() == [0x3F81] * 2
    just_above_a_tie = 1 + 2.0**-11 + 2.0**-40
    assert convert_scalar(just_above_a_tie, FLOAT16) == 1 + 2.0**-10
    assert convert([just_above_a_tie] * 2, FLOAT16, (2,)).tolist() == [1 + 2.0**-10] * 2


LIMITS = [(FLOAT16, 65520.0), (BFLOAT16, 2.0**128 - 2.0**119), (FLOAT32, 2.0**128 - 2.0**103)]


@pytest.mark.parametrize(("target", "limit"), LIMITS, ids=repr)
@pytest.mark.parametrize("sign", [1, -1])
def test_g06_overflow_is_refused_exactly_if_rounding_gives_infinity(target, limit, sign):
    below = sign * math.nextafter(limit, 0)
    largest = INFINITY[target.name] - 1
    assert patterns(convert([below, 0.5], target, (2,)), target)[0] & (largest | 1) == largest
    assert patterns(convert(below, target, (1,)), target)[0] & (largest | 1) == largest
    for value in (sign * limit, [0.5, sign * limit], np.array([0.5, sign * limit])):
        with pytest.raises(ConversionRefused, match="overflows to infinity"):
            convert(value, target, (2,))


def test_g06_nothing_warns_and_the_error_state_of_numpy_stays():
    before = np.geterr()
    tiny = np.array([5e-324, -1e-310, 1e-45, 0.0, -0.0, np.nan, np.inf, -np.inf])
    low_payload = np.array([0x7F800001, 0xFF800001], np.uint32).view(np.float32)  # its upper half is an infinity
    signalling = np.array([0x7FF0000000000001, 0xFFF0000000000001], np.uint64).view(np.float64)
    with np.errstate(all="raise"):
        for target in FLOATS:
            convert(tiny, target, (8,))
            assert set(patterns(convert(signalling, target, (2,)), target)) == {"nan"}
            assert set(patterns(convert(low_payload, target, (2,)), target)) == {"nan"}
            assert patterns(np.array([convert_scalar(signalling[0], target)]), target) == ["nan"]
    assert np.geterr() == before


def test_g06_values_of_the_targets_own_type_are_copied_bit_by_bit():
    bits = np.array([0x7F800001, 0xFFC12345, 0x80000000, 1], np.uint32)
    assert convert(bits.view(np.float32), FLOAT32, (4,)).view(np.uint32).tolist() == bits.tolist()
    swapped = bits.view(np.float32).astype(">f4")
    assert convert(swapped[:1].reshape(()), FLOAT32, (1,)).view(np.uint32).tolist() == bits[:1].tolist()
    raw = np.array([0x7F81, 0xFFFF, 0x8000, 1], np.uint16)
    assert convert(raw, BFLOAT16, (4,), BFLOAT16).tolist() == raw.tolist()


# --- Shapes --------------------------------------------------------------------------------------------------------


@many
@given(st.lists(st.integers(0, 3), max_size=3), st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES))
def test_g06_a_value_is_reshaped_if_and_only_if_the_element_count_fits(have, shape, target):
    array = np.arange(math.prod(have)).reshape(have) % 2
    value, shape = (array if have else array.reshape(1)), tuple(shape)
    have = value.shape
    for v in (value, value.tolist(), value.astype(np.float32) if target.kind == "float" else value.astype(np.int8)):
        if np.shape(v) == have and math.prod(have) == math.prod(shape):
            got = convert(v, target, shape)
            assert got.shape == shape
            assert got.flags.c_contiguous
            np.testing.assert_array_equal(got.reshape(-1), convert(value.reshape(-1), target, (value.size,)))
        elif np.shape(v) == have:
            with pytest.raises(ShapeMismatch) as caught:
                convert(v, target, shape)
            assert str(have) in str(caught.value)
            assert str(shape) in str(caught.value)


def test_g06_one_element_is_no_scalar_and_empty_fits_only_empty():
    for one in ([5], (5,), np.array([5]), np.array([5], np.int8)):
        assert convert(one, INT64, (1, 1)).tolist() == [[5]]
        with pytest.raises(ShapeMismatch, match=r"shape \(1,\), 1 element.*shape \(4,\), 4 element.*scalar to fill"):
            convert(one, INT64, (4,))
    for empty in ([], (), [[], []], np.array([]), np.empty((0, 3), np.int64)):
        for target in DTYPES:
            assert convert(empty, target, (2, 0)).shape == (2, 0)
        with pytest.raises(ShapeMismatch, match="0 element"):
            convert(empty, INT64, (1,))
    assert convert(5, INT64, (0, 4)).shape == (0, 4)
    assert convert(5, INT64, ()).tolist() == 5
    with pytest.raises(ConversionRefused):
        convert(2.5, INT64, (0,))


def test_g06_convert_scalar_says_none_for_what_is_no_scalar():
    for value in ([5], (5,), [], np.array([5]), np.zeros((2, 2)), np.array([None])):
        assert convert_scalar(value, INT64) is None


# --- G2 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", DTYPES, ids=repr)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_g02_the_result_has_memory_of_its_own(target, layout):
    for source in DTYPES:
        if source.kind == "float" and target.kind != "float":
            continue
        owner = LAYOUTS[layout](stored([True, False, True, True], source))
        for value in (owner, owner.reshape(-1), owner[..., :0]):
            for shape in (value.shape, (1, value.size)):
                got = convert(value, target, shape, BFLOAT16 if source is BFLOAT16 else None)
                before = got.tobytes()
                assert not np.shares_memory(got, owner)
                if owner.flags.writeable:
                    owner[...] = np.logical_not(owner)
                assert got.tobytes() == before
                got[...] = got.dtype.type(0)


@pytest.mark.parametrize("target", [INT64, FLOAT32, BOOL], ids=repr)
def test_g02_a_list_or_an_array_without_dimensions_may_change_afterwards(target):
    items, zero = [1, 0, 1], np.ones((), target.storage)
    listed, filled = convert(items, target, (3,)), convert(zero, target, (3,))
    scalar = convert_scalar(zero, target)
    items[:] = [0, 1, 0]
    zero[...] = 0
    assert listed.tolist() == [1, 0, 1]
    assert filled.tolist() == [1, 1, 1]
    assert scalar == 1
