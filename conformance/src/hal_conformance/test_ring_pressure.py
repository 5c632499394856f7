"""The staging ring under pressure (G2, G3): each span is fenced by its own event, also where the ring wraps.

The ring is made small, streams are held, and every write has its own target. A span reused before it was read is
noticed in the write it belonged to. ``test_ring_refusals.py`` has the refusals of a full ring.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from .fixtures.ring_cases import NEEDS, RING, RingWrites, impatient, refusal
from .fixtures.stream_cases import pairs
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .harness.reached import Reached
from .kit import Kit, Latch

if TYPE_CHECKING:
    from hal_core.streams import Stream

PAIRS = {"quick": 2, "default": 3, "nightly": 3}
"""In quick the default stream is one of the two."""
FIRST = ("early", "late", "between")
"""When the held stream takes its spans: before, after or among those of the other."""


@guarantee(2, requires=NEEDS)
@pytest.mark.parametrize("first", FIRST)
def test_g02_a_span_is_fenced_by_its_own_stream_and_not_a_neighbours(small: Kit, first: str) -> None:
    small.once(("two streams", first), lambda: on_pairs(small, first))


@guarantee(3, requires=NEEDS)
def test_g03_a_span_is_fenced_by_its_own_stream_and_not_a_neighbours(small: Kit) -> None:
    small.once(("two streams", "between"), lambda: on_pairs(small, "between"))


def on_pairs(small: Kit, first: str) -> None:
    """Run :func:`two_streams` on the default stream and another, and on two others."""
    __tracebackhide__ = True
    for told, held, free in pairs(small)[: PAIRS[small.effort.profile]]:
        two_streams(small, first, told, held, free)


def two_streams(small: Kit, first: str, told: str, held: Stream, free: Stream) -> None:
    """Hold one stream while another one uses the ring many times over."""
    __tracebackhide__ = True
    writes = RingWrites(small, 5 * RING)
    arrive(writes.must_write(300, held))  # a passed fence, which must not be taken for the next one's
    if first != "early":
        for _ in range(150):
            writes.must_write(300, free)
    with small.held(held), impatient(small):
        for nbytes in (300, 5000, 60_000, 70_001):
            writes.must_write(nbytes, held)
            if first == "between":
                arrive(writes.must_write(nbytes, free))
        for _ in range(140):  # many passed fences of the other stream
            writes.must_write(200, free)
        arrive(writes.tickets[-1])
        for _ in range(25):
            try:
                ticket = writes.write(100_000, free)
            except Exception as error:  # noqa: BLE001 (the oldest span is held, so a ring must refuse in the end)
                refusal(small, error, "async_set_value")
                break
            arrive(ticket)
    writes.check(f"{told}: the first was held while the second used the ring many times over")
    writes.must_write(400_000, held)
    writes.check(f"{told}: both continued")


ROUNDS = {"quick": 9, "default": 24, "nightly": 24}
"""Number of writes of half a ring each."""
SPANS = (1, 8, 255, 256, 257, 4095, 4097, 30_000, 65_537, 100_003)


@guarantee(3, requires=NEEDS)
def test_g03_the_ring_goes_round_with_spans_of_every_size(small: Kit) -> None:
    rounds, share = ROUNDS[small.effort.profile], RING * 11 // 20
    writes, reached = RingWrites(small, rounds * (share + 40_000)), Reached(map(str, SPANS))
    streams = [small.device.default_stream, small.device.stream()]
    rng = np.random.default_rng(small.effort.seed)
    for turn in range(rounds):
        for ticket in writes.tickets[-2:]:
            arrive(ticket)
        used = 0
        with small.held(streams[turn % 2]):
            while True:
                nbytes = int(rng.choice(SPANS))
                used += -(-nbytes // 256) * 256
                if used > share:
                    break
                writes.must_write(nbytes, streams[int(rng.integers(2))])
                reached.note(str(nbytes))
        for stream in streams:
            writes.must_write(8, stream)
    writes.check(f"{rounds} rounds through a ring of {RING} bytes, one stream held in each")
    reached.check()


@guarantee(3, requires=NEEDS)
@pytest.mark.parametrize("same", [True, False], ids=["one-stream", "two-streams"])
def test_g03_a_full_ring_waits_for_its_oldest_entry_alone(small: Kit, same: bool) -> None:
    writes = RingWrites(small, 4 * RING)
    held, work = small.device.stream(), small.device.default_stream
    newest = work if same else small.device.stream()
    writes.empty_ring(work)
    with small.held(held):
        behind = small.device.event(held)
        with small.held(work) as gate:
            writes.must_write(RING * 11 // 20, work)
            newest.wait(behind)
            late = writes.must_write(RING * 6 // 20, newest)
            opener = threading.Thread(target=open_when_waited_for, args=(small, gate))
            opener.start()
            try:
                last = writes.must_write(RING * 10 // 20, work)  # has no room until the oldest entry's work is done
            finally:
                gate.release()
                opener.join()
        assert not late.done(), "the entry behind the held stream is done"
        if same:
            assert not last.done(), "work behind an event that has not passed is done"
    writes.check("the ring was full, with its oldest entry's work over and the newest behind a held stream")


def open_when_waited_for(kit: Kit, gate: Latch) -> None:
    """Release the oldest entry's stream once a call waits for the ring; in any case after some time."""
    before = kit.bound.counters().ring_waits
    for _ in range(100):
        if kit.bound.counters().ring_waits > before:
            break
        time.sleep(0.01)
    gate.release()


KIB = 1 << 10
EXCESS = (4096, 257, 256, 255, 64, 8, 1)
"""Bytes by which a span is longer than the free room before the oldest one."""


@guarantee(2, requires=NEEDS, also=(3,))
@pytest.mark.parametrize("rows", [False, True], ids=["contiguous", "in rows"])
def test_g02_no_span_reaches_into_the_oldest_one(small: Kit, rows: bool) -> None:
    """The room before a held span is known to the byte: at the wrap, and behind the span that wrapped."""
    writes, held, free = RingWrites(small, 8 * RING), small.device.stream(), small.device.stream()
    writes.empty_ring(free)
    with small.held(held), impatient(small):
        arrive(writes.must_write(256 * KIB, free))
        writes.must_write(128 * KIB, held)  # the oldest span, from byte 262,144 on
        arrive(writes.must_write(512 * KIB, free))
        too_long(writes, 256 * KIB, free, rows=rows)  # 128 KiB are left at the end, so it would have to wrap
        arrive(writes.must_write(200 * KIB, free))
        too_long(writes, 56 * KIB, free, rows=rows)
    writes.check("spans longer by a few bytes than the room before the oldest one")


def too_long(writes: RingWrites, room: int, stream: Stream, *, rows: bool) -> None:
    """Write values that are a little longer than ``room``: a ring refuses them, or has room elsewhere."""
    __tracebackhide__ = True
    for excess in EXCESS:
        nbytes = room + (excess // 512 * 512 + 512 if rows else excess)
        try:
            ticket = writes.write(nbytes, stream, rows=rows)
        except Exception as error:  # noqa: BLE001 (whatever it is, it must be the contract's)
            refusal(writes.kit, error, "async_set_value")
        else:
            arrive(ticket)
