"""``async_set_value``: conversion of values (G6), compared with exact arithmetic."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hal_core.errors import ConversionRefused, ShapeMismatch
from hal_core.memory.dtypes import DTYPES, dtype_of
from hal_core.memory.views import View
from hypothesis import strategies as st

from .draw.values import LAYOUTS, contained, draw_dtype, fitting, of_dtype, scalars
from .draw.views import draw_view
from .fixtures.block import Block
from .fixtures.large_blocks import LargeBlock
from .harness import backdoor
from .harness.asserts import assert_raises, assert_says
from .harness.backdoor import arrive
from .harness.bits import FLOATS, Array, given, words
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
    for number, (told, (shape, strides)) in enumerate(shapes.items()):
        block.write(View(block.memory, 0, shape, strides, kind), number + 1, kind.storage.type(number + 1))
        block.check(f"a scalar for a target of {np.prod(shape)} elements, {told}")


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
    for count in (300, 5_000, FILLED):
        block = LargeBlock(kit, count * kind.itemsize)
        for value in PARTS_ALIKE[dtype]:
            block.write(block.at(0, (count,), dtype), value, kind.storage.type(value))
            block.check(f"{value!r} for {count} elements of {dtype}")
