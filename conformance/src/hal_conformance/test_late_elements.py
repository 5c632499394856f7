"""Conversion of many elements of which one is refused, single elements of every class, device values by width (G6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import pytest
from hal_core.errors import ConversionRefused, ShapeMismatch
from hal_core.memory.dtypes import DTYPES, dtype_of
from hal_core.memory.views import View

from .draw.values import LAYOUTS
from .fixtures.block import Block
from .fixtures.large_blocks import LargeBlock
from .harness.asserts import assert_raises, assert_says
from .harness.backdoor import arrive
from .harness.bits import Array, HostTensor
from .harness.guarantees import guarantee
from .kit import Kit
from .oracle.values import REFUSED, converted

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
    whole, item = 4, dtype.itemsize
    for number, (value, plain) in enumerate(one_elements()):
        if number % 40 == 0:
            block = Block(kit)
        at = item * (1 + number % 3)
        target = View(block.memory, at, (whole,), (item * (1 + number % 2) * (-1 if number % 5 == 0 else 1),), dtype)
        if target.strides[0] < 0:
            target = View(block.memory, at + (whole - 1) * -target.strides[0], target.shape, target.strides, dtype)
        block.set_if_convertible(target, value, [plain] * whole)
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
    for shape, have in SHAPES:
        block = LargeBlock(kit, 1024)
        steps = [3 * item * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        targets = [block.at(64, shape, into), View(block.memory, 512, shape, tuple(steps), dtype)]
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
