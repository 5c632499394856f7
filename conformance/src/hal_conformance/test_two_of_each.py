"""Two of each that work by turns or at once: states, streams and opened devices (G1, G4), threads that admit (G9)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import product, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_core.memory.writes import Writes
from hal_core.slots.admission import AdmittedRequest, Request
from hal_core.slots.fields import StateConfig
from hal_core.slots.tasks import TaskKind

from .fixtures import hook_calls
from .fixtures.hook_cases import SIZES, new_tasks
from .fixtures.many import MANY, prefill, prompt, varied
from .fixtures.prepared_calls import assert_copied
from .fixtures.sizes import sizes
from .fixtures.stream_cases import copied
from .fixtures.world import Outputs, World
from .harness import backdoor
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .kit import Kit
from .test_vendor_mistakes import another

if TYPE_CHECKING:
    from hal_core.memory.copies import CopyTicket
    from hal_core.memory.views import Memory
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket

TURNS = 5
BESIDE_HELD = 4
"""How many streams, made right after two, surely run while these are held: CUDA gives streams the chip's queues in
turn, and of some 40 streams two have the same one and wait for each other."""
SLOTS = SIZES.num_slots


class Actor:
    """A state of its own and what is done with it, call by call, on its stream; :meth:`check` compares all of it."""

    def __init__(self, kit: Kit, number: int, name: str) -> None:
        self.kit, self.number, self.world = kit, number, World(kit, SIZES, name=name)
        self.world.enter(new_tasks(self.world, range(SLOTS)))
        self.outputs, self.tickets = Outputs(), list["Ticket"]()
        self.copies: list[tuple[CopyTicket, np.ndarray[Any, Any]]] = []

    def values(self) -> Iterator[None]:
        """Set fields, by every form of a value."""
        world = self.world
        for turn in range(TURNS):
            for name, value in (
                ("seed", 7 * turn + self.number),
                ("next_tokens", np.arange(SLOTS).reshape(-1, 1) + 100 * turn + self.number),
                ("temperature", [[float(turn + self.number)]] * SLOTS),
            ):
                target = world.state.view(name)
                self.tickets.append(world.bound.async_set_value(target=target, value=value, stream=world.stream))
                world.model.cells[name][...] = value
                yield
            self.tickets.append(hook_calls.on_device(world))
            yield
            self.tickets.append(self.write(turn))
            yield

    def write(self, turn: int) -> Ticket:
        """Write to the state and to other memory at once."""
        world, writes = self.world, Writes()
        writes.fill(world.state.view("step_idx"), [turn, SLOTS - 1], 3 * turn + self.number)
        writes.set(View.contiguous(self.kit.device.allocate(64), 0, (8,), dtype_of("int64")), turn)
        world.model.cells["step_idx"][[turn, SLOTS - 1]] = 3 * turn + self.number
        return world.bound.write(writes=writes, stream=world.stream)

    def batches(self) -> Iterator[None]:
        """Let requests leave and others enter."""
        for turn in range(TURNS):
            slots = [(turn + at) % SLOTS for at in range(1 + turn % 3)]
            gone = self.world.leaving(slots, (TaskKind.PREEMPTED, TaskKind.ABORTED)[turn % 2])
            self.tickets.append(self.world.insert([*gone, *new_tasks(self.world, slots)]))
            yield
            self.outputs.save(self.world, self.world.step(np.roll(range(SLOTS), turn + self.number).tolist()))
            yield

    def steps(self) -> Iterator[None]:
        """Sample, advance and save."""
        world = self.world
        for turn in range(TURNS):
            ids = np.arange(SLOTS * 3 * 2, dtype=np.int64).reshape(SLOTS, 3, 2) + 1000 * (turn + 1) + self.number
            self.tickets.append(world.sample(ids, [1 + (slot + turn) % 3 for slot in range(SLOTS)], turn=turn))
            yield
            order = np.roll(range(SLOTS), turn - self.number).tolist()
            step = world.step(order, speculative=turn % 2 == self.number % 2, logprobs=(None, 0, 1)[turn % 3])
            self.tickets.append(world.update_inputs(step))
            yield
            if (turn + 1) % 2 == self.number % 2:  # the next step verifies drafts
                drafts = {slot: [turn, self.number][: 1 + slot % 2] for slot in world.model.residents}
                self.tickets.append(world.propose(drafts))
                yield
            self.outputs.save(world, step)
            yield

    def reads(self) -> Iterator[None]:
        """Copy everything out, and write over it."""
        world = self.world
        for turn in range(TURNS):
            self.copies.append((copied(self.kit, world.state.memory, world.stream), world.model.block.copy()))
            yield
            self.tickets.append(world.poke({"seed": np.arange(SLOTS) + turn + self.number}))
            yield

    def check(self, what: str) -> None:
        """Wait for everything, and compare."""
        __tracebackhide__ = True
        for ticket in self.tickets:
            arrive(ticket, what)
        for at, (copy, should) in enumerate(self.copies):
            assert_copied(copy, should, f"{what}: copy {at}")
        self.outputs.deliver(what)
        self.world.check(what)


ACTS = {"values": Actor.values, "batches": Actor.batches, "steps": Actor.steps, "reads": Actor.reads}
SECONDS = ("state", "stream", "device", "device in a thread")
PAIRS = [(*acts, SECONDS[(at // 4 + at) % 4]) for at, acts in enumerate(product(ACTS, ACTS))]
PAIRS += [each for act in ACTS for second in SECONDS if (each := (act, act, second)) not in PAIRS]
"""Each two acts, each of them first and second with each kind of second, and with itself."""


@contextmanager
def switching() -> Iterator[None]:
    """Let threads take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def at_once(*acts: Callable[[], object]) -> None:
    """Run acts in threads of their own that begin together; the first error is a failed assertion."""
    __tracebackhide__ = True
    gate, met = threading.Barrier(len(acts)), list[BaseException]()

    def run(act: Callable[[], object]) -> None:
        gate.wait(PATIENCE)
        try:
            act()
        except BaseException as error:  # noqa: BLE001 (judged below)
            met.append(error)

    threads = [threading.Thread(target=run, args=(act,), daemon=True) for act in acts]
    with switching():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "one of two threads that work at once does not end"
    if met:
        raise AssertionError(f"of two threads that work at once, one raised {met[0]!r}") from met[0]


@guarantee(4, also=(1, 3, 9, 18, 19, 22, 28))
@pytest.mark.parametrize(("first", "other", "second"), PAIRS)
def test_g04_two_of_each_do_not_meet(kit: Kit, first: str, other: str, second: str) -> None:
    """Every two acts by turns of a call each, on a held stream where one can be, or in two threads."""
    what = f"{first}, and {other} of a second {second}"
    with another(kit) if "device" in second else nullcontext(kit) as their_kit:
        mine, theirs = Actor(kit, 0, "target"), Actor(their_kit, 1, "target" if "device" in second else "other")
        if second == "stream":
            theirs.world.stream = kit.device.stream()
        if second.endswith("thread"):
            at_once(lambda: [*ACTS[first](mine)], lambda: [*ACTS[other](theirs)])
        else:
            apart = theirs.tickets if second == "stream" else []
            by_turns(mine, zip_longest(ACTS[first](mine), ACTS[other](theirs)), apart, what)
        for actor in (theirs, mine):
            actor.check(what)


def by_turns(mine: Actor, calls: Iterator[object], apart: list[Ticket], what: str) -> None:
    """Make the calls of two in turn, the first one's on a held stream; those of another stream go on meanwhile."""
    kit, world = mine.kit, mine.world
    waits = bool(kit.missing(("async_h2d", "async_d2h", "can_hold_stream", "overlapped_update")))
    with nullcontext() if waits else kit.held(world.stream, what):
        for _ in calls:
            pass
        if waits:
            return
        early = sum(ticket.done() for ticket in (*mine.tickets, *(copy for copy, _ in mine.copies)))
        assert not early, f"{what}: {early} calls of the first are done, but its stream is held"
        for ticket in apart:
            arrive(ticket, f"{what}: a call of the second, whose stream is not held")


@guarantee(1, requires=("async_h2d", "async_d2h", "can_hold_stream"), also=(28,))
@pytest.mark.parametrize("held", [0, 1], ids=["the first", "the second"])
def test_g01_default_streams_of_two_opened_devices_have_events_of_their_own(kit: Kit, held: int) -> None:
    """Whether one queue serves both or each has its own: work of one that is over is no answer for the other's."""
    with another(kit) as other:
        kits = (kit, other)
        memories = [one.device.allocate(64) for one in kits]
        for one, memory in zip(kits, memories, strict=True):
            backdoor.write(one.device, memory, 0, np.zeros(64, np.uint8), one.device.default_stream)
        mine, theirs = kits[held], kits[1 - held]
        stream = mine.device.default_stream
        passed = theirs.device.event(theirs.device.default_stream)
        assert passed.wait(PATIENCE), "an event of an idle stream has not passed"
        with mine.held(stream, "work on the default stream of one of two opened devices"):
            write = backdoor.put(mine.device, memories[held], [(0, bytes([1]) * 64)], stream)
            event, copy = mine.device.event(stream), copied(mine, memories[held], stream)
            later = backdoor.put(
                theirs.device, memories[1 - held], [(0, bytes([2]) * 64)], theirs.device.default_stream
            )
            for name, work in (("write", write), ("event", event), ("copy", copy)):
                assert not work.done(), f"a {name} is done, but its default stream is held: another device's answer"
            assert passed.done(), "an event of another device that had passed has not any more"
        for ticket in (write, copy, later):
            arrive(ticket)
        assert event.wait(PATIENCE), "an event has not passed, though its stream continued"
        assert_copied(copy, np.full(64, 1, np.uint8), "a copy on the default stream of one of two opened devices")
        got = backdoor.read(theirs.device, memories[1 - held], theirs.device.default_stream)[:64]
        assert (got == 2).all(), "the other device's memory has not what was written to it"


@guarantee(1, also=(3, 4, 23))
def test_g01_however_many_streams_there_are_each_is_its_own(kit: Kit) -> None:
    """Two are held; the work of those made next is done meanwhile, that of the two is not, and of all in the end."""
    streams = [kit.device.default_stream, *(kit.device.stream() for _ in range(max(sizes(kit, "streams at once"))))]
    handles, memories = [stream.handle for stream in streams], [kit.device.allocate(64) for _ in streams]
    assert len({*handles}) == len(handles), f"{len(handles)} streams have {len({*handles})} handles"
    assert kit.device.default_stream.handle == handles[0], "the default stream is another one each time"
    with kit.held(streams[1]), kit.held(streams[2]):
        copies = [
            [wrote_and_copied(kit, *each, turn + at) for at, each in enumerate(zip(memories, streams, strict=True))]
            for turn in range(TURNS)
        ]
        for turn, row in enumerate(copies):
            for at in range(3, 3 + BESIDE_HELD) if kit.can_hold else ():
                assert_copied(row[at], filled_with(turn + at), f"copy {turn} on stream {at} of {len(streams)}")
        early = [copy.done() for row in copies for copy in row[1:3]] if kit.can_hold else []
        assert not any(early), f"copies of two held streams say done={early}"
    for turn, row in enumerate(copies):
        for at, copy in enumerate(row):
            assert_copied(copy, filled_with(turn + at), f"copy {turn} on stream {at} of {len(streams)}")


def filled_with(number: int) -> np.ndarray[Any, Any]:
    return np.full(64, number % 251, np.uint8)


def wrote_and_copied(kit: Kit, memory: Memory, stream: Stream, number: int) -> CopyTicket:
    """Fill a memory with a number, and copy it out."""
    backdoor.put(kit.device, memory, [(0, filled_with(number).tobytes())], stream)
    return copied(kit, memory, stream)


SMALL = StateConfig(3, 12, 4, max_draft_tokens=1, max_logprobs=0)
THREE_SIZES = (SMALL, replace(SMALL, max_model_len=16, max_bad_words=3), replace(SMALL, num_slots=5, max_model_len=24))


@guarantee(9, requires=("async_h2d", "can_hold_stream", "overlapped_update"), also=(1, 4, 12))
@pytest.mark.parametrize("first", [0, 1], ids=["the first goes on first", "the second goes on first"])
def test_g09_states_of_two_sizes_on_two_held_streams_do_not_meet(kit: Kit, first: int) -> None:
    """All work is queued before any runs; then one stream is released, and the other one stays held."""
    worlds = [World(kit, THREE_SIZES[2 * at], name=f"state {at}") for at in range(2)]
    for world in worlds:
        world.stream = kit.device.stream()
    latches = [kit.held(world.stream, "one of two states") for world in worlds]
    with latches[0], latches[1]:
        tickets = [world.insert([world.entering(slot, [7, slot]) for slot in range(3)]) for world in worlds]
        for at, world in enumerate(worlds):  # of one a step with accepted tokens, of the other one with sampled ones
            ids = np.arange(world.sizes.num_slots * 4, dtype=np.int64).reshape(-1, 2, 2) + 100 * at
            tickets.append(world.sample(ids[:, :, :1], [2] * world.sizes.num_slots, speculative=at == 0))
        tickets += [world.update_inputs(world.step(range(3), speculative=at == 0)) for at, world in enumerate(worlds)]
        latches[first].release()
        arrive(tickets[4 + first])
        assert not tickets[5 - first].done(), "a step of a state whose stream is held is done"
    for ticket in tickets:
        arrive(ticket)
    for world in worlds:
        world.check(f"an insertion and a step of two states, on {world.name}")


@guarantee(10)
def test_g10_a_devices_counters_are_not_those_of_another(kit: Kit) -> None:
    with another(kit) as other:
        fixture, before = hook_calls.working(other), kit.bound.counters()
        for what, act in hook_calls.CALLS.items():
            hook_calls.make(act, fixture, what)
        now = kit.bound.counters()
    assert now == before, f"another opened device worked, and this one's counters went from {before} to {now}"


@guarantee(9, also=(4, 11, 12, 19, 22))
def test_g09_however_many_states_there_are_each_is_its_own(kit: Kit) -> None:
    """A batch, a step and an output of each, all queued by turns, of three sizes by turns."""
    count, worlds = max(sizes(kit, "states at once")), list[World]()
    for at in range(count):  # a table of 2^n places has no state of the same size at the same place
        worlds.append(World(kit, THREE_SIZES[at % 3], name=f"state {at}"))
    outputs, tickets = [Outputs() for _ in worlds], list["Ticket"]()
    for at, world in enumerate(worlds):
        tickets.append(world.insert([world.entering(slot, [at, slot]) for slot in range(1 + at % 3)]))
    for at, world in enumerate(worlds):
        tickets.append(world.poke({"sampled_token_ids": np.arange(world.sizes.num_slots) + at}))
        step = world.step(range(1 + at % 3))
        tickets.append(world.update_inputs(step))
        outputs[at].save(world, step)
    for ticket in tickets:
        arrive(ticket, f"work on {count} states")
    for world, output in zip(worlds, outputs, strict=True):
        output.deliver(f"an output of {world.name}")
        world.check(f"work on {count} states, on {world.name}")


@guarantee(4, also=(1, 2, 22, 26))
def test_g04_however_many_devices_are_opened_each_is_its_own(kit: Kit) -> None:
    """Their writes and copies by turns; one in the middle is closed, and the others go on."""
    with ExitStack() as opened:
        kits = [opened.enter_context(another(kit)) for _ in range(max(sizes(kit, "opened devices at once")))]
        memories = [one.device.allocate(64) for one in kits]
        for turn in range(2):
            copies = []
            for at, (one, memory) in enumerate(zip(kits, memories, strict=True), 1):
                copies.append(wrote_and_copied(one, memory, one.device.default_stream, turn + at))
            for at, copy in enumerate(copies, 1):
                assert_copied(copy, filled_with(turn + at), f"a copy of device {at} of {len(kits)}")
            del memories[len(kits) // 2], copies, copy
            kits.pop(len(kits) // 2).renew()


ADMITTED = 48
"""Requests that each of two threads admits."""


@guarantee(9, also=(2, 11))
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "all at once"])
def test_g09_requests_that_two_threads_admit_are_each_their_own(kit: Kit, together: bool) -> None:
    """Admitted at once, while the worker's thread inserts others: a device may stage each as it is admitted."""
    fixture = World(kit, MANY)
    state, given = fixture.state, list[tuple[Request, Any]]()

    def admit(half: int) -> None:
        mine = [Request(f"{half}-{at}", prompt(at, 1 + at % 30), varied(at)) for at in range(half, 2 * ADMITTED, 2)]
        given.extend(zip(mine, state.admit_all(mine) if together else [state.admit(one) for one in mine], strict=True))

    def work() -> None:
        for turn in range(6):
            own = Request(f"own-{turn}", prompt(turn, 9))
            fixture.enter([prefill(fixture, 500 - turn, fixture.admit(own))], "a batch while others are admitted")

    at_once(lambda: admit(0), lambda: admit(1), work)
    tasks = []
    for slot, (request, admitted) in enumerate(given):
        assert isinstance(admitted, AdmittedRequest), f"a valid request was refused: {admitted!r}"
        fixture.model.requests[admitted.admission_id] = request
        tasks.append(prefill(fixture, slot, admitted))
    for begin in range(0, len(tasks), 32):
        fixture.enter(tasks[begin : begin + 32], "requests that two threads had admitted")
    fixture.check(f"{len(tasks)} requests that two threads had admitted at once")
