"""The oracle of values, against tables of IEEE 754 and what NumPy casts."""

import math
import struct

import numpy as np
import pytest
from hal_conformance.oracle.values import NAN, REFUSED, converted, same
from hal_core.memory.dtypes import dtype_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import share

quick = settings(max_examples=share.of(100), deadline=None, database=None)


@pytest.mark.parametrize(
    ("value", "name", "should"),
    [
        (True, "bool", b"\1"),
        (2, "bool", REFUSED),
        (1.0, "int64", REFUSED),
        (-1, "uint8", REFUSED),
        (255, "uint8", b"\xff"),
        (-(2**63), "int64", struct.pack("<q", -(2**63))),
        (2**63, "int64", REFUSED),
        (2**24 + 1, "float32", REFUSED),
        (2**24, "float32", struct.pack("<f", 2.0**24)),
        (257, "bfloat16", REFUSED),
        (65519.99, "float16", struct.pack("<e", 65504.0)),
        (65520.0, "float16", REFUSED),
        (1e39, "float32", REFUSED),
        (-0.0, "bfloat16", b"\x00\x80"),
        (-1e-60, "float32", struct.pack("<f", -0.0)),
        (math.inf, "bfloat16", b"\x80\x7f"),
        (math.nan, "float16", NAN),
        (1.00390625, "bfloat16", b"\x80\x3f"),  # a tie, to even
        (1.01171875, "bfloat16", b"\x82\x3f"),  # a tie, to even
    ],
)
def test_known_conversions(value, name, should):
    assert converted(value, dtype_of(name)) == should


@quick
@given(st.floats(), st.sampled_from(["float16", "float32", "float64"]))
def test_floats_are_cast_as_numpy_casts_them(value, name):
    dtype = dtype_of(name)
    with np.errstate(all="ignore"):
        cast = np.float64(value).astype(dtype.storage)
    should = converted(value, dtype)
    if should == REFUSED:
        assert np.isinf(cast)
        assert math.isfinite(value)
    else:
        assert same(cast.tobytes(), should, dtype)


@quick
@given(st.integers(-(2**70), 2**70) | st.integers(-300, 300), st.sampled_from(["int8", "uint16", "int64", "uint64"]))
def test_ints_fit_or_are_refused(value, name):
    dtype = dtype_of(name)
    limits = np.iinfo(dtype.storage)
    fits = limits.min <= value <= limits.max
    should = np.array(value, dtype.storage).tobytes() if fits else REFUSED
    assert converted(value, dtype) == should
