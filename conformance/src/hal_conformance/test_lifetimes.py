"""Tickets, sources and values that are held, dropped or changed while work on them is pending."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View

from .fixtures.stream_cases import copied
from .harness import backdoor
from .harness.backdoor import arrive
from .harness.bits import noise
from .harness.guarantees import guarantee
from .harness.waiters import come_true, stay_done
from .kit import Kit

HELD = ("async_h2d", "async_d2h", "can_hold_stream")
MANY = 1500
"""Calls that follow a ticket which is held: more than any ring of events has."""
BLOCK = 1 << 16
DROPPED = 12
"""Sources dropped under pending copies: more than a short list of freed memory holds."""


@guarantee(22, requires=HELD, also=(23, 26))
def test_g22_a_copys_source_may_be_dropped_while_it_is_pending(kit: Kit) -> None:
    """Its memory is nobody's until the copy has been made, however much is dropped, allocated and written meanwhile."""
    device = kit.device
    held, other = device.stream(), device.stream()
    should = [noise(seed, BLOCK) for seed in range(DROPPED)]
    gc.collect()
    gc.freeze()  # a dozen collections of everything would take a busy machine longer than a stream may be held
    sources = [device.allocate(BLOCK) for _ in should]
    for memory, data in zip(sources, should, strict=True):
        backdoor.write(device, memory, 0, data, held)
    read = [(memory.address, memory.address + BLOCK) for memory in sources]
    with kit.held(held):
        copies = [copied(kit, memory, held) for memory in sources]
        del memory
        while sources:
            sources.pop()
            gc.collect()
            device.allocate(1)  # a device looks for dropped memory when it allocates
        others = [device.allocate(BLOCK) for _ in range(2 * DROPPED)]
        shared = [one for one in others for low, high in read if one.address < high and low < one.address + BLOCK]
        assert not shared, f"{len(shared)} new blocks lie where pending copies read memory that was dropped"
        for one in others:
            backdoor.write(device, one, 0, np.zeros(BLOCK, np.uint8), other)
        assert not any(copy.done() for copy in copies), "a copy behind a held stream is done"
    for copy, data in zip(copies, should, strict=True):
        arrive(copy)
        assert (copy.data[0][:BLOCK] == data).all(), "a copy has other bytes than its source had, which was dropped"


@guarantee(3, requires=HELD)
def test_g03_a_kept_ticket_belongs_to_its_own_work_whatever_follows(kit: Kit) -> None:
    device = kit.device
    held, other = device.stream(), device.stream()
    memory, elsewhere = device.allocate(64), device.allocate(64)
    view = View.contiguous(elsewhere, 0, (8,), dtype_of("int64"))
    done = backdoor.put(device, memory, [(0, bytes(64))], other)
    arrive(done)
    with kit.held(held, "many calls on another stream"):
        pending = [backdoor.put(device, memory, [(0, bytes(64))], held), copied(kit, memory, held)]
        for number in range(MANY):
            last = kit.bound.async_set_value(target=view, value=number, stream=other)
            if number % 64 == 63:
                arrive(last)
        arrive(last)
        for what, ticket in zip(("write", "copy"), pending, strict=True):
            assert not ticket.done(), f"a {what} on a held stream is done after {MANY} calls on another"
        stay_done({f"a write that {MANY} followed": done})
    come_true({"the write": pending[0], "the copy": pending[1]}, kit.effort.hang)


EXPANDED: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "an expanded row": ((6, 16), (0, 4), 0),
    "an expanded column": ((6, 16), (64, 0), 0),
    "one element": ((6, 16), (0, 0), 20),
    "overlapping windows": ((6, 16), (4, 4), 8),
    "reversed": ((6, 16), (-64, -4), 64 * 6 - 4),
    "transposed": ((6, 16), (4, 24), 0),
}
"""Shape, strides in bytes and offset of a value of int32 in 384 bytes of device memory."""


@guarantee(5, also=(2, 6))
@pytest.mark.parametrize("what", EXPANDED)
def test_g05_a_value_on_the_device_may_be_expanded_or_overlap_itself(kit: Kit, what: str) -> None:
    device, stream, kind = kit.device, kit.device.default_stream, dtype_of("int32")
    shape, strides, offset = EXPANDED[what]
    source, target = device.allocate(384), device.allocate(1024)
    given, before = noise(3, 384), noise(4, 1024)
    backdoor.write(device, source, 0, given, stream)
    backdoor.write(device, target, 0, before, stream)
    value = View(source, offset, shape, strides, kind)
    should = before.copy()
    place = np.ndarray(shape, np.int32, should, 32, (128, 8))
    place[...] = np.ndarray(shape, np.int32, given, offset, strides)
    into = View(target, 32, shape, (128, 8), kind)
    arrive(kit.bound.async_set_value(target=into, value=value, stream=stream), what)
    got = backdoor.read(device, target, stream)[:1024]
    wrong = np.flatnonzero(got != should)
    assert not len(wrong), f"{what}, as a value: {len(wrong)} bytes are wrong, the first is byte {wrong[0]}"


OVERLAPS: dict[str, tuple[slice, slice]] = {
    "forward": (slice(8, 1000), slice(0, 992)),
    "backward": (slice(0, 992), slice(8, 1000)),
    "reversed in place": (slice(0, 1000), slice(None, None, -1)),
    "every second into the first half": (slice(0, 500), slice(0, 1000, 2)),
}


@guarantee(5, also=(2, 4))
@pytest.mark.parametrize("what", OVERLAPS)
def test_g05_a_value_on_the_device_may_overlap_its_target(kit: Kit, what: str) -> None:
    """The result is as if the value were read whole before anything is written."""
    device, stream = kit.device, kit.device.default_stream
    memory, before = device.allocate(8000), noise(5, 8000)
    backdoor.write(device, memory, 0, before, stream)
    view, should = View.contiguous(memory, 0, (1000,), dtype_of("int64")), before.view(np.int64).copy()
    target, value = OVERLAPS[what]
    should[target] = should[value].copy()
    arrive(kit.bound.async_set_value(target=view[target], value=view[value], stream=stream), what)
    got = backdoor.read(device, memory, stream)[:8000].view(np.int64)
    wrong = np.flatnonzero(got != should)
    assert not len(wrong), f"{what}: {len(wrong)} elements are wrong, the first is element {wrong[0]}"


@guarantee(1, also=(2, 5))
def test_g01_a_device_value_of_stride_0_gives_its_one_element(kit: Kit) -> None:
    device, stream = kit.device, kit.device.default_stream
    memory = device.allocate(64)
    backdoor.write(device, memory, 0, np.arange(64, dtype=np.uint8), stream)
    value, target = (
        View(memory, 3, (16,), (0,), dtype_of("uint8")),
        View.contiguous(memory, 32, (16,), dtype_of("uint8")),
    )
    arrive(kit.bound.async_set_value(target=target, value=value, stream=stream))
    got = backdoor.read(device, memory, stream)[:64].tolist()
    assert got == [*range(32), *[3] * 16, *range(48, 64)], f"one element, repeated by its stride of 0, gave {got}"


def _read_only() -> np.ndarray[Any, Any]:
    """Return a view that refuses writes, of memory that the caller may write."""
    value = np.arange(32, dtype=np.int64)[:]
    value.flags.writeable = False
    return value


FORMS: dict[str, Any] = {
    "read-only": _read_only,
    "strided": lambda: np.arange(64, dtype=np.int64)[::2],
    "reversed": lambda: np.arange(32, dtype=np.int64)[::-1],
    "byte-swapped": lambda: np.arange(32, dtype=">i8"),
    "of another type": lambda: np.arange(32, dtype=np.int32),
    "over a bytearray": lambda: np.frombuffer(bytearray(np.arange(32, dtype=np.int64).tobytes()), np.int64),
}


@guarantee(2, requires="async_h2d")
@pytest.mark.parametrize("what", FORMS)
def test_g02_a_host_value_of_any_form_may_be_changed_after_the_call(kit: Kit, what: str) -> None:
    device, stream = kit.device, kit.device.stream()
    memory = device.allocate(256)
    backdoor.write(device, memory, 0, np.zeros(256, np.uint8), stream)
    view, value = View.contiguous(memory, 0, (32,), dtype_of("int64")), FORMS[what]()
    should = value.astype(np.int64)
    owned = value if value.flags.writeable else value.base
    with kit.held(stream):
        ticket = kit.bound.async_set_value(target=view, value=value, stream=stream)
        owned[...] = 77
    arrive(ticket)
    got = backdoor.read(device, memory, stream)[:256].view(np.int64)
    assert (got == should).all(), f"a value that is {what} was changed after the call, and {got.tolist()} was written"
