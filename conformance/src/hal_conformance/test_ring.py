"""The staging ring (G2, G3, G26): values that fill it, wait for room, or are refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hal_core.errors import OutOfMemory
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_core.memory.writes import Writes
from hal_core.slots.admission import Request
from hal_core.slots.fields import StateConfig
from hal_core.slots.tasks import Task, TaskKind

from .fixtures import hook_calls
from .fixtures.large_blocks import GAP, LargeBlock
from .fixtures.ring_cases import ENOUGH, NEEDS, RING, RingWrites, impatient, in_its_time, refusal
from .fixtures.stream_cases import pairs
from .fixtures.world import World
from .harness.asserts import assert_says
from .harness.backdoor import arrive, drain
from .harness.bits import noise
from .harness.guarantees import guarantee
from .harness.reached import Reached
from .kit import Kit, Latch
from .liars import faults
from .test_faults import under

if TYPE_CHECKING:
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket


PAIRS = {"quick": 2, "default": 3, "nightly": 3}
"""In quick the default stream is one of the two."""
FIRST = ("early", "late", "between")
"""When the held stream takes its spans: before, after or among those of the other."""


@guarantee(2, requires=NEEDS, also=(3,))
@pytest.mark.parametrize("first", FIRST)
def test_g02_a_span_is_fenced_by_its_own_stream_and_not_a_neighbours(small: Kit, first: str) -> None:
    """On the default stream and another, and on two others."""
    for case, held, free in pairs(small)[: PAIRS[small.effort.profile]]:
        two_streams(small, first, case, held, free)


def two_streams(small: Kit, first: str, case: str, held: Stream, free: Stream) -> None:
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
    writes.check(f"{case}: the first was held while the second used the ring many times over")
    writes.must_write(400_000, held)
    writes.check(f"{case}: both continued")


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


@guarantee(3, requires=NEEDS, also=(2,))
@pytest.mark.parametrize("nbytes", [4500, 12_000, 65_536, 200_000])
@pytest.mark.parametrize("rows", [False, True], ids=["contiguous", "rows"])
def test_g03_writes_before_a_full_rings_refusal_are_right(small: Kit, nbytes: int, rows: bool) -> None:
    """Until it refuses, once more while it is full; then all is compared, and so again."""
    rounds, refusals = 2, 0
    writes = RingWrites(small, (2 * rounds + 1) * (RING + RING // 64 + 4 * nbytes) + 2 * ENOUGH * 100)
    stream = small.device.default_stream
    for turn in range(rounds):
        with small.held(stream), impatient(small):
            for _ in range(2):  # a refusal frees no span that is still to be read
                refusals += writes.until_refused([nbytes], stream, rows=rows) is not None
        writes.check(f"round {turn} of a ring that was filled while its stream was held")
        writes.must_write(nbytes, stream, rows=rows)
        writes.check(f"a write after refusal {turn}")
    assert refusals == 2 * rounds, f"a held ring of {RING} bytes refused {refusals} times of {2 * rounds}"


def write_several(fixture: World) -> Ticket:
    """Write to the state and to other memory."""
    writes, other = Writes(), fixture.device.allocate(64)
    writes.fill(fixture.state.view("next_tokens"), [0, 1], 5)
    writes.set(View.contiguous(other, 0, (8,), dtype_of("int64")), 3)
    ticket = fixture.bound.write(writes=writes, stream=fixture.stream)
    fixture.model.cells["next_tokens"][[0, 1]] = 5
    return ticket


PRESSED: dict[str, tuple[str, Callable[[World], Ticket]]] = {
    **{what: ("async_set_value", act) for what, act in hook_calls.VALUES.items()},
    **{what: ("insert_tasks", hook_calls.WRITES[what]) for what in ("insert", "leave")},
    "a write to several": ("write", write_several),
    "drafts": ("set_drafts", lambda fixture: fixture.propose({0: [4], 1: [5, 6]})),
}
"""Description to the call's name and the call."""


@guarantee(26, requires=NEEDS, also=(3, 8))
def test_g26_a_full_rings_refusals_are_the_contracts_and_not_booked(small: Kit) -> None:
    """Every call that writes; calls that need no room in the ring may succeed."""
    refused = 0
    for what, (hook, act) in PRESSED.items():
        fixture = hook_calls.working(small)
        if hook == "set_drafts":
            fixture.advance(range(hook_calls.ENTERED))
        writes, before = RingWrites(small, 3 * RING), fixture.model.block.copy()
        booked = fixture.state.host_table.table.copy(), dict(fixture.state.host_table.live)
        with small.held(fixture.stream), impatient(small):
            for nbytes in (RING // 8, 4096, 1):  # the last of them leaves no room at all
                writes.until_refused([nbytes], fixture.stream)
            ticket, began = None, monotonic()
            try:
                ticket = act(fixture)
            except Exception as error:  # noqa: BLE001 (whatever it is, it must be the contract's)
                in_its_time(small, began, hook)
                refusal(small, error, hook)
                refused += 1
        if ticket is not None:
            arrive(ticket)
        else:
            fixture.model.block[...] = before
            now = fixture.state.host_table.table, fixture.state.host_table.live
            assert (now[0] == booked[0]).all(), f"{what} was refused by a full ring, and booked all the same"
            assert now[1] == booked[1], f"{what} was refused by a full ring, and booked all the same"
        writes.check(f"what filled the ring before {what}")
        fixture.check(f"{what}, when the ring was full")
    assert refused, "no call was refused by a ring that had no room"


@guarantee(3, requires=NEEDS)
@pytest.mark.parametrize("rows", [False, True], ids=["contiguous", "rows"])
def test_g03_a_value_larger_than_the_ring_is_taken_whole_or_not_at_all(small: Kit, rows: bool) -> None:
    stream, taken = small.device.default_stream, []
    writes = RingWrites(small, 13 * RING)
    for nbytes in (RING + 1, 3 * RING + 5):
        with small.held(stream), impatient(small):
            for _ in range(2):
                try:
                    writes.write(nbytes, stream, rows=rows)
                    taken.append(True)
                except Exception as error:  # noqa: BLE001 (whatever it is, it must be the contract's)
                    refusal(small, error, "async_set_value")
                    taken.append(False)
        writes.check(f"values of {nbytes} bytes for a ring of {RING} on a held stream: taken {taken}")
        writes.must_write(nbytes, stream, rows=rows)
        writes.check(f"a value of {nbytes} bytes, on a running stream")


@guarantee(3, requires=(*NEEDS, "fused_scatter"), also=(1, 2, 4))
@pytest.mark.parametrize("rows", [False, True], ids=["contiguous", "rows"])
def test_g03_a_value_larger_than_the_ring_does_not_wait_for_its_stream(small: Kit, rows: bool) -> None:
    """Set, and written together with other memory; a small write after each keeps its place (G4)."""
    shape, strides = ((3 * RING // 4096, 4096), (8192, 1)) if rows else ((3 * RING + 5,), (1,))
    block = LargeBlock(small, 8 * RING)
    target = View(block.memory, GAP, shape, strides, dtype_of("uint8"))
    for turn, several in enumerate((False, True)):
        value, tickets = noise(17 + turn, target.size).reshape(shape), []
        should = value.copy()
        with small.held(block.stream):
            if several:
                writes = Writes()
                writes.set(target, value)
                writes.set(View.contiguous(small.device.allocate(64), 0, (64,), target.dtype), 3)
                tickets.append(small.bound.write(writes=writes, stream=block.stream))
            else:
                tickets.append(block.set(target, value))
            value[...] = 0xEE
            tickets.append(block.set(block.at(GAP + 64, (8,)), 2))
            done = [ticket.done() for ticket in tickets]
            assert not any(done), f"{target.size} bytes for a ring of {RING}: done={done}, but their stream is held"
        for ticket in tickets:
            arrive(ticket)
        block.over(target)[...] = should
        block.over(block.at(GAP + 64, (8,)))[...] = 2
        block.check(f"a value of {target.size} bytes for a ring of {RING} on a stream that was held")


@guarantee(3, requires=NEEDS)
@pytest.mark.parametrize(("rows", "own"), [(False, True), (True, False)], ids=["contiguous-own", "rows-default"])
def test_g03_a_value_above_the_limit_is_refused_while_its_stream_is_held(small: Kit, rows: bool, own: bool) -> None:
    """Its stream alone counts: while only others are held the value is taken, before and after a refusal."""
    device = small.device
    device.value_limit = 2 * RING  # type: ignore[attr-defined]  # of the base, as its ring
    stream, other = device.stream(), device.default_stream
    if not own:
        stream, other = other, stream
    writes, taken = RingWrites(small, 17 * RING), 0
    for _ in range(2):
        with small.held(other, "a value above the limit, on a stream that runs,"):
            writes.must_write(3 * RING, stream, rows=rows)
            arrive(writes.tickets[-1])
        with small.held(stream), impatient(small):
            try:
                writes.write(3 * RING, stream, rows=rows)
                taken += 1
            except Exception as error:  # noqa: BLE001 (whatever it is, it must be the contract's)
                refusal(small, error, "async_set_value")
    assert not taken, f"{3 * RING} bytes, above the limit of {2 * RING}, were taken {taken} times on a held stream"
    writes.check("values above the limit, refused on a held stream")


@guarantee(3, requires=(*NEEDS, "several_memories"), also=(26,))
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_g03_a_write_to_several_with_a_value_above_the_limit_is_refused_whole(small: Kit, last: bool) -> None:
    """On a stream of its own; the small memory comes before the large one, or after it, and is left as it was."""
    device, stream = small.device, small.device.stream()
    device.value_limit = 2 * RING  # type: ignore[attr-defined]  # of the base, as its ring
    lines, little_block = RingWrites(small, 4 * RING), LargeBlock(small, 4096)
    lines.block.stream = little_block.stream = stream
    large, little = lines.target(3 * RING), little_block.at(GAP, (64,))
    value = noise(3, 3 * RING)

    def write() -> Ticket:
        writes = Writes()
        for target, given in [(large, value), (little, 7)][:: -1 if last else 1]:
            writes.set(target, given)
        return small.bound.write(writes=writes, stream=stream)

    taken = True
    with small.held(stream), impatient(small):
        try:
            write()
        except Exception as error:  # noqa: BLE001 (whatever it is, it must be the contract's)
            refusal(small, error, "write")
            taken = False
    assert not taken, f"{3 * RING} bytes and 64, above the limit of {2 * RING}, were taken on a held stream"
    for block in (lines.block, little_block):
        block.check("a write to two memories that was refused for its size")
    arrive(write())
    lines.block.over(large)[...], little_block.over(little)[...] = value, 7
    for block in (lines.block, little_block):
        block.check("the same write on a running stream")


@guarantee(26, requires="staging", also=(3, 5))
@pytest.mark.parametrize("rows", [False, True], ids=["contiguous", "rows"])
def test_g26_a_value_that_finds_no_device_memory_is_refused_whole(kit: Kit, rows: bool) -> None:
    """A value larger than the ring goes through memory of the device, which may have none left."""
    with under(kit, faults.OutOfRoom) as (laid, fuse):
        laid.device.staging.limit = RING  # type: ignore[attr-defined]  # the seam that `requires` asks for
        lines, stream = RingWrites(laid, 8 * RING), laid.device.default_stream
        target, value = lines.target(3 * RING, rows=rows), noise(9, 3 * RING)
        value, fuse.at, ticket = value.reshape(target.shape), 1, None
        try:
            ticket = laid.bound.async_set_value(target=target, value=value, stream=stream)
        except OutOfMemory as error:
            assert_says(error, device=laid.bound.name, hook="async_set_value")
        except Exception as error:
            raise AssertionError(f"a value that found no device memory raised {error!r}, not OutOfMemory") from error
        if ticket is not None:
            arrive(ticket)  # the device has released memory and tried again
            lines.block.over(target)[...] = value
        fuse.at = 0
        lines.check("a value larger than the ring, when there was no memory")
        lines.must_write(3 * RING, stream, rows=rows)
        lines.check("a value larger than the ring, once there is memory again")


@guarantee(3, requires=NEEDS, also=(8,))
@pytest.mark.parametrize(("together", "tokens"), [(1, 16_000), (20, 1800)], ids=["one by one", "twenty at once"])
def test_g03_an_insertion_refused_by_a_full_ring_can_be_repeated(small: Kit, together: int, tokens: int) -> None:
    """What is left of the ring holds some of the last batch's bytes, and none of them is written."""
    fixture = World(small, StateConfig(num_slots=80, max_model_len=16_384, block_size=16, max_logprobs=0))
    waiting: list[list[Task]] = []
    with small.held(fixture.stream), impatient(small):
        for first in range(0, 40 if together == 1 else 80, together):
            tasks = []
            for slot in range(first, first + together):
                ids = (noise(slot, 4 * tokens).view(np.uint32) % 2**31).tolist()
                request = fixture.state.admit(Request(f"r{slot}", ids))
                fixture.model.requests[request.admission_id] = Request(f"r{slot}", ids)
                tasks.append(Task(TaskKind.PREFILL, slot, request, 0, request.total, list(range(tokens // 16 + 1))))
            try:
                fixture.insert(tasks)
            except Exception as error:  # noqa: BLE001 (whatever it is, it must be the contract's)
                refusal(small, error, "insert_tasks")
                waiting.append(tasks)
        assert waiting or not staged_by_the_ring(small), "40 rows of 128 KB went into a held ring of 1 MiB"
    drain(fixture.stream)
    fixture.check(f"insertions of {together} were taken until the ring was full, and {len(waiting)} refused")
    for tasks in waiting:
        fixture.enter(tasks)
    fixture.check("what had been refused was inserted")


def staged_by_the_ring(kit: Kit) -> bool:
    """Return False if the device takes requests at admission, so that their insertion needs no room in the ring."""
    from hal_core.devices.base import DeviceBase

    stage: Any = type(kit.device).on_admit
    return stage is DeviceBase.on_admit


@guarantee(3, requires=NEEDS)
def test_g03_a_batch_larger_than_the_ring_arrives_whole(small: Kit) -> None:
    fixture = World(small, StateConfig(num_slots=70, max_model_len=8192, block_size=16, max_logprobs=0))
    tasks = []
    for slot in range(70):
        request = fixture.admit(Request(f"r{slot}", (noise(slot, 4 * 8000).view(np.uint32) % 2**31).tolist()))
        tasks.append(Task(TaskKind.PREFILL, slot, request, 0, request.total, [slot] * 500))
    fixture.enter(tasks)
    fixture.check("70 rows of 64 KB through a ring of 1 MiB")
