"""Conversion of values by class and by value (G6), and the last elements of long values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import pytest
from hal_core.errors import ConversionRefused, ShapeMismatch
from hal_core.memory.dtypes import DTYPES, dtype_of
from hal_core.memory.views import View
from hypothesis import strategies as st

from .draw.values import LAYOUTS, contained, draw_dtype, fitting, of_dtype, scalars
from .draw.views import PLACES, draw_view
from .fixtures.block import Block
from .fixtures.large_blocks import GAP, LargeBlock
from .fixtures.sizes import sizes
from .harness import backdoor
from .harness.asserts import assert_raises, assert_says
from .harness.backdoor import arrive
from .harness.bits import FLOATS, Array, HostTensor, given, words
from .harness.guarantees import guarantee
from .kit import Draw, Kit, examples
from .oracle.values import REFUSED, converted


@guarantee(6)
@examples(2.0)
def test_g06_a_scalar_fills_or_is_refused_by_class_and_value(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    target = draw_view(draw, block.memory)
    value = draw(scalars, "value")
    block.set_if_convertible(target, value, [value] * max(1, target.size))
    block.check(f"async_set_value({target}, {value!r})")


@guarantee(6)
@examples(2.0)
def test_g06_lists_and_arrays_convert_element_by_element(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    target = draw_view(draw, block.memory)
    elements = draw(st.sampled_from(["any", "fitting"]), "elements")
    items = draw(
        st.lists(scalars if elements == "any" else fitting(target.dtype), min_size=target.size, max_size=target.size),
        "items",
    )
    block.set_if_convertible(target, contained(draw, items, target.shape), items)
    block.check(f"async_set_value({target}, {items!r})")


@guarantee(6)
@examples(2.0)
def test_g06_an_array_of_any_type_converts_by_value(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    source = draw_dtype(draw, "dtype of the array", [dtype for dtype in DTYPES if dtype.name != "bfloat16"])
    target = View.contiguous(block.memory, 64, (draw(st.integers(1, 6), "elements"),), draw_dtype(draw, "target"))
    some = of_dtype(source)
    if source.kind != "float" and target.dtype.kind != "float":
        some |= of_dtype(source).filter(lambda item: converted(item, target.dtype) != REFUSED)
    items = draw(st.lists(some, min_size=target.size, max_size=target.size), "items")
    layout = draw(st.sampled_from([*LAYOUTS]), "memory layout")
    array = LAYOUTS[layout](np.array(items, source.storage))
    block.set_if_convertible(target, array, array.tolist())
    block.check(f"async_set_value({target}, {array!r})")


@guarantee(6)
@examples()
def test_g06_a_wrong_count_is_refused_and_both_shapes_are_named(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    target = draw_view(draw, block.memory)
    count = draw(st.integers(0, 9).filter(lambda n: n != target.size), "elements given")
    value = draw(st.sampled_from([[0] * count, (0,) * count, np.zeros(count, bool)]), "value")
    error = assert_raises(ShapeMismatch, lambda: block.set(target, value), f"{count} elements for {target}")
    assert_says(error, device=kit.bound.name, hook="async_set_value", argument="value")
    for shape in (target.shape, (count,)):
        assert str(shape) in str(error), f"the text {str(error)!r} does not name the shape {shape}"
    block.check("a value of another shape was refused")


@guarantee(6)
@examples()
def test_g06_a_refusal_names_the_value_and_changes_nothing(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    target = block.view((3,), draw_dtype(draw, "dtype of the target"))
    bad = draw(scalars.filter(lambda item: converted(item, target.dtype) == REFUSED), "a value that is refused")
    at = draw(st.integers(0, 2), "its index")
    items: list[Any] = [True, False, True]
    items[at] = bad
    error = assert_raises(ConversionRefused, lambda: block.set(target, items), f"{bad!r} for {target.dtype}")
    assert_says(error, device=kit.bound.name, hook="async_set_value", argument="value")
    assert f"[{at}]" in str(error), f"the text {str(error)!r} does not name index [{at}]"
    block.check("a value of another class was refused")


WHAT_IS_NO_VALUE = [None, "3", b"3", 1j, object(), {1: 2}, {1}, [None], np.array(["a"]), np.array([1j]), [[1, 2], [3]]]


@guarantee(6)
def test_g06_what_is_no_value_is_refused(kit: Kit) -> None:
    block = Block(kit)
    for name in ("int64", "float32", "bool"):
        target = block.view((1,), dtype_of(name))
        for value in WHAT_IS_NO_VALUE:
            error = assert_raises(ConversionRefused, partial(block.set, target, value), f"{value!r}")
            assert_says(error, device=kit.bound.name, hook="async_set_value")
    block.check("values that are none were refused")


@guarantee(6)
def test_g06_the_whole_range_of_every_type_arrives(kit: Kit) -> None:
    block = Block(kit)
    for dtype in DTYPES:
        bits = 8 * dtype.itemsize
        edges = [0, 1, *(2**k for k in (bits // 2 - 1, bits // 2, bits - 1)), 2 ** (bits - 1) - 1, 2**bits - 1, -1]
        edges += [-value for value in edges]
        fits = [value for value in edges if converted(value, dtype) != REFUSED]
        for value in (fits, np.array(fits, dtype.storage) if dtype.name != "bfloat16" else tuple(fits)):
            block.set_if_convertible(block.view((len(fits),), dtype), value, fits)
            block.check(f"{fits} into {dtype}")


@guarantee(6)
def test_g06_float_edges_are_kept_rounded_or_refused(kit: Kit) -> None:
    block = Block(kit)
    edges = [math.nan, math.inf, -math.inf, -0.0, 65519.99, 65520.0, 3.4028235e38, 3.4028236e38, 1e-46, -1e-46, 1e308]
    for dtype in DTYPES:
        target = block.view((2,), dtype)
        for value in edges:
            block.set_if_convertible(target, [value, 1], [value, 1])
            block.check(f"{value!r} into {dtype}")


@guarantee(6)
def test_g06_arrays_are_converted_by_value_at_the_edges_of_every_type(kit: Kit) -> None:
    block = Block(kit)
    floats = [65519.0, 65520.0, 3.4028235e38, 3.4028236e38, -3.4028236e38, 1e308, math.inf, -math.inf, math.nan]
    for source in DTYPES:
        if source.kind == "bool" or source.name == "bfloat16":
            continue
        if source.kind == "int":
            limits = np.iinfo(source.storage)
            values = {int(limits.min), int(limits.max), *(2**k for k in range(1, limits.bits - 1, 2)), 0, 1}
            arrays = [np.array([value, 1], source.storage) for value in sorted(values)]
        else:
            with np.errstate(over="ignore"):
                arrays = [np.array([value, 1], source.storage) for value in floats]
        for dtype in DTYPES:
            target = block.view((2,), dtype)
            for array in arrays:
                block.set_if_convertible(target, array, array.tolist())
        block.check(f"arrays of {source}")


@guarantee(6)
@examples()
def test_g06_a_device_value_must_have_the_targets_type_and_count(kit: Kit, draw: Draw) -> None:
    block, source = Block(kit), Block(kit, fill=5)
    target = draw_view(draw, block.memory)
    value = source.view(tuple(draw(st.lists(st.integers(1, 3), max_size=2), "shape")), draw_dtype(draw, "its dtype"))
    if value.dtype is not target.dtype:
        error = assert_raises(ConversionRefused, lambda: block.set(target, value), f"{value} for {target}")
        assert_says(error, device=kit.bound.name, hook="async_set_value", argument="value")
    elif value.size != target.size:
        error2 = assert_raises(ShapeMismatch, lambda: block.set(target, value), f"{value} for {target}")
        assert_says(error2, device=kit.bound.name, hook="async_set_value", argument="value")
    else:
        arrive(block.set(target, value))
        block.expect_bytes(target, source.elements(value))
    block.check(f"async_set_value({target}, {value})")


def nans(name: str) -> Array:
    """Return words of NaNs: each single bit of the payload, its lowest and highest ones, all of it; both signs."""
    exponent, fraction = FLOATS[name]
    top, kind = ((1 << exponent) - 1) << fraction, words(dtype_of(name))
    payloads = {1 << bit for bit in range(fraction)} | {3, (1 << fraction) - 1, (1 << fraction - 1) - 1}
    found = [top | payload | sign for payload in sorted(payloads) for sign in (0, 1 << exponent + fraction)]
    return np.array(found, np.uint64).astype(kind)


@guarantee(6)
@pytest.mark.parametrize("name", FLOATS)
def test_g06_a_nan_of_any_payload_stays_one_in_every_type(kit: Kit, name: str) -> None:
    """A payload that the narrower type has no bits for, or that a rounding carries over, must not become infinity."""
    source, found = dtype_of(name), nans(name)
    for target in [dtype_of(other) for other in FLOATS if other != name]:
        values: dict[str, Any] = {"an array": given(found, source)}
        if name != "bfloat16":
            array = values["an array"]
            values |= {
                "a strided array": np.repeat(array, 3)[::3], "a reversed array": array[::-1].copy(),
                "a byte-swapped array": found.byteswap().view(array.dtype.newbyteorder()),
                "a list": list(array), "one element": array[0], "an array without axes": array[1].reshape(()),
            }  # fmt: skip
        block = LargeBlock(kit, 128 + 2 * len(found) * target.itemsize)
        for form, value in values.items():
            for step in (1, -2):
                place = 64 if step > 0 else 64 + 2 * (len(found) - 1) * target.itemsize
                view = View(block.memory, place, (len(found),), (step * target.itemsize,), target)
                arrive(block.set(view, value))
                got = backdoor.read(block.device, block.memory, block.stream)
                cells = np.ndarray(view.shape, words(target), got, view.offset, view.strides)
                exponent, fraction = FLOATS[target.name]
                wrong = np.flatnonzero(cells << np.uint64(1) <= (((1 << exponent) - 1) << fraction + 1))
                assert not len(wrong), (
                    f"{name} {found[wrong[0]]:#x}, a NaN, in {form} of {len(found)}, became {cells[wrong[0]]:#x} in"
                    f" {target.name}, which is none ({len(wrong)} are wrong)"
                )


FILLED = 140_007
"""Elements: more than two grids of 65,535, or a 16-bit index, count."""


@guarantee(6, also=(5,))
@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_g06_a_scalar_fills_every_element_of_a_large_target(kit: Kit, dtype: str) -> None:
    kind, block = dtype_of(dtype), LargeBlock(kit, 2 * FILLED * dtype_of(dtype).itemsize)
    item = kind.itemsize
    shapes = {
        "contiguous": ((FILLED,), (item,)),
        "of two axes": ((7, FILLED // 7), (FILLED // 7 * item, item)),
        "of every second element": ((FILLED,), (2 * item,)),
    }
    for number, (what, (shape, strides)) in enumerate(shapes.items()):
        block.write(View(block.memory, 0, shape, strides, kind), number + 1, kind.storage.type(number + 1))
        block.check(f"a scalar for a target of {np.prod(shape)} elements, {what}")


@guarantee(6, also=(5,))
@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_g06_a_scalar_fills_megabytes_to_the_last_byte(kit: Kit, dtype: str) -> None:
    """Contiguous, and nothing behind it: from some megabytes on a driver fills by another engine, or piece by piece."""
    kind = dtype_of(dtype)
    for turn, nbytes in enumerate(sizes(kit, "bytes of a fill")):
        block = LargeBlock(kit, nbytes + 2 * GAP * 8)
        target = block.at(8 * GAP, (-(-nbytes // kind.itemsize),), dtype)
        block.write(target, turn + 2, kind.storage.type(turn + 2))
        block.check(f"a scalar for {nbytes} bytes of {dtype}")


PARTS_ALIKE = {
    "uint16": (0x0100, 0x00FF, 0xFF00, 0x0101),
    "int32": (1 << 16, 0xFFFF, -(1 << 16), 0x01010101, 1 << 24, 0x00010001),
    "int64": (1 << 32, 0xFFFFFFFF, -(1 << 32), 0x0101010101010101, 0x01010101, 1 << 56, (1 << 32) + 1, 1 << 16),
    "float32": (2.0, -2.0, 1.0),
    "float64": (1.5, -2.0, 3.0),
}
"""Scalars of which some bytes, halves or words are equal, and others are not: a fill by a narrower pattern is wrong."""


@guarantee(6, also=(5,))
@pytest.mark.parametrize("dtype", PARTS_ALIKE)
def test_g06_a_large_fill_has_every_byte_of_its_scalar(kit: Kit, dtype: str) -> None:
    kind = dtype_of(dtype)
    for turn, count in enumerate((3, 9, 33, 300, 5_000, FILLED)):
        block = LargeBlock(kit, count * kind.itemsize + 4200)
        for number, value in enumerate(PARTS_ALIKE[dtype]):
            place = PLACES[(8 * turn + number) % len(PLACES)]
            block.write(block.at(place, (count,), dtype), value, kind.storage.type(value))
            block.check(f"{value!r} for {count} elements of {dtype} from byte {place}")


LATE: dict[str, tuple[str, str, Any]] = {
    "int32 past its end": ("int32", "int64", 1 << 31),
    "int32 by its low word": ("int32", "int64", 1 << 32),
    "uint8 below 0": ("uint8", "int64", -1),
    "int64 from uint64": ("int64", "uint64", 1 << 63),
    "uint64 below 0": ("uint64", "int64", -1),
    "int8 from int16": ("int8", "int16", 128),
    "bool from 2": ("bool", "int32", 2),
    "bool from 256": ("bool", "int64", 256),
    "float32 from an int that it has not": ("float32", "int64", (1 << 24) + 1),
    "bfloat16 from an int that it has not": ("bfloat16", "int32", 257),
    "float64 from an int that it has not": ("float64", "int64", (1 << 53) + 1),
    "float32 past its end": ("float32", "float64", 3.5e38),
    "float16 past its end": ("float16", "float32", -65520.0),
    "bfloat16 past its end": ("bfloat16", "float64", 3.4e38),
}
"""Description to the target's type, the value's, and an element that is refused among zeros and ones."""
COUNTS = (9, 4_097, 70_001)
FORMS: dict[str, Callable[[Array], Any]] = {
    **LAYOUTS,
    "host tensor": lambda array: HostTensor(array, array.dtype.name),
    "list": lambda array: array.tolist(),
    "tuple": lambda array: tuple(array.tolist()),
}
"""Containers of a value."""


@guarantee(6)
@pytest.mark.parametrize("what", LATE)
def test_g06_one_element_of_many_is_refused_wherever_it_is(kit: Kit, what: str) -> None:
    """By its index, and nothing is written; without it every element arrives."""
    into, source, bad = LATE[what]
    dtype, kind = dtype_of(into), dtype_of(source)
    assert converted(bad, dtype) == REFUSED, f"the kit's own oracle takes {bad!r} for {into}"
    ones = converted(1, dtype)
    assert isinstance(ones, bytes)
    for turn, count in enumerate(COUNTS):
        block = LargeBlock(kit, (count + 2) * dtype.itemsize)
        target = block.at(dtype.itemsize, (count,), into)
        good = (np.arange(count) % 3 == 1).astype(kind.storage)
        for number, (form, made) in enumerate(FORMS.items()):
            if count > COUNTS[1] and form in ("list", "tuple") and turn % 2:
                continue  # slow, and no other way than of fewer elements
            at = (0, count // 2, count - 1)[(turn + number) % 3]
            wrong = good.copy()
            wrong[at] = bad
            why = f"{what}: element {at} of {count}, in a {form}"
            error = assert_raises(ConversionRefused, partial(block.set, target, made(wrong)), why)
            assert_says(error, device=kit.bound.name, hook="async_set_value", argument="value")
            assert f"[{at}]" in str(error), f"{why}: the text {str(error)!r} does not name index [{at}]"
        block.check(f"{what}: one of {count} elements was refused")
        arrive(block.set(target, FORMS["host tensor"](good.copy())))
        cells = block.should[dtype.itemsize : (count + 1) * dtype.itemsize].reshape(count, -1)
        cells[...] = np.where(good[:, None].astype(bool), np.frombuffer(ones, np.uint8), 0)
        block.check(f"{what}: {count} elements that convert")


class Named(IntEnum):
    """An int by another class."""

    SEVEN = 7


class Measured(float):
    """A float by another class."""


def one_elements() -> Iterator[tuple[Any, Any]]:
    """Yield single values of every class, each with the Python value that it must be taken for."""
    for source in DTYPES:
        if source.name == "bfloat16":
            continue
        kind = source.storage
        items: list[Any] = [0, 1]
        if source.kind == "int":
            limits = np.iinfo(kind)
            items += [int(limits.min), int(limits.max), 100]
        elif source.kind == "float":
            items += [-0.0, 1.5, -2.0, float(np.finfo(kind).max), float("inf")]
        for item in items:
            scalar = kind.type(item)
            yield scalar, scalar.item()
            yield np.array(item, kind), scalar.item()
            yield np.array(item, kind.newbyteorder()), scalar.item()
    yield HostTensor(np.array(0x3FC0, np.uint16), "bfloat16"), 1.5
    yield HostTensor(np.array(-7, np.int32), "int32"), -7
    yield from ((Named.SEVEN, 7), (Measured(2.5), 2.5), (True, True), (7, 7), (-1.25, -1.25))


@guarantee(6)
@pytest.mark.parametrize("name", [dtype.name for dtype in DTYPES])
def test_g06_one_element_of_every_class_fills_or_is_refused(kit: Kit, name: str) -> None:
    """Scalars of Python and NumPy, arrays and tensors without axes, and subclasses."""
    dtype = dtype_of(name)
    count, item = 4, dtype.itemsize
    for number, (value, plain) in enumerate(one_elements()):
        if number % 40 == 0:
            block = Block(kit)
        at = PLACES[number % 13]
        target = View(block.memory, at, (count,), (item * (1 + number % 2) * (-1 if number % 5 == 0 else 1),), dtype)
        if target.strides[0] < 0:
            target = View(block.memory, at + (count - 1) * -target.strides[0], target.shape, target.strides, dtype)
        block.set_if_convertible(target, value, [plain] * count)
        block.check(f"{value!r} of {type(value).__name__} for {target}")


@guarantee(6)
@pytest.mark.parametrize("name", [dtype.name for dtype in DTYPES])
def test_g06_a_device_value_of_another_type_is_refused_for_its_width(kit: Kit, name: str) -> None:
    """Each other type, of which some have the target's width; also a value of more or fewer elements."""
    dtype, block, source = dtype_of(name), Block(kit), Block(kit, fill=3)
    target = block.view((4,), dtype)
    for other in DTYPES:
        if other is dtype:
            continue
        for value in (source.view((4,), other), source.view((4 * dtype.itemsize // other.itemsize,), other)):
            error = assert_raises(ConversionRefused, partial(block.set, target, value), f"{value} for {target}")
            assert_says(error, device=kit.bound.name, hook="async_set_value", argument="value")
    for shape in ((3,), (5,), (1,), (), (0,), (2, 4)):
        value = source.view(shape, dtype)
        error2 = assert_raises(ShapeMismatch, partial(block.set, target, value), f"{value} for {target}")
        assert_says(error2, device=kit.bound.name, hook="async_set_value", argument="value")
    block.check("device values of another type or count were refused")


SHAPES = (((2, 3), (6,)), ((2, 3), (3, 2)), ((2, 3), (1, 6, 1)), ((6,), (2, 3)), ((3, 2, 2), (4, 3)), ((), (1, 1)),
          ((1, 1), (1,)), ((4, 3), (2, 3, 2)), ((1, 7), (7, 1)))  # fmt: skip
"""Shapes of the target and of a value with as many elements."""


@guarantee(6, also=(5,))
@pytest.mark.parametrize("into", ["int64", "int16", "float32", "bool"])
def test_g06_a_value_of_another_shape_is_taken_in_row_major_order(kit: Kit, into: str) -> None:
    """Arrays of the target's type and another, in each layout, tensors and nested lists."""
    dtype, item = dtype_of(into), dtype_of(into).itemsize
    for turn, (shape, have) in enumerate(SHAPES):
        block = LargeBlock(kit, 1024)
        steps = [3 * item * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        targets = [block.at(PLACES[turn], shape, into), View(block.memory, 512 + turn, shape, tuple(steps), dtype)]
        for source in (dtype, dtype_of("int8") if into != "bool" else dtype):
            cells = np.arange(1, int(np.prod(have)) + 1).reshape(have) % (2 if into == "bool" else 100)
            array = cells.astype(source.storage)
            for form, made in FORMS.items():
                if form == "tuple":
                    continue
                for target in targets:
                    value = made(array) if form != "list" else cells.astype(dtype.storage).tolist()
                    arrive(block.set(target, value))
                    block.over(target)[...] = array.reshape(shape).astype(dtype.storage)
                block.check(f"a {form} of {source.name}{list(have)} for {into}{list(shape)}")
                for target in targets:
                    arrive(block.set(target, 0))
                    block.over(target)[...] = 0
