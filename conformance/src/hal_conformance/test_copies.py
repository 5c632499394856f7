"""Copies out: complete, pending, and independent of each other and of later work (G1, G22)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hal_core.memory.views import ByteRange

from .draw.views import PLACES
from .fixtures.prepared_calls import assert_alike, assert_copied
from .fixtures.sizes import MIB, need, sizes
from .fixtures.stream_cases import copied
from .harness import backdoor
from .harness.asserts import assert_no_error
from .harness.backdoor import arrive, drain
from .harness.bits import noise
from .harness.guarantees import guarantee
from .kit import Kit

if TYPE_CHECKING:
    from hal_core.memory.copies import Bytes, CopyTicket
    from hal_core.memory.views import Memory
    from hal_core.streams import Stream

LENGTHS = {
    "1 byte": 1,
    "a page": 4096,
    "a page and 1 byte": 4097,
    "64 KiB and 3": (1 << 16) + 3,
    "1 MiB and 5": (1 << 20) + 5,
    "17 MiB and 7": (17 << 20) + 7,
}
"""Sizes of one range: on both sides of the borders of drivers, pools and rings."""
SHAPES: dict[str, list[tuple[int, int]]] = {
    "none": [],
    "one that is empty": [(4096, 0)],
    "empty ones between others": [(7, 0), (0, 9), (100, 0), (8191, 1), (8192, 0)],
    "three that overlap, backwards": [(4000, 4000), (3000, 1500), (1, 5000)],
    "one many times": [(1000, 333)] * 20,
    "five thousand": [((7919 * at) % 8000, 1 + at % 190) for at in range(5000)],
    "odd places and lengths": [(3, 5), (11, 13), (4093, 7), (8185, 7)],
    "both sides of alignments": [(at, 1 + at % 70) for at in PLACES],
}
"""Ranges of a block of 8 KiB as ``(offset, nbytes)``."""
QUEUED = 500
"""Ranges that fit into any launch queue. A call may wait for its stream while the queue is full (G3)."""


def parts_of(ranges: Sequence[tuple[int, int]]) -> list[ByteRange]:
    """Return the ranges as ``copy_out`` takes them."""
    return [ByteRange(offset, nbytes) for offset, nbytes in ranges]


def assert_data(case: str, data: Sequence[Bytes], ranges: Sequence[tuple[int, int]], full: Bytes) -> None:
    """Assert that there is one array for each range, in order, with the memory's former contents."""
    __tracebackhide__ = True
    assert len(data) == len(ranges), f"{case}: {len(data)} arrays for {len(ranges)} ranges"
    for at, (array, (offset, nbytes)) in enumerate(zip(data, ranges, strict=True)):
        what = f"{case}: array {at}, of {nbytes} bytes from {offset},"
        assert array.dtype == np.uint8, f"{what} is of {array.dtype}, but should be uint8"
        assert array.shape == (nbytes,), f"{what} has the shape {array.shape}"
        assert_alike(array, full[offset : offset + nbytes], f"{what} differs from the memory")


PIECE = 1 << 20
"""Bytes of one plan that fills a large block: they fit the smallest staging ring."""


def filling(kit: Kit, memory: Memory, data: Bytes, stream: Stream) -> None:
    """Write bytes of any length, piece by piece, and wait for each."""
    for at in range(0, len(data), PIECE):
        backdoor.write(kit.device, memory, at, data[at : at + PIECE], stream)


def stream_cases(kit: Kit) -> list[tuple[str, Stream]]:
    """Return a stream of each kind."""
    return [("a stream of its own", kit.device.stream()), ("the default stream", kit.device.default_stream)]


def asynchronous(kit: Kit) -> bool:
    """Return True if a copy of a held stream must be pending."""
    return kit.can_hold and kit.capabilities.async_d2h


@guarantee(1)
@pytest.mark.parametrize("length", LENGTHS)
def test_g01_a_copy_of_any_length_is_whole_and_pending_while_held(kit: Kit, length: str) -> None:
    nbytes, device = LENGTHS[length], kit.device
    memory, content = device.allocate(nbytes + 64), noise(1, nbytes + 64)
    ranges = [(17, nbytes), (nbytes // 2 + 17, 1)]
    places = sorted({17, nbytes // 2 + 17, nbytes + 16})
    filling(kit, memory, content, device.default_stream)
    for what, stream in stream_cases(kit):
        what = f"copy_out of {length} on {what}"
        with kit.held(stream, what):
            content[places] ^= 0xFF  # the ends and the middle are written just before, and again just after
            backdoor.put(device, memory, [(at, content[at : at + 1].tobytes()) for at in places], stream)
            copy = device.copy_out(memory, parts_of(ranges), stream)
            overwritten = backdoor.put(device, memory, [(at, b"x") for at in places], stream)
            if asynchronous(kit):
                assert not copy.done(), f"{what} is done, but its stream is held"
                assert copy.mode == "async", f"{what} has mode {copy.mode!r}, but is not done"
        arrive(copy)
        assert copy.done(), f"{what} was waited for, but is not done"
        arrive(overwritten)
        assert_data(what, copy.data, ranges, content)


@guarantee(1)
def test_g01_a_copy_of_many_ranges_has_each(kit: Kit) -> None:
    memory, should = kit.device.allocate(8192), noise(5, 8192)
    filling(kit, memory, should, kit.device.default_stream)
    for many in sizes(kit, "ranges of a copy"):
        ranges = [(at * 7 % 8190, 1 + at % 2) for at in range(many)]
        copy = kit.device.copy_out(memory, parts_of(ranges), kit.device.default_stream)
        arrive(copy)
        assert_data(f"a copy of {many} ranges", copy.data, ranges, should)


@guarantee(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_g01_ranges_of_any_shape_are_copied_in_their_order(kit: Kit, shape: str) -> None:
    ranges, memory, should = SHAPES[shape], kit.device.allocate(8192), noise(2, 8192)
    for what, stream in stream_cases(kit):
        what = f"copy_out of ranges ({shape}) on {what}"
        backdoor.write(kit.device, memory, 0, ~should, stream)
        fits = len(ranges) <= QUEUED
        with kit.held(stream, what) if fits else nullcontext():
            if kit.capabilities.async_h2d or not kit.can_hold:
                backdoor.put(kit.device, memory, [(0, should.tobytes())], stream)
            given = parts_of(ranges)
            copy = assert_no_error(partial(kit.device.copy_out, memory, given, stream), what)
            given[:] = [ByteRange(0, 1)] * (len(ranges) + 1)  # the caller may change the list again
            if fits and asynchronous(kit):  # a copy of no bytes too
                assert not copy.done(), f"{what} is done, but its stream is held"
        arrive(copy)
        assert_data(what, copy.data, ranges, should)


# -- arrays do not change --------------------------------------------------------------------------------------------

HANDLES: dict[str, Callable[[CopyTicket], Any]] = {
    "the ticket": lambda copy: copy,
    "its arrays": lambda copy: list(copy.data),
    "its arrays, read once more": lambda copy: [list(copy.data), list(copy.data)][1],
    "a part of an array": lambda copy: copy.data[0][100:-100],
    "a buffer over an array": lambda copy: copy.data[0].data,
    "an array of another type over it": lambda copy: copy.data[0][:2048].view(np.int64),
}
"""The kept part of a copy; the rest is dropped."""


def content_of(kept: Any) -> bytes:  # noqa: ANN401 (one of HANDLES)
    """Return the bytes of the kept part."""
    if hasattr(kept, "data") and hasattr(kept, "wait"):
        return b"".join(array.tobytes() for array in kept.data)
    return b"".join(array.tobytes() for array in kept) if isinstance(kept, list) else bytes(kept)


def keep_copies(kit: Kit) -> None:
    """Make many copies of one size and keep a part of each; later work must not change them."""
    __tracebackhide__ = True
    device, memory, stream = kit.device, kit.device.allocate(4096), kit.device.default_stream
    names, many = [*HANDLES], max(sizes(kit, "copies whose arrays are kept"))
    kept: list[Any] = []
    should: list[bytes] = []
    for at in range(many):
        content = noise(at, 4096)
        backdoor.put(device, memory, [(0, content.tobytes())], stream)
        nbytes = 4096 - at % 3  # pools keep buffers by size class
        copy = device.copy_out(memory, [ByteRange(0, nbytes)], stream)
        arrive(copy)
        kept.append(HANDLES[names[at % len(names)]](copy))
        should.append(content_of(kept[-1]))
        assert should[-1] in content.tobytes(), f"copy {at} of {many} differs from the memory"
        del copy
    gc.collect()
    backdoor.write(device, memory, 0, noise(999, 4096), stream)
    del memory
    gc.collect()
    for at in range(many // 4):  # dropped buffers may be reused
        fresh = device.allocate(4096)
        backdoor.write(device, fresh, 0, noise(2000 + at, 4096), stream)
        arrive(copied(kit, fresh, stream))
    for at, (handle, was) in enumerate(zip(kept, should, strict=True)):
        what = names[at % len(names)]
        assert content_of(handle) == was, f"{what} of copy {at} of {many} was kept, and has changed since"


KEPT = 16 * MIB
"""Bytes of one large copy."""


def keep_large_copies(kit: Kit) -> None:
    """Keep more bytes of copies than a pool holds: each array has its own two ends."""
    __tracebackhide__ = True
    many = max(sizes(kit, "MiB of arrays that are kept")) * MIB // KEPT
    need(many * KEPT, "arrays")
    memory, stream, kept = kit.device.allocate(KEPT), kit.device.default_stream, list[Any]()
    for at in range(many):
        backdoor.put(kit.device, memory, [(0, bytes([at] * 8)), (KEPT - 8, bytes([at] * 8))], stream)
        copy = kit.device.copy_out(memory, [ByteRange(0, KEPT)], stream)
        arrive(copy)
        kept.append(copy.data[0])
        del copy
    ends = [(int(array[0]), int(array[-1])) for array in kept]
    wrong = [at for at, found in enumerate(ends) if found != (at, at)]
    assert not wrong, f"of {many} copies of {KEPT} bytes whose arrays are kept, {wrong} have other bytes"


@guarantee(1, also=(19, 22))
@pytest.mark.parametrize("keep", [keep_copies, keep_large_copies], ids=["many", "large"])
def test_g01_arrays_that_are_kept_never_change(kit: Kit, keep: Callable[[Kit], None]) -> None:
    keep(kit)


@guarantee(1, requires=("can_hold_stream", "async_d2h"))
def test_g01_a_copy_that_nobody_waits_for_writes_into_nobody_elses_arrays(kit: Kit) -> None:
    """Its ticket is dropped while its stream is held; other copies of its size are made and read meanwhile."""
    device, memory = kit.device, kit.device.allocate(4096)
    held, free = device.stream(), device.stream()
    other, should = device.allocate(4096), noise(1, 4096)
    backdoor.write(device, other, 0, should, free)
    backdoor.write(device, memory, 0, ~should, free)
    with kit.held(held, "copies of the same size on another stream"):
        for _ in range(20):
            copied(kit, memory, held)  # dropped at once
        gc.collect()
        copies = [copied(kit, other, free) for _ in range(40)]
        for copy in copies:
            arrive(copy)
        arrays = [copy.data[0] for copy in copies]
        del copies, copy
    drain(held)
    arrive(copied(kit, memory, held))
    for at, array in enumerate(arrays):
        assert_alike(array, should, f"copy {at}, made while others were pending whose tickets were dropped")


@guarantee(1, requires=("can_hold_stream", "async_d2h"))
def test_g01_copies_of_several_streams_come_when_their_own_stream_goes_on(kit: Kit) -> None:
    device = kit.device
    streams = [device.default_stream, *(device.stream() for _ in range(3))]
    memories = [device.allocate(70_000) for _ in streams]
    contents = [noise(at, 70_000) for at in range(len(streams))]
    for order in ((2, 0, 3, 1), (1, 3, 0, 2)):
        latches = [kit.held(stream, "a copy of another stream") for stream in streams]
        with latches[0], latches[1], latches[2], latches[3]:
            copies: list[CopyTicket] = []
            for stream, memory, content in zip(streams, memories, contents, strict=True):
                content += 1
                backdoor.put(device, memory, [(0, content.tobytes())], stream)
                copies.append(copied(kit, memory, stream))
            for at, stream_case in enumerate(order):
                done = [copies[other].done() for other in order[at:]]
                assert not any(done), f"copies of streams {order[at:]} have done={done}, but their streams are held"
                latches[stream_case].release()
                assert_copied(copies[stream_case], contents[stream_case], f"the copy of stream {stream_case}")
        for stream_case, copy in enumerate(copies):
            assert copy.done(), f"the copy of stream {stream_case} is not done any more"
            assert_alike(
                copy.data[0], contents[stream_case], f"the copy of stream {stream_case}, after those of the other ones"
            )
