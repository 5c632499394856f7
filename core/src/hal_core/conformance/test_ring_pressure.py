"""The staging ring under pressure (G2, G3): fences of its own for each span, wrap-around, refusal and going on.

The ring is made small, streams are held, and every write has a place of its own, so that a span that was used again
before it was read shows in the write it belonged to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ..errors import HalError
from ..memory.dtypes import dtype_of
from ..memory.views import View
from ..slots.admission import Request
from ..slots.fields import Sizes
from ..slots.tasks import Task, TaskKind
from .harness.asserts import assert_says
from .harness.backdoor import PATIENCE
from .harness.guarantees import guarantee
from .harness.reached import Reached
from .kit import Kit, Latch
from .rigs.rig import Rig
from .rigs.slab import Slab, noise

if TYPE_CHECKING:
    from ..streams import Stream
    from ..tickets import Ticket

RING = 1 << 20
"""Bytes that the ring may hold."""
NEEDS = ("async_h2d", "can_hold_stream", "staging")
ENOUGH = 400
"""Writes after which a ring of that size has refused one, or never will."""


@pytest.fixture
def small(kit: Kit) -> Iterator[Kit]:
    """Another opened device, with a ring of 1 MiB that is waited for in earnest."""
    pressed = Kit(kit.subject, kit.effort)
    pressed.device.staging.limit = RING  # type: ignore[attr-defined]  # the seam that `requires` asks for
    yield pressed
    pressed.renew()


def impatient(kit: Kit) -> None:
    """Let a full ring refuse at once."""
    kit.device.staging.deadline = 0.05  # type: ignore[attr-defined]  # the same seam


ROW = 512
"""Bytes of one row of a target that is written in rows."""


class Lines:
    """A slab whose bytes are given to writes one after the other, with gaps that nothing may touch."""

    def __init__(self, kit: Kit, nbytes: int) -> None:
        self.kit, self.slab, self.at, self.turn = kit, Slab(kit, nbytes), 64, 0
        self.tickets: list[Ticket] = []

    def target(self, nbytes: int, *, rows: bool = False) -> View:
        """The next place for so many bytes, as they are or in rows with gaps between them."""
        begin, self.at = self.at, self.at + nbytes * (1 + rows) + 33
        assert self.at <= self.slab.memory.nbytes, "the kit's slab is too small for this test"
        shape, strides = ((nbytes // ROW, ROW), (ROW + 7, 1)) if rows else ((nbytes,), (1,))
        return View(self.slab.memory, begin, shape, strides, dtype_of("uint8"))

    def write(self, nbytes: int, stream: Stream, *, rows: bool = False) -> Ticket:
        """Write new bytes to a new place, and expect them once the call has returned; raises what the call does."""
        self.turn += 1
        target = self.target(nbytes, rows=rows)
        value = noise(self.turn, target.size).reshape(target.shape)
        kept = value.copy()
        ticket = self.kit.bound.async_set_value(target=target, value=value, stream=stream)
        value[...] = 0xEE
        self.slab.over(target)[...] = kept
        self.tickets.append(ticket)
        return ticket

    def until_refused(self, sizes: Sequence[int], stream: Stream, *, rows: bool = False) -> HalError | None:
        """Write until the ring is full, at most :data:`ENOUGH` times; the refusal must be one of the contract."""
        for turn in range(ENOUGH):
            try:
                self.write(sizes[turn % len(sizes)], stream, rows=rows)
            except HalError as error:
                assert_says(error, device=self.kit.bound.name, hook="async_set_value")
                return error
        return None

    def check(self, after: str) -> None:
        """Wait for every write, and compare every byte."""
        __tracebackhide__ = True
        for ticket in self.tickets:
            ticket.wait(PATIENCE)
        self.tickets.clear()
        self.slab.check(after)


@guarantee(3, requires=NEEDS)
@pytest.mark.parametrize("nbytes", [4500, 12_000, 65_536, 200_000])
@pytest.mark.parametrize("rows", [False, True], ids=["contiguous", "rows"])
def test_g03_what_a_full_ring_has_taken_is_right_and_it_goes_on_after_refusing(
    small: Kit, nbytes: int, rows: bool
) -> None:
    filled_twice(small, nbytes, rows=rows)


def filled_twice(small: Kit, nbytes: int, *, rows: bool) -> None:
    """Fill the ring until it refuses, let go, compare, and do it again."""
    __tracebackhide__ = True
    impatient(small)
    rounds, refusals = 2, 0
    lines = Lines(small, (rounds + 1) * (RING + 4 * nbytes) * (1 + rows) + ENOUGH * 100)
    stream = small.device.default_stream
    for turn in range(rounds):
        with small.held(stream):
            refusals += lines.until_refused([nbytes], stream, rows=rows) is not None
        lines.check(f"round {turn} of a ring that was filled while its stream was held")
        lines.write(nbytes, stream, rows=rows)
        lines.check(f"a write after refusal {turn}")
    assert refusals == rounds, f"a held ring of {RING} bytes refused in {refusals} of {rounds} rounds"


@guarantee(2, requires=NEEDS)
@pytest.mark.parametrize("first", ["early", "late", "between"])
def test_g02_a_span_is_fenced_by_its_own_stream_and_not_a_neighbours(small: Kit, first: str) -> None:
    two_streams(small, first)


@guarantee(3, requires=NEEDS)
def test_g03_a_span_is_fenced_by_its_own_stream_and_not_a_neighbours(small: Kit) -> None:
    two_streams(small, "between")


@guarantee(2, requires=NEEDS)
def test_g02_what_a_full_ring_has_taken_is_what_the_caller_gave(small: Kit) -> None:
    filled_twice(small, 50_000, rows=False)


def two_streams(small: Kit, first: str) -> None:
    """Hold one stream while another one uses the ring many times over."""
    __tracebackhide__ = True
    impatient(small)
    lines = Lines(small, 6 * RING + ENOUGH * 200_000 // 4)
    held, free = small.device.default_stream, small.device.stream()
    lines.write(300, held).wait(PATIENCE)  # a fence that has passed, to be mistaken for the next one's
    if first != "early":
        for _ in range(150):
            lines.write(300, free)
    with small.held(held):
        for nbytes in (300, 5000, 60_000, 70_001):
            lines.write(nbytes, held)
            if first == "between":
                lines.write(nbytes, free).wait(PATIENCE)
        for _ in range(140):  # many fences of the other stream that have passed
            lines.write(200, free)
        lines.tickets[-1].wait(PATIENCE)
        for _ in range(25):
            try:
                lines.write(100_000, free).wait(PATIENCE)
            except HalError as error:  # the oldest span is held, so a ring must refuse in the end
                assert_says(error, device=small.bound.name, hook="async_set_value")
                break
    lines.check("a stream was held while another one used the ring many times over")
    lines.write(400_000, held)
    lines.check("both streams went on")


SPANS = (1, 8, 255, 256, 257, 4095, 4097, 30_000, 65_537, 100_003)


@guarantee(3, requires=NEEDS)
def test_g03_the_ring_goes_round_with_spans_of_every_size(small: Kit) -> None:
    rounds, share = 24, RING * 11 // 20
    lines, reached = Lines(small, rounds * (share + 40_000)), Reached(map(str, SPANS))
    streams = [small.device.default_stream, small.device.stream()]
    rng = np.random.default_rng(small.effort.seed)
    for turn in range(rounds):
        for ticket in lines.tickets[-2:]:
            ticket.wait(PATIENCE)
        used = 0
        with small.held(streams[turn % 2]):
            while True:
                nbytes = int(rng.choice(SPANS))
                used += -(-nbytes // 256) * 256
                if used > share:
                    break
                lines.write(nbytes, streams[int(rng.integers(2))])
                reached.note(str(nbytes))
        for stream in streams:
            lines.write(8, stream)
    lines.check(f"{rounds} rounds through a ring of {RING} bytes, one stream held in each")
    reached.check()


@guarantee(3, requires=NEEDS)
@pytest.mark.parametrize("same", [True, False], ids=["one-stream", "two-streams"])
def test_g03_a_full_ring_waits_for_its_oldest_entry_alone(small: Kit, same: bool) -> None:
    lines = Lines(small, 4 * RING)
    held, work = small.device.stream(), small.device.default_stream
    with small.held(held):
        behind = small.device.event(held)
        with small.held(work) as gate:
            lines.write(RING * 11 // 20, work)
            newest = work if same else small.device.stream()
            newest.wait(behind)
            late = lines.write(RING * 6 // 20, newest)
            opener = threading.Thread(target=open_when_waited_for, args=(small, gate))
            opener.start()
            try:
                last = lines.write(RING * 10 // 20, work)  # has no room until the oldest entry's work is over
            except HalError as error:
                raise AssertionError(f"the oldest entry's work could end, yet the ring refused: {error}") from error
            finally:
                gate.release()
                opener.join()
        assert not late.done(), "the entry behind the held stream is done"
        if same:
            assert not last.done(), "work behind an event that has not passed is done"
    lines.check("the ring was full, with its oldest entry's work over and the newest behind a held stream")


def open_when_waited_for(kit: Kit, gate: Latch) -> None:
    """Let the oldest entry's stream go once the ring is waited for; after some time in any case."""
    before = kit.bound.counters().ring_waits
    for _ in range(100):
        if kit.bound.counters().ring_waits > before:
            break
        time.sleep(0.01)
    gate.release()


@guarantee(3, requires=NEEDS)
@pytest.mark.parametrize("rows", [False, True], ids=["contiguous", "rows"])
def test_g03_a_value_larger_than_the_ring_is_taken_whole_or_not_at_all(small: Kit, rows: bool) -> None:
    impatient(small)
    stream, taken = small.device.default_stream, []
    lines = Lines(small, 18 * RING * (1 + rows))
    for nbytes in (RING + 1, 3 * RING + 5):
        with small.held(stream):
            for _ in range(2):
                try:
                    lines.write(nbytes, stream, rows=rows)
                    taken.append(True)
                except HalError as error:
                    assert_says(error, device=small.bound.name, hook="async_set_value")
                    taken.append(False)
        lines.check(f"values of {nbytes} bytes for a ring of {RING} on a held stream: taken {taken}")
        lines.write(nbytes, stream, rows=rows)
        lines.check(f"a value of {nbytes} bytes, on a stream that goes on")


@guarantee(3, requires=NEEDS)
def test_g03_an_insertion_that_a_full_ring_refuses_has_done_nothing_and_goes_through_later(small: Kit) -> None:
    impatient(small)
    rig = Rig(small, Sizes(slots=40, max_tokens=16_384, block_size=16, top_k=0))
    waiting: list[Task] = []
    with small.held(rig.stream):
        for slot in range(40):
            request = rig.state.admit(Request(f"r{slot}", (noise(slot, 4 * 16_000).view(np.uint32) % 2**31).tolist()))
            rig.model.requests[request.serial] = Request(f"r{slot}", request.tokens.tolist())
            task = Task(TaskKind.PREFILL, slot, request, 0, request.total, list(range(1000)))
            try:
                rig.insert([task])
            except HalError as error:
                assert_says(error, device=small.bound.name, hook="insert_tasks")
                waiting.append(task)
        assert waiting or not staged_by_the_ring(small), "40 rows of 128 KB went into a held ring of 1 MiB"
    rig.stream.synchronize(PATIENCE)
    rig.check(f"{40 - len(waiting)} insertions were taken, {len(waiting)} refused")
    for task in waiting:
        rig.insert([task]).wait(PATIENCE)
    rig.check("what had been refused was inserted")


def staged_by_the_ring(kit: Kit) -> bool:
    """False where a device takes requests at admission, so that their insertion needs no room in the ring."""
    from ..devices.base import DeviceBase

    stage: Any = type(kit.device).stage
    return stage is DeviceBase.stage


@guarantee(3, requires=NEEDS)
def test_g03_a_batch_larger_than_the_ring_arrives_whole(small: Kit) -> None:
    rig = Rig(small, Sizes(slots=70, max_tokens=8192, block_size=16, top_k=0))
    tasks = []
    for slot in range(70):
        request = rig.admit(Request(f"r{slot}", (noise(slot, 4 * 8000).view(np.uint32) % 2**31).tolist()))
        tasks.append(Task(TaskKind.PREFILL, slot, request, 0, request.total, [slot] * 500))
    rig.insert(tasks).wait(PATIENCE)
    rig.check("70 rows of 64 KB through a ring of 1 MiB")
