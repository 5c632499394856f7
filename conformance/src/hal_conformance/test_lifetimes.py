"""Tickets, sources and values that are held, dropped or changed while work on them is pending."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hal_core.memory.dtypes import DTYPES, DType, dtype_of
from hal_core.memory.views import View

from .draw.values import LAYOUTS
from .draw.views import LAID, PLACES, REPEATED
from .fixtures.large_blocks import LargeBlock, elements
from .fixtures.stream_cases import copied
from .harness import backdoor
from .harness.backdoor import arrive
from .harness.bits import HostTensor, noise
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


BOX = (3, 4, 5)
"""The shape of values and targets whose elements lie in different ways."""
EXTENT = 8192
"""Bytes of their memory."""


def host_value(turn: int, dtype: DType) -> tuple[str, Any, Any]:
    """Return ``(form, value, elements)``: a scalar, or an array in one layout, in turns."""
    some = elements(turn, BOX, dtype)
    if dtype.name == "bfloat16":
        return "a host tensor", HostTensor(some, dtype.name), some
    form = ["scalar", *LAYOUTS][(turn + turn // len(DTYPES)) % (1 + len(LAYOUTS))]
    if form != "scalar":
        return f"an array ({form})", LAYOUTS[form](some), some
    one = dtype.storage.type(turn + 0.5) if dtype.kind == "float" else some[0, 0, 0]
    return "a scalar", one.item(), one


@guarantee(5, also=(1, 2, 4, 6))
@pytest.mark.parametrize("how", LAID)
def test_g05_a_value_lands_in_its_target_however_both_lie(kit: Kit, how: str) -> None:
    """Host values, and values of other memory and of the target's own, whose elements lie in every way, repeated too;
    each at another place and of another type. One that overlaps its target is read whole before anything is written."""
    block, source = LargeBlock(kit, EXTENT), LargeBlock(kit, EXTENT, noise(3, EXTENT))
    for turn, (name, laid) in enumerate((LAID | REPEATED).items(), [*LAID].index(how) * len(LAID | REPEATED)):
        dtype, place = DTYPES[turn % len(DTYPES)], PLACES[turn % len(PLACES)]
        target = LAID[how].view(block.memory, place, BOX, dtype)
        for other in (source, block):
            value = laid.view(other.memory, PLACES[(7 * turn + turn // 19) % len(PLACES)], BOX, dtype)
            block.write(target, value, other.over(value).copy())
            block.check(f"{value} ({name}) of {'its own' if other is block else 'other'} memory for {target} ({how})")
        form, host, should = host_value(turn, dtype)
        block.write(target, host, should)
        block.check(f"{form} for {target} ({how})")


OVERLAPS: dict[str, tuple[slice, slice]] = {
    "forward": (slice(8, None), slice(None, -8)),
    "forward by one": (slice(1, None), slice(None, -1)),
    "backward": (slice(None, -8), slice(8, None)),
    "backward by one": (slice(None, -1), slice(1, None)),
    "by half": (slice(None, -500), slice(500, None)),
    "reversed in place": (slice(None), slice(None, None, -1)),
    "every second into the first half": (slice(None, 500), slice(None, 1000, 2)),
    "every second to those between": (slice(1, None, 2), slice(None, None, 2)),
}
"""Parts of a target and of a value, of an even number of elements."""


@guarantee(5, also=(2, 4))
@pytest.mark.parametrize("what", OVERLAPS)
def test_g05_a_value_on_the_device_may_overlap_its_target(kit: Kit, what: str) -> None:
    """The result is as if the value were read whole before anything is written."""
    target, value = OVERLAPS[what]
    for dtype, count in (("int64", 1000), ("uint8", 1000), ("int16", 70_002), ("uint8", 300_002)):
        nbytes = count * dtype_of(dtype).itemsize
        block = LargeBlock(kit, nbytes, noise(5, nbytes))
        full = block.at(0, (count,), dtype)
        block.write(full[target], full[value], block.over(full[value]).copy())
        block.check(f"a value that overlaps its target, {what}, of {count} {dtype}")
