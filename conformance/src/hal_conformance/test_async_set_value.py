"""``async_set_value``: G1, G2, G4 and G5; G3 and G7 are in ``test_mode.py``, G6 in ``test_conversion.py``."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hal_core import Support
from hal_core.errors import InvalidValue
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hypothesis import strategies as st

from .draw.values import contained, fitting
from .draw.views import draw_view
from .fixtures.block import Block
from .harness import backdoor
from .harness.asserts import assert_raises, assert_says
from .harness.backdoor import arrive, drain
from .harness.guarantees import guarantee
from .kit import Draw, Kit, examples


def choose_stream(kit: Kit, draw: Draw, block: Block) -> None:
    """Make the block's calls on a stream of its own, or on the default one as before."""
    if draw(st.booleans(), "on a stream of its own"):
        block.stream = kit.device.stream()


def draw_write(draw: Draw, block: Block) -> tuple[Any, Any, list[Any]]:
    """Return a target, a value that fits it, and the expected elements."""
    target = draw_view(draw, block.memory)
    elements = st.integers(0, 1) | st.booleans() if target.dtype.kind == "bool" else st.integers(0, 100)
    if draw(st.booleans(), "a scalar"):
        value = draw(elements, "value")
        return target, value, [value] * target.size
    items = draw(st.lists(elements, min_size=target.size, max_size=target.size), "elements")
    return target, contained(draw, items, target.shape), items


@guarantee(1)
@examples()
def test_g01_later_work_on_the_stream_sees_the_value(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    target, value, items = draw_write(draw, block)
    choose_stream(kit, draw, block)
    ticket = block.set(target, value)
    seen_by_the_stream = backdoor.read(kit.device, block.memory, block.stream)
    arrive(ticket)
    block.expect(target, items)
    block.compare(seen_by_the_stream, "async_set_value, read on its stream")


@guarantee(1)
@examples(0.5)
def test_g01_the_host_sees_the_value_after_the_ticket_was_waited_for(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    target, value, items = draw_write(draw, block)
    choose_stream(kit, draw, block)
    arrive(block.set(target, value))
    seen_by_another_stream = backdoor.read(kit.device, block.memory, kit.device.stream())
    block.expect(target, items)
    block.compare(seen_by_another_stream, "ticket.wait(), read on an independent stream")


@guarantee(2)
@examples()
def test_g02_the_caller_may_change_the_value_once_the_call_has_returned(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    target = draw_view(draw, block.memory)
    items = draw(st.lists(st.integers(0, 1), min_size=target.size, max_size=target.size), "elements")
    value: Any = np.array(items, target.dtype.storage if target.dtype.name != "bfloat16" else "float32")
    value = value.reshape(target.shape) if draw(st.booleans(), "an array") else value.tolist()
    choose_stream(kit, draw, block)
    with kit.held(block.stream):
        ticket = block.set(target, value)
        if isinstance(value, np.ndarray):
            value[...] = 1 - value.astype("int8")
        else:
            value[:] = [99] * len(value)
        del value
    arrive(ticket)
    block.expect(target, items)
    block.check("the value was overwritten by its caller")


@guarantee(4)
@examples()
def test_g04_calls_on_one_stream_take_effect_in_order(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    choose_stream(kit, draw, block)
    tickets = []
    with kit.held(block.stream):
        for _ in range(draw(st.integers(2, 6), "writes")):
            target, value, items = draw_write(draw, block)
            tickets.append(block.set(target, value))
            block.expect(target, items)
    for ticket in tickets:
        arrive(ticket)
    block.check("writes that overlap")


@guarantee(5)
@examples(2.0)
def test_g05_not_one_byte_outside_the_target_changes(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    target, value, items = draw_write(draw, block)
    choose_stream(kit, draw, block)
    arrive(block.set(target, value))
    block.expect(target, items)
    block.check(f"async_set_value({target}, {value!r})")


@guarantee(5)
@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3,), (0,)), ((2, 4), (0, 4)), ((4, 2), (4, 0)), ((3, 4), (8, 4)), ((5,), (2,)), ((3, 3), (4, -4))],
    ids=["expanded-scalar", "expanded-rows", "expanded-columns", "windows", "half-elements", "antidiagonals"],
)
@pytest.mark.parametrize("value", ["scalar", "array", "device"])
def test_g05_a_target_whose_elements_share_memory_is_refused(
    kit: Kit, shape: tuple[int, ...], strides: tuple[int, ...], value: str
) -> None:
    """The result on such a target would depend on the order of the writes, which is undefined."""
    block, source = Block(kit), Block(kit, fill=3)
    int32 = dtype_of("int32")
    target = View(block.memory, 64, shape, strides, int32)
    given = {"scalar": 7, "array": np.ones(shape, np.int32), "device": source.view(shape, int32)}[value]
    error = assert_raises(InvalidValue, lambda: block.set(target, given), f"a target of strides {strides}")
    assert_says(error, device=kit.bound.name, hook="async_set_value", argument="target")
    assert "overlapping elements" in str(error), f"{error} does not name the overlapping elements"
    block.check("a target with overlapping elements was refused")


@guarantee(5)
@examples()
def test_g05_an_array_of_the_targets_type_lands_element_by_element(kit: Kit, draw: Draw) -> None:
    block = Block(kit)
    target = draw_view(draw, block.memory)
    items = draw(st.lists(fitting(target.dtype), min_size=target.size, max_size=target.size), "elements")
    choose_stream(kit, draw, block)
    block.set_if_convertible(target, contained(draw, items, target.shape), items)
    block.check(f"async_set_value({target}, {items})")


@guarantee(5, requires="tensors")
@examples()
def test_g05_a_tensor_of_the_framework_is_written_where_it_is(kit: Kit, draw: Draw) -> None:
    support = kit.subject.support
    full = np.arange(60, dtype=draw(st.sampled_from(["int64", "float32", "int32", "uint8"]), "dtype")).reshape(3, 4, 5)
    should = full.copy()
    tensor = support.tensor(kit.device, full)
    rows = draw(st.slices(3).filter(lambda part: usable(part, support)), "rows")
    columns = draw(st.slices(5).filter(lambda part: usable(part, support)), "columns")
    target: Any = tensor[rows, 1, columns]  # type: ignore[index]  # every framework's tensors slice like NumPy's
    should[rows, 1, columns] = 77
    arrive(kit.bound.async_set_value(target=target, value=77, stream=kit.device.default_stream))
    got = support.values_of(kit.device, tensor)
    assert (got == should).all(), f"a tensor's slice [{rows}, 1, {columns}] set to 77 gives\n{got}\nnot\n{should}"


def usable(part: slice, support: Support) -> bool:
    """Return whether the framework's tensors can be sliced so."""
    return support.reversed_views or part.step is None or part.step > 0


FOLDED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "sliding windows": ((5, 4), (1, 1)),
    "windows that overlap by half": ((3, 4), (2, 1)),
    "windows that share one element": ((2, 3, 3), (9, 2, 1)),
    "one row for all": ((3, 4), (0, 1)),
    "one element for all": ((6,), (0,)),
}
"""Shape and strides, in elements, of views of a tensor in which two elements share memory."""


def folded(tensor: Any, what: str) -> Any:  # noqa: ANN401 (a framework's tensor)
    """Return such a view of a flat tensor of int64, made as its framework makes it."""
    shape, strides = FOLDED[what]
    if isinstance(tensor, np.ndarray):
        return np.lib.stride_tricks.as_strided(tensor, shape, [8 * stride for stride in strides])
    if isinstance(tensor, View):
        return View(tensor.memory, tensor.offset, shape, tuple(8 * stride for stride in strides), tensor.dtype)
    if isinstance(view := getattr(tensor, "view", None), View):  # a tensor that is little more than a view
        return type(tensor)(folded(view, what))
    if not hasattr(tensor, "as_strided"):
        pytest.skip(f"{type(tensor).__name__} has no as_strided, so no tensor of it has elements that share memory")
    return tensor.as_strided(list(shape), list(strides))


@guarantee(5, requires="tensors", also=(26,))
@pytest.mark.parametrize("what", FOLDED)
def test_g05_a_tensor_whose_elements_share_memory_is_refused(kit: Kit, what: str) -> None:
    """By every class of values, on each kind of stream, and also once the same tensor was written as a whole."""
    device, support, should = kit.device, kit.subject.support, np.arange(32, dtype=np.int64)
    tensor: Any = support.tensor(device, should.copy())
    shape = FOLDED[what][0]
    values: dict[str, Any] = {
        "a scalar": 7,
        "an array": np.full(shape, 8),
        "a list": np.full(shape, 9).tolist(),
        "a tensor": support.tensor(device, np.full(shape, 10)),
    }
    for turn, stream in enumerate((device.default_stream, device.stream())):
        for case, value in values.items():
            target = folded(tensor, what)
            call = partial(kit.bound.async_set_value, target=target, value=value, stream=stream)
            error = assert_raises(InvalidValue, call, f"{case} for {what} of a tensor")
            assert_says(error, device=kit.bound.name, hook="async_set_value", argument="target")
        drain(stream)
        got = support.values_of(device, tensor)
        assert (got == should).all(), f"{what} of a tensor were refused as a target, and it holds {got.tolist()}"
        should = should + 100 * (turn + 1)
        arrive(kit.bound.async_set_value(target=tensor, value=should.copy(), stream=stream))
    got = support.values_of(device, tensor)
    assert (got == should).all(), f"a tensor was set as a whole after {what} of it were refused: {got.tolist()}"
