"""Values bit for bit (G5, G6): NaNs, infinities, denormals, signed zeros and sub-word elements, in every form.

The forms of a value: a scalar, a list, arrays, tensors and device values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hal_core.memory.dtypes import DTYPES, DType, dtype_of
from hal_core.memory.views import View

from .fixtures.large_blocks import LargeBlock
from .harness import backdoor
from .harness.backdoor import arrive
from .harness.bits import CLASSES, FLOATS, Array, classes, given, noise, patterns, to_bfloat16, words
from .harness.guarantees import guarantee
from .harness.reached import Reached
from .kit import Kit
from .oracle.values import NAN, REFUSED, converted, same

VALUE_CONTAINERS = (
    "array", "tensor", "array of two axes", "array with gaps", "reversed array", "byte-swapped array",
    "device value", "strided device value",
)  # fmt: skip
FORMS = ("contiguous", "odd places", "every second", "backwards", "columns")


def forms(block: LargeBlock, count: int, dtype: DType) -> dict[str, View]:
    """Return targets for so many elements (an even number)."""
    item = dtype.itemsize
    return {
        "contiguous": block.at(64, (count,), dtype.name),
        "odd places": block.at(64 + item, (count,), dtype.name),
        "every second": View(block.memory, 64, (count,), (2 * item,), dtype),
        "backwards": View(block.memory, 64 + (count - 1) * 3 * item, (count,), (-3 * item,), dtype),
        "columns": View(block.memory, 64, (2, count // 2), (item, 3 * item), dtype),
    }


def value_in(container: str, found: Array, dtype: DType, target: View, source: LargeBlock) -> Any:  # noqa: ANN401
    """Return these words as a value of the type in one form; None if NumPy has no such array."""
    if container in ("device value", "strided device value"):
        step = dtype.itemsize * (1 if container == "device value" else -2)
        begin = 0 if step > 0 else (len(found) - 1) * -step
        view = View(source.memory, begin, (len(found),), (step,), dtype)
        source.over(view)[...] = found.view(dtype.storage)
        backdoor.write(source.device, source.memory, 0, source.should, source.stream)
        return view if target.shape == view.shape or step > 0 else None
    if container == "tensor":
        return given(found.reshape(target.shape), dtype) if dtype.name == "bfloat16" else None
    array = given(found, dtype)
    if container == "array" or dtype.name == "bfloat16":
        return array if container == "array" else None
    if container == "byte-swapped array":
        return found.byteswap().view(array.dtype.newbyteorder())
    if container == "array of two axes":
        return array.reshape(2, -1)
    return np.repeat(array, 2)[::2] if container == "array with gaps" else array[::-1].copy()[::-1]


@guarantee(5, also=(6,))
@pytest.mark.parametrize("name", [dtype.name for dtype in DTYPES])
def test_g05_every_bit_pattern_arrives_as_it_is_in_every_container(kit: Kit, name: str) -> None:
    for form in FORMS:
        in_every_container(kit, dtype_of(name), [form])


def in_every_container(kit: Kit, dtype: DType, into: Sequence[str]) -> None:
    """Write bit patterns of a type in each form of value to these forms of targets."""
    __tracebackhide__ = True
    name = dtype.name
    every, some = patterns(dtype), patterns(dtype, every=False)
    every, some = every[: len(every) // 2 * 2], some[: len(some) // 2 * 2]
    block, source = LargeBlock(kit, 192 + max(every.nbytes + 64, 3 * some.nbytes)), LargeBlock(kit, 2 * every.nbytes)
    skipped = {"tensor"} if name != "bfloat16" else {*VALUE_CONTAINERS[2:6]}
    reached = Reached(
        [f"{container}, {form}" for container in VALUE_CONTAINERS for form in into if container not in skipped]
    )
    for form in into:
        found = every if form == FORMS[0] else some  # each pattern once per form of value, and the edges everywhere
        target = forms(block, len(found), dtype)[form]
        for turn, container in enumerate(VALUE_CONTAINERS):
            mixed = np.roll(found, 1 + turn)  # another element in each place than before
            value = value_in(container, mixed, dtype, target, source)
            if value is None:
                if container == "strided device value":
                    reached.note(f"{container}, {form}")  # with another shape it may be refused
                continue
            arrive(block.set(target, value))
            block.over(target).view(words(dtype))[...] = mixed.reshape(target.shape)
            block.check(f"{len(found)} bit patterns of {name} in a {container} to {form}")
            reached.note(f"{container}, {form}")
    reached.check()
    if name in FLOATS:
        few = {kind: count for kind, count in classes(some, dtype).items() if count < 2}
        assert not few, f"the patterns of {name} have too few of {few}"


def singles(name: str) -> dict[str, list[int]]:
    """Return positive patterns of a type by class of data; each is used with both signs."""
    exponent, fraction = FLOATS[name]
    top, quiet = ((1 << exponent) - 1) << fraction, 1 << (fraction - 1)
    one = ((1 << (exponent - 1)) - 1) << fraction
    return {
        "quiet NaN": [top | quiet, top | quiet | quiet >> 1 | 5],
        "signalling NaN": [top | 1, top | quiet >> 1],
        "infinity": [top],
        "denormal": [1, (1 << fraction) - 1],
        "zero": [0],
        "finite": [1 << fraction, one | 1, top - 1],
    }


@guarantee(5, also=(6,))
@pytest.mark.parametrize("name", FLOATS)
def test_g05_a_single_element_keeps_its_bits_and_fills_with_them(kit: Kit, name: str) -> None:
    """Write single elements of every class, as scalars, arrays without axes and device values."""
    __tracebackhide__ = True
    dtype, reached = dtype_of(name), Reached(CLASSES)
    kind, bits = words(dtype), 8 * dtype.itemsize
    block, source = LargeBlock(kit, CONTAINERS * PART), LargeBlock(kit, 64)
    for what, some in singles(name).items():
        for pattern in some:
            for signed in (pattern, pattern | 1 << (bits - 1)):
                word = np.array([signed], kind)
                for part, value in enumerate(one_element(word, dtype, source)):
                    for target in single_targets(block, part * PART, dtype):
                        if isinstance(value, View) and target.size != 1:
                            continue  # a device value does not fill
                        arrive(block.set(target, value))
                        block.over(target).view(kind)[...] = word[0]
                block.check(f"{name} {signed:#x} ({what}) was given in {CONTAINERS} ways, {PART} bytes apart")
                clear(block)
                reached.note(what)
    reached.check()


PART, CONTAINERS = 2048, 3
"""Bytes for the targets of one container of a value, and the number of containers: each is checked beside the other
targets."""


def single_targets(block: LargeBlock, begin: int, dtype: DType) -> list[View]:
    """Return targets of one element and of several, contiguous and not, starting at byte ``begin``."""
    name, item = dtype.name, dtype.itemsize
    return [
        block.at(begin + 64, (), name), block.at(begin + 128 + item, (1,), name), block.at(begin + 256, (33,), name),
        View(block.memory, begin + 1024, (20,), (3 * item,), dtype),
        View(block.memory, begin + 1600, (3, 5), (13 * item, -2 * item), dtype),
    ]  # fmt: skip


def clear(block: LargeBlock) -> None:
    """Write poison again, so that the next write is noticed."""
    block.should[...] = backdoor.POISON
    block.any_nan.clear()
    backdoor.write(block.device, block.memory, 0, block.should, block.stream)


def one_element(word: Array, dtype: DType, source: LargeBlock) -> Iterator[Any]:
    """Yield one element in each container that keeps its bits."""
    if dtype.name != "bfloat16":
        array = word.view(dtype.storage)
        yield array[0]
        yield array.reshape(())
    source.should[: word.nbytes] = word.view(np.uint8)
    backdoor.write(source.device, source.memory, 0, source.should, source.stream)
    yield source.at(0, (1,), dtype.name)


LISTED = {
    "quiet NaN": [float("nan"), -float("nan")],
    "infinity": [float("inf"), -float("inf")],
    "zero": [0.0, -0.0],
    "denormal": [5e-324, -2.0**-149, 2.0**-148 * 1.5, 2.0**-133, -(2.0**-130) * 1.25, 2.0**-24, -(2.0**-20),
                 2.0**-1070],
    "finite": [1.0, -1.5, 2.0**-14, 65504.0, -(2.0**-126), 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-30,
               1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-24, 1 + 3 * 2.0**-24, 1 + 2.0**-24 + 2.0**-50, 0.1, -2.0**15],
}  # fmt: skip
"""Python floats of each class, including ties and values beside ties for each type's rounding."""


@guarantee(6)
@pytest.mark.parametrize("name", FLOATS)
def test_g06_python_floats_of_every_class_are_kept_or_rounded_once(kit: Kit, name: str) -> None:
    dtype, reached = dtype_of(name), Reached(LISTED)
    block = LargeBlock(kit, CONTAINERS * PART)
    items = [item for some in LISTED.values() for item in some if converted(item, dtype) != REFUSED]
    containers: list[Any] = [
        items, tuple(items), [items], np.array(items), [np.float64(item) for item in items],
        np.array(items)[None, ::-1][:, ::-1],
    ]  # fmt: skip
    targets = [
        block.at(64, (len(items),), name),
        View(block.memory, 1800, (len(items),), (-3 * dtype.itemsize,), dtype),
    ]
    for target in targets:
        for value in containers:
            arrive(block.set(target, value))
            block.expect(target, items)
            block.check(f"{items} as {type(value).__name__} in {target}")
            clear(block)
    for what, some in LISTED.items():
        for item in some:
            if converted(item, dtype) == REFUSED:
                continue
            for part, value in enumerate((item, np.float64(item), np.array(item))):
                filled = View(block.memory, part * PART + 200, (4, 3), (9 * dtype.itemsize, dtype.itemsize), dtype)
                arrive(block.set(filled, value))
                block.expect(filled, [item] * 12)
            block.check(f"{item!r} was given in {CONTAINERS} ways, {PART} bytes apart, to fill a target")
            clear(block)
            reached.note(what)
    reached.check()


@guarantee(6)
def test_g06_float32_becomes_bfloat16_to_nearest_with_ties_to_even(kit: Kit) -> None:
    single, half = dtype_of("float32"), dtype_of("bfloat16")
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    ends = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    found = (upper[:, None] | ends).reshape(-1)
    exponent = (found >> np.uint32(23)) & np.uint32(0xFF)
    stays = (to_bfloat16(found) & np.uint16(0x7FFF)) < 0x7F80  # the other values must be refused
    found = found[(exponent != 0xFF) & stays]
    block = LargeBlock(kit, 128 + 6 * len(found))
    for target in (block.at(64, (len(found),), "bfloat16"), View(block.memory, 64, (len(found),), (6,), half)):
        block.write(target, found.view(np.float32), to_bfloat16(found))
        block.check(f"{len(found)} float32 values, all upper halves with six lower ones each, in bfloat16")
        clear(block)
    sample = found[:: len(found) // 300]  # the kit's two oracles must agree
    for word in sample:
        should = converted(float(word.view(np.float32)), half)
        assert should == to_bfloat16(word.reshape(1)).tobytes(), f"the kit's own oracles differ at {word:#x}"
    assert classes(found, single)["denormal"] > 1000, "no denormals were among them"


@guarantee(6)
@pytest.mark.parametrize("name", FLOATS)
def test_g06_bfloat16_widens_to_what_it_is(kit: Kit, name: str) -> None:
    dtype, found = dtype_of(name), patterns(dtype_of("bfloat16"))
    value = (found.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(all="ignore"):
        narrow = value.astype(np.float16 if name == "float16" else np.float64)
    fits = np.isfinite(narrow) | ~np.isfinite(value)
    found, value = found[fits], value[fits]
    block = LargeBlock(kit, 128 + len(found) * dtype.itemsize)
    target = block.at(64, (len(found),), name)
    arrive(block.set(target, given(found, dtype_of("bfloat16"))))
    got = backdoor.read(kit.device, block.memory, block.stream)[64 : 64 + len(found) * dtype.itemsize]
    for word, item, have in zip(found[::97], value[::97].tolist(), got.reshape(len(found), -1)[::97], strict=True):
        should = word.tobytes() if name == "bfloat16" else converted(item, dtype)
        right = have.tobytes() == should if name == "bfloat16" or should != NAN else same(have.tobytes(), should, dtype)
        assert right, f"bfloat16 {word:#06x} became {have.tobytes().hex()} in {name}, not {should!r}"


# -- sub-word elements --------------------------------------------------------------------------------------------


@guarantee(5)
@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_g05_elements_of_every_width_keep_their_neighbours(kit: Kit, item: int) -> None:
    name = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "float64"}[item]
    dtype, counts = dtype_of(name), range(1, 40 // item)
    reached = Reached(f"{place} bytes past a boundary of 16" for place in range(0, 16, item))
    for way in ("array", "scalar"):
        block = LargeBlock(kit, (16 // item) * len(counts) * 80 + 80)
        at = 16
        for place in range(0, 16, item):
            for count in counts:
                target = block.at(at + place, (count,), name)
                word = (np.arange(count) * 37 + place + 1).astype(words(dtype))
                if way == "scalar":
                    value: Any = float(1 + place % 3)
                    value = value if item > 1 else int(value)
                    word[...] = int.from_bytes(cast(bytes, converted(value, dtype)), "little")
                else:
                    value = given(word, dtype)
                block.set(target, value)
                block.over(target).view(words(dtype))[...] = word
                at += 80
            reached.note(f"{place} bytes past a boundary of 16")
        block.check(f"{name} elements, by way of an {way}, at every place of a line")
    reached.check()


LINE = 16
"""Bytes of neighbours: few, as checking the order of some devices is costly while much work is pending."""


@guarantee(5)
def test_g05_neighbours_in_one_word_may_be_written_one_after_the_other(kit: Kit) -> None:
    block = LargeBlock(kit, 512)
    rng = np.random.default_rng(3)
    kinds = [dtype for dtype in DTYPES if dtype.itemsize < 8 and dtype.kind != "bool"]
    tickets = []
    with kit.held(block.stream):
        for dtype in kinds:
            places = rng.permutation(LINE // dtype.itemsize)
            for place in places.tolist():
                target = block.at(64 + place * dtype.itemsize, (1,), dtype.name)
                word = rng.integers(0, 256, dtype.itemsize, np.uint8).view(words(dtype))
                tickets.append(block.set(target, given(word, dtype)))
                block.over(target).view(words(dtype))[...] = word
                if place % 3 == 0:  # a write over half of the previous one, and its neighbour
                    half = block.at(target.offset + dtype.itemsize // 2, (1,), "uint8")
                    tickets.append(block.set(half, 7))
                    block.over(half)[...] = 7
    for ticket in tickets:
        arrive(ticket)
    block.check("neighbours of one word were written one by one, on a stream that was held")


@guarantee(5, requires=("async_h2d", "can_hold_stream"), also=(1, 4))
@pytest.mark.parametrize("way", ["array", "scalar", "device value"])
def test_g05_neighbours_in_one_word_may_be_written_on_two_streams(kit: Kit, way: str) -> None:
    """What waits on a held stream must not bring back what its neighbours were at its call."""
    cases = [(place, nbytes) for place in (0, 1, 2, 3, 5, 15) for nbytes in (1, 2, 3, 5, 9, 17, 33)]
    block, source, other = LargeBlock(kit, 128 * len(cases)), LargeBlock(kit, 64, noise(3, 64)), kit.device.stream()
    tickets = []
    with kit.held(block.stream, f"a {way}, or a write of its neighbours on another stream"):
        for turn, (place, nbytes) in enumerate(cases):
            target = block.at(128 * turn + 64 + place, (nbytes,))
            value = {"array": noise(turn, nbytes), "scalar": turn, "device value": source.at(turn % 7, (nbytes,))}[way]
            tickets.append(block.set(target, value))
            block.over(target)[...] = source.over(value) if isinstance(value, View) else value
        for turn, (place, nbytes) in enumerate(cases):
            for at, length in ((place - 3, 3), (place + nbytes, 1 + turn % 9)):
                beside, value = block.at(128 * turn + 64 + at, (length,)), noise(3 * turn, length)
                last = kit.bound.async_set_value(target=beside, value=value, stream=other)
                block.over(beside)[...] = value
        arrive(last, "a write of neighbours on another stream")
    for ticket in tickets:
        arrive(ticket)
    block.check(f"a {way} was written on a held stream, and its neighbours on another one")
