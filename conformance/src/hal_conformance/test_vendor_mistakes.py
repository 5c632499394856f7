"""What a vendor on a real runtime gets wrong: events, locked memory, counts, handles, bytes beside those written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hal_core.errors import OutOfMemory, TicketTimeout
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import FinishReason, StateConfig
from hal_core.slots.tasks import Task, TaskKind

from .fixtures import hook_calls
from .fixtures.prepared_calls import VALUES
from .fixtures.sizes import MIB, sizes
from .fixtures.stream_cases import copied
from .fixtures.world import World
from .harness import backdoor
from .harness.asserts import assert_no_error, assert_raises
from .harness.backdoor import PATIENCE, arrive
from .harness.bits import noise
from .harness.claims import note_unchecked
from .harness.guarantees import guarantee
from .harness.waiters import A_WHILE, come_true
from .kit import Kit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hal_core.tickets import Ticket

COUNTED = ("submissions", "uploads", "launches", "copies_out")
LOCKED, PIECE = 256, 8 * MIB
"""Bytes to which ``allocate_host`` aligns, and of a large block of it."""
ROUNDS, WARM = 60, 40
"""Rounds of calls in which native objects are counted, after as many in which pools fill."""


@contextmanager
def another(kit: Kit) -> Iterator[Kit]:
    """Another opened device of the same kind, closed at the end."""
    other = kit.another()
    try:
        yield other
    finally:
        other.renew()


@guarantee(1, requires=("can_hold_stream", "async_d2h"))
def test_g01_a_stream_waits_for_the_event_of_another_opened_device(kit: Kit) -> None:
    with another(kit) as other:
        theirs, mine = other.device.stream(), kit.device.stream()
        memory, elsewhere = kit.device.allocate(4096), other.device.allocate(64)
        before, after = noise(1, 4096), noise(2, 4096)
        backdoor.write(kit.device, memory, 0, before, mine)
        with other.held(theirs, "a wait for another opened device's event"):
            backdoor.put(other.device, elsewhere, [(0, bytes(64))], theirs)
            event = other.device.event(theirs)
            assert_no_error(lambda: mine.wait(event), "stream.wait() for an event of another opened device")
            early = copied(kit, memory, mine)
            write = backdoor.put(kit.device, memory, [(0, after.tobytes())], mine)
            why = "synchronize of a stream that waits for another device's held stream"
            assert_raises(TicketTimeout, lambda: mine.synchronize(A_WHILE), why)
            for what, ticket in (("copy", early), ("write", write)):
                assert not ticket.done(), f"a {what} is done, but its stream waits for another device's held stream"
        for ticket in (early, write):
            arrive(ticket)
        assert (early.data[0] == before).all(), "the copy behind another device's event has other bytes"


EVENTS = 100
"""Events that another device makes after one: more than its pool of them holds."""


@guarantee(1, requires=("can_hold_stream", "async_d2h"), also=(26,))
def test_g01_a_wait_for_another_devices_event_is_not_for_what_it_records_later(kit: Kit) -> None:
    """The event has passed and is dropped; its stream is held, and its device uses the runtime's object again."""
    with another(kit) as other:
        theirs, mine, memory = other.device.stream(), kit.device.stream(), kit.device.allocate(64)
        with kit.held(mine) as latch:
            event = other.device.event(theirs)
            assert event.wait(PATIENCE), "an event of an idle stream has not passed"
            mine.wait(event)
            del event
            with other.held(theirs, "a wait for another device's passed event"):
                later = [other.device.event(theirs) for _ in range(EVENTS)]
                write = backdoor.put(kit.device, memory, [(0, bytes(64))], mine)
                latch.release()
                what = "a write on a stream that waits for another device's event, which has passed"
                come_true({what: write}, kit.effort.hang)
        assert later[-1].wait(PATIENCE), "the last event of another device's stream has not passed"


NARROW = ("uint8", "bool", "int16")


@guarantee(5, requires=("async_h2d", "can_hold_stream"))
@pytest.mark.parametrize("dtype", NARROW)
def test_g05_a_write_that_waits_takes_no_neighbours_along(kit: Kit, dtype: str) -> None:
    """Elements of one word written on two streams, the first of which is held: whole words would undo the second."""
    device, kind = kit.device, dtype_of(dtype)
    count = 64
    memory, one, two = device.allocate(count * kind.itemsize), device.stream(), device.stream()
    backdoor.write(device, memory, 0, np.zeros(count * kind.itemsize, np.uint8), one)
    view, should = View.contiguous(memory, 0, (count,), kind), np.zeros(count, kind.storage)
    parts: Mapping[str, tuple[Any, Any]] = {
        "an element": (view[0], 1), "a strided fill": (view[4:32:2], 1), "a strided array": (view[34::2], [1] * 15),
    }  # fmt: skip
    with kit.held(one):
        held = {what: kit.bound.async_set_value(target=t, value=v, stream=one) for what, (t, v) in parts.items()}
        for at in (1, 2, 3, *range(5, 32, 2), 32, 33, *range(35, count, 2)):
            arrive(kit.bound.async_set_value(target=view[at], value=1, stream=two))
    for what, ticket in held.items():
        arrive(ticket, what)
    should[...] = 1
    got = backdoor.read(device, memory, one)[: should.nbytes].view(kind.storage)
    wrong = np.flatnonzero(got != should).tolist()
    assert not wrong, f"elements {wrong} of {dtype} lost what was written beside them while a write waited"


@guarantee(7, requires="pinned_host")
def test_g07_locked_host_memory_comes_from_the_runtime(kit: Kit) -> None:
    """``pinned_host`` says that staging memory is page-locked, so ``allocate_host`` has to give some."""
    device, support = kit.device, kit.subject.support
    if kit.missing(("is_locked",)):
        note_unchecked(7, "pinned_host: that staging memory is page-locked is the plugin's word", "give is_locked()")
    if kit.missing(("primitives",)):
        pytest.skip("needs primitives")
    primitives: Any = device.primitives  # type: ignore[attr-defined]  # it has them
    blocks = [primitives.allocate_host(nbytes) for nbytes in SMALL_BLOCKS for _ in range(2)]
    try:
        assert None not in blocks, "pinned_host is true, but allocate_host() gives no memory"
        off = [address % LOCKED for address in blocks]
        assert not any(off), f"allocate_host() gave blocks {off} bytes past a boundary of {LOCKED} bytes"
        assert len(set(blocks)) == len(blocks), "allocate_host() gave one block twice"
        for other in blocks[1::2]:
            primitives.free_host(other)
        del blocks[1::2]  # of a page that the others share
        most = max(sizes(kit, "bytes of locked memory"))
        blocks += itertools.takewhile(bool, (locked_block(primitives) for _ in range(most // PIECE)))  # or its limit
        ends = [address + nbytes - 1 for address, nbytes in zip(blocks, SMALL_BLOCKS, strict=False)]
        locked = [support.is_locked(device, address) for address in (*ends, *blocks)]
        assert False not in locked, (
            f"pinned_host is true, but the driver says that byte {locked.index(False)} of {len(locked)} in blocks that"
            " allocate_host() gave is not locked; others were freed"
        )
        plain = np.zeros(1 << 16, np.uint8)  # of nobody's runtime
        assert not support.is_locked(device, plain.ctypes.data), "is_locked() says so of memory that nobody has locked"
    finally:
        for address in blocks:
            if address is not None:
                primitives.free_host(address)


SMALL_BLOCKS = (1, 1000, 1 << 16)
"""Bytes of locked memory, some of it in one page."""


def locked_block(primitives: Any) -> int:  # noqa: ANN401 (the vendor's)
    """Return a large block of host memory, or 0 if the system locks no more."""
    try:
        return primitives.allocate_host(PIECE) or 0
    except OutOfMemory:
        return 0


def prepared(kit: Kit, what: str) -> Callable[[], Ticket]:
    """A prepared hook call, or a prepared form of a value."""
    if what in hook_calls.CALLS:
        fixture = hook_calls.working(kit)
        return lambda: hook_calls.CALLS[what](fixture)
    call, stream = VALUES[what].call(kit), kit.device.default_stream
    for memory, data in ((call.memory, call.before), *call.sources):
        backdoor.write(kit.device, memory, 0, data, stream)
    return lambda: call.act(stream)


@guarantee(10)
@pytest.mark.parametrize("what", [*hook_calls.CALLS, *VALUES])
def test_g10_each_call_counts_what_reached_the_driver(kit: Kit, what: str) -> None:
    probe, call = kit.driver_counts(), prepared(kit, what)
    below, own = probe(), kit.bound.counters()
    arrive(call(), what)
    seen, counted = probe() - below, kit.bound.counters() - own
    for name in COUNTED:
        got, should = getattr(counted, name), getattr(seen, name)
        assert got == should, f"{what}: counters() says {got} {name}, but {should} reached the driver"


@guarantee(11)
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_g11_a_stop_reason_leaves_with_its_request(kit: Kit, speculative: bool) -> None:
    """A slot whose request ended by length, by a stop and by an abort takes a new one that has not ended."""
    fixture = World(kit, StateConfig(num_slots=3, max_model_len=16, block_size=4, max_draft_tokens=2, max_logprobs=0))
    ends = [
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=9, eos_token_ids=(7,)),
        SamplingParams(max_tokens=9),
    ]
    first = [fixture.admit(Request(f"old{slot}", [1, 2], params)) for slot, params in enumerate(ends)]
    fixture.enter([Task(TaskKind.PREFILL, slot, one, 0, 2, [slot]) for slot, one in enumerate(first)])
    _step(fixture, speculative)
    reasons = fixture.model.cells["stop_reason"].reshape(-1).tolist()
    assert reasons == [FinishReason.LENGTH, FinishReason.STOP, 0], f"the kit's own reasons are {reasons}"
    fixture.enter([Task(TaskKind.ABORTED, 2, first[2])])
    fixture.output(fixture.step([0, 1, 2], speculative=speculative))
    fixture.release([0, 1])
    new = [fixture.admit(Request(f"new{slot}", [3, 4, 5], SamplingParams(max_tokens=9))) for slot in range(3)]
    fixture.enter([Task(TaskKind.PREFILL, slot, one, 0, 3, [slot]) for slot, one in enumerate(new)])
    fixture.check("requests that took the slots of ended ones")
    rows = fixture.output(_step(fixture, speculative))
    finished = [(row.request_id, row.finish.name) for row in rows if row.finish]
    assert not finished, f"the kit's own rows have {finished}"
    fixture.check("a step after them")


def _step(fixture: World, speculative: bool) -> Any:  # noqa: ANN401 (a Step)
    """A step that gives each slot token 7."""
    step = fixture.step([0, 1, 2], speculative=speculative)
    cells = {name: fixture.model.cells[name].copy() for name in ("sampled_token_ids", "accept_tokens", "accept_num")}
    for name, value in (("sampled_token_ids", 7), ("accept_tokens", 7), ("accept_num", 1)):
        cells[name][...] = value
    fixture.put(cells)
    fixture.run(step)
    return step


@guarantee(26, requires="native_objects")
@pytest.mark.parametrize("what", [*hook_calls.VALUES, "insert and leave", "a step", "copy_out"])
def test_g26_calls_keep_no_object_of_the_driver(kit: Kit, what: str) -> None:
    """Handles that are no objects of Python's: the plugin counts those that it has made and not given back."""
    fixture, support = hook_calls.working(kit), kit.subject.support
    for _ in range(WARM):
        hook_calls.again(fixture, what)
    before = dict(support.native_objects(kit.device))
    for _ in range(ROUNDS):
        hook_calls.again(fixture, what)
    after = dict(support.native_objects(kit.device))
    kept = {name: after[name] - before[name] for name in after if after[name] - before[name] > ROUNDS // 4}
    assert not kept, f"{ROUNDS} rounds of {what} left {kept} more objects of the driver"
