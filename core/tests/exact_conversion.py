"""G6 and G2 of value conversion, against an oracle in exact arithmetic that shares no code with it.

The oracle knows a float format as its bit patterns alone: the patterns of positive numbers are in the order of their
values, so it finds the two neighbours of a number by bisection and takes the nearer, or the even one of a tie.
"""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hal_core.errors import ConversionRefused
from hal_core.memory.convert import convert
from hal_core.memory.dtypes import BFLOAT16, BOOL, DTYPES, FLOAT16, FLOAT32, FLOAT64
from hypothesis import strategies as st

FLOATS = [d for d in DTYPES if d.kind == "float"]
REFUSED = "refused"

# --- The oracle ----------------------------------------------------------------------------------------------------

INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF0000000000000}
TOP = {"float16": 16, "bfloat16": 128, "float32": 128, "float64": 1024}


def decode(bits, dtype):
    """Return the Python value of a bit pattern."""
    if dtype.kind == "bool":
        return bool(bits)
    if dtype.kind == "int":
        wraps = dtype.name.startswith("int") and bits >> (8 * dtype.itemsize - 1)
        return bits - (1 << 8 * dtype.itemsize) if wraps else bits
    if dtype is BFLOAT16:
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    code, raw = {"float16": ("e", "H"), "float32": ("f", "I"), "float64": ("d", "Q")}[dtype.name]
    return struct.unpack("<" + code, struct.pack("<" + raw, bits))[0]


def neighbours(size, dtype):
    """Patterns around a positive number, and their values as Fractions: 2**TOP takes the place of infinity.

    Python compares integers and floats exactly, without rounding either, and faster than Fractions.
    """

    def value(bits):
        return 1 << TOP[dtype.name] if bits == INFINITY[dtype.name] else decode(bits, dtype)

    low, high = 0, INFINITY[dtype.name]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle) <= size else (low, middle)
    return low, Fraction(value(low)), high, Fraction(value(high))


def expected(v, dtype):
    """Return the bit pattern that ``v`` must become, "nan", or REFUSED."""
    if dtype.kind != "float":
        if isinstance(v, float):
            return REFUSED
        bits = 8 * dtype.itemsize
        low, high = (0, 1) if dtype is BOOL else (-(1 << bits - 1), (1 << bits - 1) - 1)
        if dtype.name.startswith("uint"):
            low, high = 0, (1 << bits) - 1
        return int(v) % (1 << bits) if low <= v <= high else REFUSED
    if v != v:
        return "nan"
    sign = (math.copysign(1.0, v) < 0 if isinstance(v, float) else v < 0) << (8 * dtype.itemsize - 1)
    if v in (math.inf, -math.inf):
        return sign | INFINITY[dtype.name]
    size = Fraction(abs(v))
    if size >= Fraction(2) ** TOP[dtype.name]:
        return REFUSED
    low, below, high, above = neighbours(abs(v), dtype)
    if not isinstance(v, float):
        return sign | low if below == size else REFUSED
    to_high = above - size < size - below or (above - size == size - below and high % 2 == 0)
    nearest = high if to_high else low
    return REFUSED if nearest == INFINITY[dtype.name] else sign | nearest


def patterns(array, dtype):
    """Return the bit patterns of a converted array, with "nan" for every NaN."""
    bits = array.reshape(-1).view(f"u{dtype.itemsize}").tolist()
    return ["nan" if decode(b, dtype) != decode(b, dtype) else b for b in bits]


# --- What Hypothesis draws -----------------------------------------------------------------------------------------


def ints(low=-(2**70), high=2**70):
    """Any double, with more of them near powers of two, where ranges and precisions end."""
    near = st.builds(lambda s, k, d: s * 2**k + d, st.sampled_from([1, -1]), st.integers(0, 70), st.integers(-2, 2))
    odd = st.builds(lambda m, k: m * 2**k, st.integers(-(2**25), 2**25), st.integers(0, 40))
    return st.one_of(st.integers(-3, 3), near, odd, st.integers(low, high)).map(lambda v: min(max(v, low), high))


@st.composite
def ties(draw):
    """A double on, or one step beside, the middle of two neighbours of a narrower format."""
    dtype = draw(st.sampled_from([FLOAT16, BFLOAT16, FLOAT32]))
    last = INFINITY[dtype.name] - 1
    bits = draw(st.integers(0, last) | st.integers(0, 200) | st.integers(last - 9, last))
    above = 2.0 ** TOP[dtype.name] if bits == last else decode(bits + 1, dtype)
    middle = (decode(bits, dtype) + above) / 2
    towards = draw(st.sampled_from([middle, -math.inf, math.inf]))
    return math.nextafter(middle, towards) * draw(st.sampled_from([1.0, -1.0]))


def values(dtype=None):
    """Python values that ``dtype`` holds exactly; of any class and size where it is None."""
    if dtype is None:
        return st.one_of(st.booleans(), ints(), st.floats(), ties())
    if dtype is BOOL:
        return st.booleans()
    if dtype.kind == "int":
        return ints(decode(1 << (8 * dtype.itemsize - 1), dtype) if dtype.name[0] == "i" else 0, _most(dtype))
    narrow = st.integers(0, (1 << 8 * dtype.itemsize) - 1).map(lambda b: decode(b, dtype))
    if dtype is BFLOAT16:
        return narrow
    return st.one_of(narrow, st.floats(width=8 * dtype.itemsize), *([ties()] if dtype is FLOAT64 else []))


def _most(dtype):
    return 2 ** (8 * dtype.itemsize - (dtype.name[0] == "i")) - 1


def stored(items, dtype):
    """An array of ``dtype.storage`` that holds the Python values exactly."""
    if dtype is BFLOAT16:
        return np.array([int.from_bytes(struct.pack(">f", v)[:2], "big") for v in items], np.uint16)
    return np.array(items, dtype.storage)


def unaligned(a):
    return np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype)


LAYOUTS = {
    "plain": lambda a: a,
    "reversed": lambda a: a[::-1].copy()[::-1],
    "strided": lambda a: np.repeat(a, 3)[::3],
    "column": lambda a: np.stack([a, a[::-1]], axis=1)[:, 0],
    "swapped": lambda a: a.astype(a.dtype.newbyteorder()),
    "fortran": lambda a: np.asfortranarray(np.stack([a, a])),
    "broadcast": lambda a: np.broadcast_to(a, (3, len(a))),
    "one repeated": lambda a: np.broadcast_to(a[0], (2, 2)),
    "unaligned": unaligned,
    "subclass": lambda a: a.reshape(1, -1).view(np.memmap),
}


def check(value, elements, shape, target, source=None):
    """Convert, and compare with the oracle element by element; an error must name the first refused element."""
    want = [expected(v, target) for v in elements]
    with np.errstate(all="raise"):
        if REFUSED not in want:
            got = convert(value, target, shape, source)
            assert (got.dtype, got.shape) == (target.storage, shape)
            assert got.flags.c_contiguous
            assert got.flags.writeable
            assert patterns(got, target) == want, f"{elements} to {target}"
            return
        with pytest.raises(ConversionRefused) as caught:
            convert(value, target, shape, source)
    have = np.shape(value)
    index = list(map(int, np.unravel_index(want.index(REFUSED), have)))
    assert f"at index {index}: " in str(caught.value)
    assert target.name in str(caught.value)
    assert caught.value.cure
