"""The element types: one object a name; the classes of values; refused types and the errors' wording (G6, G26)."""

import copy
import enum
import pickle
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hal_core.errors import ConversionRefused, InvalidValue
from hal_core.memory.convert import convert
from hal_core.memory.dtypes import (
    BFLOAT16,
    BOOL,
    DTYPES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT8,
    INT32,
    INT64,
    UINT8,
    UINT16,
    UINT64,
    dtype_of,
)

REFUSED = object()
NAMES = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
NAMES += ["float16", "bfloat16", "float32", "float64"]


def test_g06_there_is_one_object_for_every_name():
    assert [d.name for d in DTYPES] == NAMES
    for name, dtype in zip(NAMES, DTYPES, strict=True):
        assert dtype_of(name) is dtype
        assert dtype_of(dtype) is dtype
        assert dtype_of("paddle." + name) is dtype
        assert dtype_of("torch." + name) is dtype
        assert pickle.loads(pickle.dumps(dtype)) is dtype
        assert copy.deepcopy(dtype) is dtype
        assert repr(dtype) == name


@pytest.mark.parametrize("name", [n for n in NAMES if n != "bfloat16"])
def test_g06_storage_is_the_numpy_dtype_of_the_name(name):
    dtype = dtype_of(name)
    assert dtype.storage == np.dtype(name)
    assert dtype.itemsize == np.dtype(name).itemsize
    assert dtype.kind == {"b": "bool", "i": "int", "u": "int", "f": "float"}[np.dtype(name).kind]
    assert dtype_of(np.dtype(name)) is dtype
    assert dtype_of(np.dtype(name).newbyteorder()) is dtype
    assert dtype_of(np.zeros(1, name).dtype) is dtype


def test_g06_bfloat16_is_stored_as_uint16_but_uint16_is_not_bfloat16():
    assert BFLOAT16.storage == np.uint16
    assert (BFLOAT16.itemsize, BFLOAT16.kind) == (2, "float")
    assert dtype_of(np.dtype(np.uint16)) is UINT16
    assert UINT16 is not BFLOAT16


def test_g06_the_two_64_bit_int_types_of_c_are_one():
    assert dtype_of(np.dtype("q")) is dtype_of(np.dtype("l")) is INT64


@pytest.mark.parametrize(
    "wrong",
    ["int65", "paddle.complex64", "jax.int64", "", None, 5, int, [], {"a": 1}]
    + [np.dtype(d) for d in ("complex64", "M8[s]", "m8[s]", "O", "U3", "S3", "longdouble", [("int64", "i8")])],
)
def test_g26_an_unknown_type_is_refused_naming_what_is_supported(wrong):
    with pytest.raises(InvalidValue) as caught:
        dtype_of(wrong)
    assert repr(wrong) in str(caught.value)
    assert all(name in str(caught.value) for name in NAMES)


def test_g06_a_dtype_cannot_be_changed():
    with pytest.raises(AttributeError):
        INT64.name = "int32"


# --- Classes ----------------------------------------------------------------------------------------------------


def short(v):
    return re.sub(r"0x\w+", "", repr(v))[:40] if type(v) is not int or v.bit_length() < 99 else "large"


class Colour(enum.IntEnum):
    RED = 1


class MyFloat(float):
    pass


@pytest.mark.parametrize(
    ("value", "target", "want"),
    [
        ([True, False], INT64, [1, 0]),
        ([True, 2], INT64, [1, 2]),
        ([True, 0, 1], BOOL, [True, False, True]),
        ([1, 0], BOOL, [True, False]),
        ([True, 2, 0.5], FLOAT32, [1.0, 2.0, 0.5]),
        ([2**63], UINT64, [2**63]),
        ([2**63, 1, True], UINT64, [2**63, 1, 1]),
        ([2**70, 1], FLOAT32, [2.0**70, 1.0]),
        (2**70, FLOAT64, [2.0**70] * 2),
        ([2**53, 0.5], FLOAT64, [2.0**53, 0.5]),
        ([np.int8(100), np.int8(100)], UINT8, [100, 100]),
        ([np.uint64(2**64 - 1), -1], FLOAT32, REFUSED),
        ([np.float16(0.5), np.float32(2.5), 1], FLOAT16, [0.5, 2.5, 1.0]),
        ([np.array([1, 2], ">i4"), (3, 4)], INT8, [1, 2, 3, 4]),
        ([np.array(1), 2], INT8, [1, 2]),
        ([[np.array([[1]])], [[[2]]]], INT8, [1, 2]),
        ([1, 2.0], INT64, REFUSED),
        ([2**53 + 1, 0.5], FLOAT64, REFUSED),
        ([2**63], INT64, REFUSED),
        ([-1], UINT64, REFUSED),
        (2, BOOL, REFUSED),
        (1.0, BOOL, REFUSED),
        (10**400, FLOAT64, REFUSED),
        (-(2**1024), FLOAT64, REFUSED),
        ([2**1024, 0.5], FLOAT32, REFUSED),
        (10**5000, INT64, REFUSED),
        (Colour.RED, INT64, [1]),
        (MyFloat(0.5), FLOAT32, [0.5]),
        ([Colour.RED, MyFloat(0.5)], FLOAT32, [1.0, 0.5]),
        (np.longlong(5), INT32, [5]),
    ],
    ids=short,
)
def test_g06_classes_of_lists_and_scalars(value, target, want):
    if want is REFUSED:
        with pytest.raises(ConversionRefused):
            convert(value, target, (len(value) if isinstance(value, list) else 1,))
    else:
        assert convert(value, target, (len(want),)).tolist() == want


# --- Refusals ------------------------------------------------------------------------------------------------------

cycle = [1]
cycle[0] = cycle
deep = [1]
for _ in range(16):
    deep = [deep]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "NoneType"),
        ("5", "a str"),
        (b"5", "a bytes"),
        (1j, "a complex"),
        (object(), "an? object"),
        ({1: 2}, "a dict"),
        ({1}, "a set"),
        (range(1), "a range"),
        (Decimal(1), "a Decimal"),
        (Fraction(1), "a Fraction"),
        (np.complex64(1), "complex64"),
        (np.datetime64("2020"), "datetime64"),
        (np.timedelta64(1, "s"), "timedelta64"),
        (np.str_("5"), "<U1"),
        (np.array("5"), "<U1"),
        (np.array(5, object), "object"),
        (np.array([5], object), "object"),
        (np.array([1j]), "complex128"),
        (np.array(["5"]), "<U1"),
        (np.array(["2020"], "M8[s]"), "datetime64"),
        (np.zeros(1, [("a", "i8")]), r"\[\('a'"),
        (np.ma.array([5], mask=[True]), "masked"),
        (np.ma.masked, "masked"),
        ([None], r"at index \[0\]: the value is a NoneType"),
        ([[1], ["4"]], r"at index \[1, 0\]: the value is a str"),
        ([1, 1j], r"at index \[1\]: the value is a complex"),
        ([1, np.datetime64(1, "ns")], r"at index \[1\]: .*datetime64"),
        ([np.array([1], "M8[ns]")], r"at index \[0\]: .*datetime64"),
        ([1, np.ma.array([5], mask=[True])], r"at index \[1\]: .*masked"),
        ([[1], [2, 3]], r"at index \[1\]: .*ragged list: 1 elements at index \[0\], 2 elements"),
        ([[[1], [2]], [[3], [4, 5]]], r"at index \[1, 1\]: .*ragged list: 1 elements at index \[0, 0\], 2 elements"),
        ([1, [2]], r"at index \[1\]: .*ragged list: no list at index \[0\], 1 elements"),
        ([[1], 2], r"at index \[1\]: .*ragged list: 1 elements at index \[0\], no list"),
        ([(1, 2), np.array([3])], r"at index \[1\]: .*ragged list: 2 elements at index \[0\], 1 elements"),
        (cycle, "deeper than 16"),
        (deep, "deeper than 16"),
    ],
    ids=short,
)
@pytest.mark.parametrize("target", [INT64, FLOAT32, BFLOAT16], ids=repr)
def test_g06_what_is_no_number_is_refused_by_name(value, says, target):
    shape = (len(value),) if isinstance(value, list) else (1,)
    with pytest.raises(ConversionRefused, match=says) as caught:
        convert(value, target, shape)
    assert caught.value.cure
    assert caught.value.argument == "value"


@pytest.mark.skipif(np.dtype(np.longdouble) == np.float64, reason="long double is double here")
def test_g06_a_long_double_is_refused():
    for value in (np.longdouble(1), np.ones(1, np.longdouble), [np.longdouble(1)], [np.ones(1, np.longdouble)]):
        with pytest.raises(ConversionRefused, match=str(np.dtype(np.longdouble))):
            convert(value, FLOAT64, (1,))


@pytest.mark.parametrize(
    ("value", "target", "text"),
    [
        (
            [[1, 2], [300, 4]],
            INT8,
            "value: at index [1, 0]: the value has int 300, but int8 takes only bools and ints from -128 to 127 "
            "(clip it to that range, or use a wider target)",
        ),
        (
            np.array([0.5]),
            INT64,
            "value: at index [0]: the value has float 0.5, but int64 takes only bools and ints from "
            "-9223372036854775808 to 9223372036854775807 (round it to int first, or use a wider target)",
        ),
        (
            np.array([1, 2], np.uint8),
            BOOL,
            "value: at index [1]: the value has int 2, but bool takes only bools and the ints 0 and 1 "
            "(compare it first: value != 0)",
        ),
        (
            [0.5, 2**24 + 1],
            FLOAT32,
            "value: at index [1]: the value has int 16777217, but float32 holds only ints of 24 significant bits below "
            "2**128 exactly (pass a float if rounding is meant, or use a wider target)",
        ),
        (
            70000.0,
            FLOAT16,
            "value: the value has float 70000.0, but float16 overflows to infinity from a magnitude of 65520.0 "
            "(clip it, or pass an infinity if one is meant)",
        ),
        (
            10**5000,
            UINT8,
            "value: the value has an int of 16610 bits, but uint8 takes only bools and ints from 0 to 255 "
            "(clip it to that range, or use a wider target)",
        ),
    ],
    ids=short,
)
def test_g26_a_refusal_names_the_value_the_targets_need_and_the_cure(value, target, text):
    with pytest.raises(ConversionRefused) as caught:
        convert(value, target, np.shape(value))
    assert str(caught.value) == text


def test_g26_source_is_only_for_raw_storage():
    raw = np.array([0x3F80], np.uint16)
    assert convert(raw, FLOAT32, (1,), BFLOAT16).tolist() == [1.0]
    assert convert(raw, INT64, (1,)).tolist() == [0x3F80]
    for value in ([0x3F80], 0x3F80, raw.astype(np.int64), raw.view(np.float16), "x"):
        with pytest.raises(InvalidValue, match="raw") as caught:
            convert(value, FLOAT32, (1,), BFLOAT16)
        assert caught.value.argument == "source"


def test_g06_the_bfloat16_of_ml_dtypes_is_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    value = np.array([1.0, -0.5], ml_dtypes.bfloat16)
    assert convert(value, FLOAT32, (2,)).tolist() == [1.0, -0.5]
    assert convert(value[::-1], BFLOAT16, (2,)).tolist() == [0xBF00, 0x3F80]
    assert convert(value[0], FLOAT64, (2,)).tolist() == [1.0, 1.0]
