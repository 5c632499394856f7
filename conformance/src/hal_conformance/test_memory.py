"""Allocated device memory (alignment, size, neighbours: G26), and calls that must not leak."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from hal_core.errors import HalError, TicketTimeout
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, Memory, View
from hal_core.output.sinks import MemorySink
from hal_core.slots.admission import Request
from hal_core.slots.layout import ALIGNMENT
from hal_core.slots.tasks import Task, TaskKind

from .fixtures import hook_calls
from .fixtures.sizes import sizes
from .fixtures.world import World
from .harness import backdoor
from .harness.asserts import assert_raises
from .harness.backdoor import PATIENCE, arrive, drain
from .harness.claims import note_allowance
from .harness.guarantees import guarantee
from .harness.sinks import FullSink
from .kit import Kit
from .test_threads import on_another_thread

SMALL = (1, 2, 7, 8, 63, 64, 65, 100, 127, 129, 1000, 4095, 4097, 65537, 1 << 20, (1 << 20) + 3)
"""Requested bytes, most of them no round number."""


@guarantee(26, also=(5, 9, 13, 14))
def test_g26_memory_is_aligned_large_enough_and_nobody_elses(kit: Kit) -> None:
    device, stream = kit.device, kit.device.default_stream
    blocks = [device.allocate(nbytes) for nbytes in (*SMALL, *reversed(SMALL), *SMALL[:8])]
    wanted = [*SMALL, *reversed(SMALL), *SMALL[:8]]
    for memory, nbytes in zip(blocks, wanted, strict=True):
        off = memory.address % ALIGNMENT
        assert off == 0, f"allocate({nbytes}) gave a block {off} bytes past a boundary of {ALIGNMENT} bytes"
        assert memory.nbytes >= nbytes, f"allocate({nbytes}) gave a block of {memory.nbytes} bytes"
        assert memory.device is device, f"allocate({nbytes}) gave a block of {memory.device!r}, not of {device!r}"
    spans = sorted((memory.address, memory.address + nbytes) for memory, nbytes in zip(blocks, wanted, strict=True))
    shared = [(low, high) for (_, low), (high, _) in pairwise(spans) if low > high]
    assert not shared, f"of {len(blocks)} blocks, {len(shared)} share bytes with their neighbours"
    for at, (memory, nbytes) in enumerate(zip(blocks, wanted, strict=True)):
        backdoor.write(device, memory, 0, np.full(nbytes, at, np.uint8), stream)
    for at, (memory, nbytes) in enumerate(zip(blocks, wanted, strict=True)):
        got = backdoor.read(device, memory, stream)[:nbytes]
        assert (got == at).all(), f"a block of {nbytes} bytes was written by the write of another block"


@guarantee(26, also=(9, 13, 14))
def test_g26_states_are_aligned_and_apart(kit: Kit) -> None:
    fixtures = [hook_calls.working(kit, name=name) for name in ("target", "proposer", "third")]
    for fixture in fixtures:
        places = {name: place.offset for name, place in fixture.state.layout.fields.items()}
        places |= {f"header of {name}": part.offset for name, part in fixture.state.layout.headers.items()}
        for name, offset in places.items():
            off = (fixture.state.memory.address + offset) % ALIGNMENT
            assert off == 0, f"{name} begins {off} bytes past a boundary of {ALIGNMENT} bytes"
    for fixture in fixtures:
        hook_calls.update_inputs(fixture)
        for one in fixtures:
            one.check(f"a step of state {fixture.name!r}")


class Held(NamedTuple):
    """The resources of the process: threads, descriptors, blocks of Python's allocator (at least one per object), bytes
    of the C heap (arrays, long strings; 0 if the library does not report them), and resident bytes."""

    threads: int
    descriptors: int
    blocks: int
    heap: int
    resident: int


class Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_: ClassVar = [(f"f{at}", ctypes.c_size_t) for at in range(10)]


def heap() -> int:
    """Return the bytes allocated on the C heap."""
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is None:
        return 0
    found.restype = Mallinfo
    text = found()
    return int(text.f7 + text.f4)  # uordblks and hblkhd


def held() -> Held:
    """Return the current resources."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    threads = max(len(os.listdir("/proc/self/task")), threading.active_count())
    descriptors = len(os.listdir("/proc/self/fd"))
    return Held(threads, descriptors, sys.getallocatedblocks(), heap(), pages * os.sysconf("SC_PAGESIZE"))


WINDOWS = 8
"""A leak appears in each of so many windows; filling pools and other threads do not."""
BLOCKS, HEAP, CALLS = 2, 16 << 10, 13
"""Tolerated blocks per round, and bytes per block: caches of NumPy fill slowly, and a simulator that writes a trace
keeps it. Calls in the longest round."""
LARGE = 1 << 17
"""Bytes of the large write of each round: a leak of its data exceeds the limits."""
RESTS = 2.0
"""Seconds in which finished threads must end; on a busy machine they end late."""
RESIDENT = 8 << 20
"""Tolerated resident bytes per window: of the process's allocators."""


def rested(threads: int) -> Held:
    """Return the resources once ending threads have ended, so that at most ``threads`` remain, or after a while."""
    end = time.monotonic() + RESTS
    while (found := held()).threads > threads and time.monotonic() < end:
        time.sleep(0.01)
    return found


def kept(once: Callable[[], None], rounds: int, blocks: int = BLOCKS) -> str:
    """Return what each of some windows of ``rounds`` left behind, or "". ``blocks``: tolerated blocks per round.

    The first window without remains is the last: a leak would have appeared in it.
    """
    bounds = Held(rounds // 5, rounds // 5, blocks * rounds, HEAP * blocks * rounds, RESIDENT)
    found, text = set(Held._fields), ""
    for _ in range(WINDOWS):
        before = held()
        for _ in range(rounds):
            once()
        after = rested(before.threads + bounds.threads)
        more = {name: getattr(after, name) - getattr(before, name) for name in found}
        found = {name for name in found if more[name] > getattr(bounds, name)}
        text = ", ".join(f"{more[name]} more {name}" for name in sorted(found))
        if not found:
            break
    return text


def wrap(fixture: World, large: View) -> None:
    """Write a large value, so that a staging ring wraps and drops the entries of small writes."""
    arrive(fixture.bound.async_set_value(target=large, value=np.ones(large.shape, np.int64), stream=fixture.stream))


def hooks(fixture: World) -> None:
    """Call every hook and primitive once, and return to the initial state."""
    for act in hook_calls.VALUES.values():
        act(fixture)
    hook_calls.submit(fixture)
    fixture.insert([hook_calls.leaving(fixture, 0), hook_calls.entering(fixture, 0)])
    hook_calls.broadcast(fixture)
    hook_calls.update_inputs(fixture)
    sink = MemorySink()
    fixture.state.take(hook_calls.save(fixture, sink))  # type: ignore[arg-type]  # save_output's
    arrive(hook_calls.copy_out(fixture))
    fixture.device.event(fixture.stream).wait(PATIENCE)
    fixture.model.requests.clear()
    fixture.model.loose.clear()
    fixture.model.bound[:] = [0] * hook_calls.SIZES.num_slots  # every round enters the slot again


def tickets_nobody_waits_for(fixture: World) -> None:
    """Make calls whose tickets are dropped."""
    for act in (hook_calls.scalar, hook_calls.array, hook_calls.submit, hook_calls.update_inputs):
        act(fixture)
    drain(fixture.stream)


def refusals(fixture: World) -> None:
    """Make calls that the host and a sink refuse."""
    bound, stream, state = fixture.bound, fixture.stream, fixture.state
    wrong: list[Callable[[], object]] = [
        lambda: bound.async_set_value(target=state.view("seed"), value=1.5, stream=stream),
        lambda: bound.async_set_value(target=state.view("seed"), value=[1, 2], stream=stream),
        lambda: bound.insert_tasks(
            state=state, tasks=[Task(TaskKind.PREFILL, 99, fixture.model.residents[0].admitted)], stream=stream
        ),
        lambda: bound.save_output(state=state, step=fixture.step([99]), sink=fixture.sink, stream=stream),
        lambda: hook_calls.save(fixture, FullSink()),
        lambda: state.admit(Request("too long", [1] * 999)),
    ]
    for call in wrong:
        assert_raises(HalError, call, "a call that must be refused")
    hook_calls.scalar(fixture)


def memory(fixture: World) -> None:
    """Allocate and free device memory."""
    block = fixture.device.allocate(1 << 18)
    backdoor.write(fixture.device, block, 0, np.full(1 << 18, 3, np.uint8), fixture.stream)


def bursts_of_copies(fixture: World) -> None:
    """Copy more out at once than a pool keeps, always from one block."""
    if (block := BLOCK_OF.get(fixture)) is None:
        block = BLOCK_OF[fixture] = fixture.device.allocate(BURST)
    copies = [fixture.device.copy_out(block, [ByteRange(0, BURST)], fixture.stream) for _ in range(AT_ONCE)]
    for copy in copies:
        arrive(copy)
        assert copy.data[0].nbytes == BURST


def memory_of_another_thread(fixture: World) -> None:
    """Write to memory that another thread has allocated, after it has dropped that of the round before."""

    def swap() -> None:
        BLOCK_OF.pop(fixture, None)
        BLOCK_OF[fixture] = fixture.device.allocate(1 << 18)

    on_another_thread(swap, "memory dropped and allocated")
    backdoor.write(fixture.device, BLOCK_OF[fixture], 0, np.full(1 << 18, 3, np.uint8), fixture.stream)


def states(fixture: World) -> None:
    """Create, use and drop states."""
    state = fixture.bound.state(hook_calls.SIZES, name="short-lived")
    request = state.admit(Request("r", [1, 2, 3]))
    task = Task(TaskKind.PREFILL, 0, request, 0, 3, [0])
    arrive(fixture.bound.insert_tasks(state=state, tasks=[task], stream=fixture.stream))


def waits_that_time_out(fixture: World) -> None:
    """Wait often for a ticket that is not done, and then for its end."""
    with fixture.kit.held(fixture.stream, "a ticket that is waited for"):
        ticket = hook_calls.scalar(fixture)
        for _ in range(40):
            if not ticket.done():
                assert_raises(TicketTimeout, lambda: ticket.wait(0), "a wait of no time for what is held")
    arrive(ticket)


def never_entered(fixture: World) -> None:
    """Admit requests, one by one and at once, and drop them."""
    requests = [Request(f"r{at}", [1, 2, 3]) for at in range(10)]
    fixture.state.admit_all(requests)
    for request in requests:
        fixture.state.admit(request)


MOST_KEPT = 8
"""Blocks a call that may be forgiven (``Support.keeps``)."""


def forgiven(kit: Kit, calls: int) -> int:
    """Return the blocks that a library may keep of so many calls, and note it."""
    keeps = kit.subject.support.keeps
    assert 0 <= keeps <= MOST_KEPT, f"Support.keeps is {keeps} blocks a call, but at most {MOST_KEPT} are forgiven"
    if keeps:
        note_allowance(26, f"keeps: {keeps} small blocks a call, of at most {MOST_KEPT}, which a library keeps")
    return calls * keeps


SMALLEST = 96
"""Bytes of the C heap and the process that a call may keep: caches keep fewer, and a leaked object has more."""
ROUND_THE_RING = 6_000
"""Calls after which a staging ring has been used all round, for checkers that note each of its places."""
TURNS = (*hook_calls.VALUES, "copy_out")
"""Calls that take turns."""


def referred(device: object) -> int:
    """Return how many objects the opened device refers to, and its plugin's modules: what it keeps itself."""
    package = type(device).__module__.partition(".")[0]
    modules = [module for name, module in [*sys.modules.items()] if name.partition(".")[0] == package]
    left: list[object] = [device, *(vars(module) for module in modules)]
    known, objects = set[int](), list[object]()
    while left:
        one = left.pop()
        if id(one) not in known and not isinstance(one, type | ModuleType | FunctionType | FrameType):
            known.add(id(one))
            objects.append(one)  # no other object gets its number meanwhile
            left += gc.get_referents(one)
    return len(objects)


@guarantee(26)
@pytest.mark.parametrize("turns", [TURNS, ("a timed event",)], ids=["hooks", "timed events"])
def test_g26_thousands_of_calls_keep_no_bytes_of_the_process(kit: Kit, turns: Sequence[str]) -> None:
    """By the system's figures, whatever the plugin counts itself: what is lost below Python, of any size."""
    if turns != TURNS and not kit.capabilities.timed_events:
        pytest.skip("needs timed_events")
    calls = max(sizes(kit, "calls of which none keeps memory")) // 4
    one = Kit(kit.subject, kit.effort)
    fixture, lost, own = hook_calls.working(one), list[int](), list[int]()
    most, after, now = (SMALLEST + 1024 * forgiven(kit, 1)) * calls, held(), referred(one.device)
    for turn in range(1 + max(4, ROUND_THE_RING // calls)):
        before, known = after, now
        for at in range(calls if turn else calls // 2):  # the first fills pools
            hook_calls.again(fixture, turns[at % len(turns)])
        now, after = referred(one.device), held()
        own.append(now - known)
        lost.append(max(after.heap - before.heap, after.resident - before.resident if calls > 1000 else 0))
        if turn and lost[-1] < most and own[-1] < calls // 4:
            break
    one.renew()
    assert min(own[1:]) < calls // 4, f"after each {calls} calls the device itself refers to {own[1:]} objects more"
    assert min(lost[1:]) < most, f"each {calls} calls leave {lost[1:]} bytes"


COPIED, WARM = 4096, 200
"""Ranges of which no two are the same, as such a copy may take the place of the one before; copies before the first
window."""


@guarantee(26)
def test_g26_copies_out_without_a_write_keep_nothing(kit: Kit) -> None:
    """Nothing is written in between: a device that only then forgets its running reads remembers each."""
    one = Kit(kit.subject, kit.effort)
    fixture, at = hook_calls.working(one), itertools.count()
    source = fixture.device.allocate(COPIED * 8 + 64)

    def copy() -> None:
        part = ByteRange(next(at) % COPIED * 8, 64)
        arrive(fixture.bound.copy_out(memory=source, parts=[part], stream=fixture.stream))

    for _ in range(WARM):
        copy()
    found = kept(copy, WARM, BLOCKS + forgiven(kit, 1))
    one.renew()
    assert not found, f"each {WARM} copies out leave {found}: running reads are remembered until something is written"


BURST, AT_ONCE = 1 << 20, 32
"""Bytes of each copy out of a burst, and how many there are."""
BLOCK_OF: WeakKeyDictionary[World, Memory] = WeakKeyDictionary()
STAGED = 2 << 20
"""Bytes that each opened device stages: ten that keep them exceed the limit."""
ROUNDS: dict[str, tuple[Callable[[World], None], int]] = {
    "hooks": (hooks, 40),
    "tickets without a waiter": (tickets_nobody_waits_for, 50),
    "refusals": (refusals, 40),
    "memory": (memory, 40),
    "bursts of copies": (bursts_of_copies, 3),
    "memory that another thread drops": (memory_of_another_thread, 40),
    "states": (states, 20),
    "waits that time out": (waits_that_time_out, 20),
}
"""The repeated calls, and their number in a window; each is several calls."""


@guarantee(26, also=(1, 2, 3, 10, 19, 22, 23))
@pytest.mark.parametrize("what", ROUNDS)
def test_g26_hundreds_of_calls_keep_nothing(kit: Kit, what: str) -> None:
    once, rounds = ROUNDS[what]
    one = Kit(kit.subject, kit.effort)
    fixture = hook_calls.working(one)
    large = View.contiguous(one.device.allocate(LARGE), 0, (LARGE // 8,), dtype_of("int64"))

    def again() -> None:
        once(fixture)
        wrap(fixture, large)

    for _ in range(10):
        again()
    found = kept(again, rounds, BLOCKS + forgiven(kit, CALLS + AT_ONCE * (once is bursts_of_copies)))
    one.renew()
    assert not found, f"each {rounds} rounds of {what} leave {found}: the calls leak"


@guarantee(26)
def test_g26_requests_that_never_enter_are_not_kept(kit: Kit) -> None:
    """A device that stages at admission may keep a few thousand references to those that were dropped."""
    one = Kit(kit.subject, kit.effort)
    fixture = hook_calls.working(one)
    found = kept(lambda: never_entered(fixture), 2000, 16)  # of 20 requests a round
    one.renew()
    assert not found, f"40,000 requests that never enter leave {found}"


@guarantee(26)
def test_g26_opening_and_closing_keeps_nothing(kit: Kit) -> None:
    def once() -> None:
        one = Kit(kit.subject, kit.effort)
        fixture = hook_calls.working(one)
        view = View.contiguous(one.device.allocate(STAGED), 0, (STAGED // 8,), dtype_of("int64"))
        wrap(fixture, view)
        arrive(hook_calls.copy_out(fixture))
        one.bound.close()

    found = kept(once, 10, 20 * BLOCKS + forgiven(kit, CALLS))
    assert not found, f"each 10 openings and closings of the device leave {found}"
