"""Memory that a caller may change or free once a call has returned: values, targets, plans (G2, G5)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.plan import SCATTER_MAP, WRITE, Records, WritePlan
from hal_core.memory.views import Memory, View

from .fixtures.large_blocks import GAP, LargeBlock
from .fixtures.stream_cases import copied
from .harness import backdoor
from .harness.backdoor import arrive, drain
from .harness.bits import FileMap, HostTensor, noise, on_page
from .harness.guarantees import guarantee
from .kit import Kit

MIB = 1 << 20

Given = Callable[[int], tuple[Any, Any]]


def _read_only(nbytes: int) -> tuple[Any, Any]:
    value = noise(10, nbytes)[...]
    value.flags.writeable = False
    return value, value.copy()


def _tensor(nbytes: int) -> tuple[Any, Any]:
    value = noise(13, nbytes)
    return HostTensor(value, "uint8"), value.copy()


def bytes_by(made: Callable[[Any], Any]) -> Given:
    """Return a form of a value, made of an array of bytes."""

    def given(nbytes: int) -> tuple[Any, Any]:
        value = made(noise(14, nbytes))
        return value, np.array(value, np.uint8)

    return given


GIVEN: dict[str, Given] = {
    "an array": bytes_by(np.copy),
    "an array on a page": bytes_by(on_page),
    "a file that is mapped to be read": bytes_by(FileMap.over),
    "an array over a bytearray": bytes_by(lambda data: np.frombuffer(bytearray(data), np.uint8)),
    "a byte-swapped array": bytes_by(lambda data: data.astype(">i8")),
    "an array with gaps": bytes_by(lambda data: np.repeat(data, 2)[::2]),
    "a read-only array": _read_only,
    "a part of an array": bytes_by(lambda data: np.pad(data, 1)[1:-1]),
    "rows in reverse": bytes_by(lambda data: data[::-1]),
    "a host tensor": _tensor,
    "an array of another type": bytes_by(lambda data: data.astype(np.int64)),
    "a list": bytes_by(np.ndarray.tolist),
}


SLOW = ("a list", "a byte-swapped array")


def spoil(value: Any) -> None:  # noqa: ANN401 (an array or a list)
    """Overwrite a value, as a caller may once the call has returned."""
    if isinstance(value, HostTensor):
        spoil(value.numpy())
    elif isinstance(value, list):
        value[:] = [0xEE] * len(value)
    elif isinstance(source := getattr(value.base, "obj", None), FileMap):
        source.writer[...] = 0xEE
    else:
        (value if value.flags.writeable else value.base)[...] = 0xEE


@guarantee(2)
@pytest.mark.parametrize("given", GIVEN)
def test_g02_a_large_value_may_be_changed_and_freed_after_the_call(kit: Kit, given: str) -> None:
    lengths = [256, 4096, 65_535, 65_536, 65_537] + ([] if given in SLOW else [MIB, 3 * MIB + 1])
    lengths += [9 * MIB + 1] if given == "an array" else []  # so large that a device may read it where it lies
    block, at = LargeBlock(kit, sum(lengths) + GAP * (len(lengths) + 1)), GAP
    tickets, recycled = [], []
    with kit.held(block.stream):
        for length in lengths:
            value, should = GIVEN[given](length)
            target = block.at(at, (length,))
            tickets.append(block.set(target, value))
            spoil(value)
            del value
            recycled += [np.full(length, 0xDD, np.uint8) for _ in range(2)]  # likely to reuse the freed memory
            block.over(target)[...] = should
            at += length + GAP
    for ticket in tickets:
        arrive(ticket)
    block.check(f"{given} of {lengths} bytes was changed and freed by its caller")


@guarantee(2, also=(22,))
def test_g02_the_array_of_a_copy_out_may_be_dropped_as_a_value(kit: Kit) -> None:
    """It lies in memory of the device's own, which later copies may use again."""
    for length in (256, 4096, 65_536, MIB):
        block, other = LargeBlock(kit, length), kit.device.stream()
        source = LargeBlock(kit, length, noise(16, length))
        copy: Any = copied(kit, source.memory, other)
        arrive(copy)
        with kit.held(block.stream):
            ticket = block.set(block.at(0, (length,)), copy.data[0][:length])
            del copy
            gc.collect()
            backdoor.write(kit.device, source.memory, 0, np.full(length, 0xDD, np.uint8), other)
            later = [copied(kit, source.memory, other) for _ in range(3)]
            for each in later:
                arrive(each)
        arrive(ticket)
        block.should[...] = source.should
        block.check(f"an array of a copy of {length} bytes was a value, and dropped by its caller")


FREED: dict[str, tuple[slice, slice]] = {
    "whole": (slice(None), slice(None)),
    "to every second element": (slice(None, None, 2), slice(None, None, 2)),
    "reversed": (slice(None), slice(None, None, -1)),
    "its second half": (slice(None, None, 2), slice(128, None)),
}
"""Parts of the target and of the value, of equal size for 256 elements."""


@guarantee(2)
@pytest.mark.parametrize("own", [False, True], ids=["default", "own"])
@pytest.mark.parametrize("way", FREED)
def test_g02_a_device_value_may_be_freed_once_the_call_has_returned(kit: Kit, way: str, own: bool) -> None:
    """Whichever stream reads it: the default stream's work may be long over."""
    into, of = FREED[way]
    for length in (256, 65_536, MIB + 8) if way == "whole" else (256,):
        block, other = LargeBlock(kit, 2 * length + 3 * GAP), kit.device.stream()
        block.stream = kit.device.stream() if own else kit.device.default_stream
        sources = [LargeBlock(kit, length, noise(10 + turn, length)) for turn in range(2)]
        with kit.held(block.stream):
            for turn in range(2):  # the second value's work must not release memory that the first one's uses
                target, source = block.at(GAP + turn * (length + GAP), (length,))[into], sources.pop(0)
                block.over(target)[...] = source.should[of]
                ticket = block.set(target, source.at(0, (length,))[of])
                del source
            gc.collect()
            others = [kit.device.allocate(length) for _ in range(3)]  # likely to reuse the freed memory
            for memory in others:
                backdoor.write(kit.device, memory, 0, np.full(length, 0xDD, np.uint8), other)
        arrive(ticket)
        block.check(f"two device values of {length} bytes, {way}, were freed by their caller")


@guarantee(2, requires=("tensors", "async_h2d", "can_hold_stream"))
@pytest.mark.parametrize("which", ["value", "target"])
def test_g02_a_tensor_may_be_dropped_once_the_call_has_returned(kit: Kit, which: str) -> None:
    """Its framework gives the memory to the next tensor, on a stream that does not wait for hal's."""
    stream, support = kit.device.stream(), kit.subject.support
    should, others = noise(15, MIB), np.full(MIB, 0xDD, np.uint8)
    block = LargeBlock(kit, MIB)
    mine: Any = support.tensor(kit.device, should if which == "value" else np.zeros(MIB, np.uint8))
    drain(kit.device.default_stream)
    with kit.held(stream):
        target, value = (block.at(0, (MIB,)), mine) if which == "value" else (mine, should)
        ticket = kit.bound.async_set_value(target=target, value=value, stream=stream)
        del mine, target, value
        gc.collect()
        made = [support.tensor(kit.device, others) for _ in range(3)]
    arrive(ticket)
    if which == "value":
        block.over(block.at(0, (MIB,)))[...] = should
        block.check("a tensor was dropped by its caller, and new ones were made in its memory")
    for tensor in made:
        assert (support.values_of(kit.device, tensor) == others).all(), "a tensor was written in place of a dropped one"


ONTO_FREED: dict[str, Callable[[Kit, int], tuple[slice, Any]]] = {
    "an array": lambda kit, length: (slice(None), noise(11, length)),
    "a scalar": lambda kit, length: (slice(None), 7),
    "every second element": lambda kit, length: (slice(None, None, 2), noise(11, length // 2)),
    "a device value": lambda kit, length: (slice(None), LargeBlock(kit, length, noise(11, length)).at(0, (length,))),
}
"""Parts of a target, and values for them."""


@guarantee(5)
@pytest.mark.parametrize("way", ONTO_FREED)
def test_g05_a_target_that_was_freed_is_not_written_where_others_are_now(kit: Kit, way: str) -> None:
    stream, other = kit.device.default_stream, kit.device.stream()
    for length in (256, 65_536, MIB + 8) if way == "an array" else (256, 65_536):
        part, value = ONTO_FREED[way](kit, length)
        memory: Memory | None = kit.device.allocate(length)
        assert memory is not None
        with kit.held(stream):
            view: Any = View.contiguous(memory, 0, (length,), dtype_of("uint8"))
            kit.bound.async_set_value(target=view[part], value=value, stream=stream)
            memory = view = value = None
            gc.collect()
            others = [kit.device.allocate(length) for _ in range(3)]
            for block in others:
                backdoor.write(kit.device, block, 0, backdoor.poisoned(length), other)
        for block in others:
            got = backdoor.read(kit.device, block, stream)
            wrong = np.flatnonzero(got != backdoor.POISON)
            assert not len(wrong), f"byte {wrong[0]} of other memory is {got[wrong[0]]:#x}: a freed target's value"


@guarantee(2)
def test_g02_a_large_plan_may_be_changed_once_it_was_submitted(kit: Kit) -> None:
    rng = np.random.default_rng(12)
    lengths = np.concatenate([rng.integers(1, 9, 70_001), rng.integers(1, 9000, 300), [3 * MIB + 5]])
    pieces = [noise(13, int(lengths.sum()))]
    cuts = [0, 5, 4096, 65_537, MIB + 1, pieces[0].nbytes]
    pieces = [on_page(pieces[0][low:high]) for low, high in pairwise(cuts)]
    width, count = 5000, 300
    block = LargeBlock(kit, count * width + int((lengths + 3).sum()) + 64)
    data = on_page(noise(14, count * width).reshape(count, width))
    slots = rng.permutation(count).astype(np.int32)
    records = Records(slots, data, np.array([(0, width, 0, 3), (8, width, 3, width - 8)], SCATTER_MAP))
    rows = np.zeros(len(lengths), WRITE)
    rows["nbytes"], rows["dst"] = lengths, count * width + np.cumsum(lengths + 3) - lengths
    rows["source"] = np.cumsum(lengths) - lengths
    joined = np.concatenate(pieces)
    for dst, begin, nbytes in rows[["dst", "source", "nbytes"]].tolist():
        block.should[dst : dst + nbytes] = joined[begin : begin + nbytes]
    places = block.should[: count * width].reshape(count, width)
    places[slots, :3] = data[:, :3]
    places[slots, 8:] = data[:, 3 : width - 5]
    order = rng.permutation(len(rows))
    plan = WritePlan(block.memory, rows[order], pieces, records)
    with kit.held(block.stream):
        ticket = kit.device.submit(plan, block.stream)
        for array in (*pieces, data):
            array[...] = 0xEE
        slots[...] = 0
        plan.writes["nbytes"] = 0
    arrive(ticket)
    block.check(f"a plan of {len(rows)} writes and {count} records was changed by its caller")
