"""What follows in a slot: each way in after each history and each way out (G11), the same names, requests and batches
again (G9, G19), and every form of a batch (G9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest
from hal_core.output.records import SlotStatus
from hal_core.slots.declared import Companion, StateField
from hal_core.slots.tasks import Task, TaskBatch, TaskKind
from msgspec import structs

from .fixtures.generations import CASES, FORMERS, SIZES, enter, go_on, request_of, sampled, succeed
from .fixtures.stepping import draftable
from .fixtures.world import World
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .kit import Kit

ALL = range(len(CASES))


class Generations:
    """A state with its companions, and everything that is done to and checked of all of them."""

    def __init__(self, kit: Kit, companions: Sequence[Companion] = (), name: str = "target") -> None:
        self.fixture = World(kit, SIZES, companions=companions, name=name)
        self.turn = 0

    def insert(self, tasks: list[Task], what: str) -> None:
        """Insert a batch, and compare every byte."""
        self.fixture.enter(tasks, what)
        self.fixture.check(what)

    def step(self, *, speculative: bool) -> None:
        """Run a step over all slots in an order of its own, and compare its record."""
        sampled(self.fixture, self.turn)
        self.turn += 1
        order = np.random.default_rng(self.turn).permutation(len(CASES)).tolist()
        step = self.fixture.step(order, speculative=speculative)
        self.fixture.run(step)
        self.fixture.output(step)
        self.fixture.check(f"step {step.number} and its output")

    def former(self) -> None:
        """Let the former requests enter, run, and get the tasks of their case."""
        order = np.random.default_rng(1).permutation(len(CASES)).tolist()
        self.insert([enter(self.fixture, slot, 0, CASES[slot][0]) for slot in order], "the first requests")
        self.step(speculative=True)
        self.insert(go_on(self.fixture), "chunks and more blocks")
        self.step(speculative=False)
        given = [slot for slot in draftable(self.fixture) if CASES[slot][0] == "given drafts"]
        assert given, "the kit's own requests take no drafts"
        self.fixture.draft({slot: [slot, 4, 5] for slot in given})
        self.fixture.check("drafts")

    def release(self) -> None:
        """End and release the requests that are to be released."""
        slots = [slot for slot in ALL if CASES[slot][1] == "released"]
        ended = self.fixture.model.cells["stop_flags"].copy()
        ended[slots] = True
        self.fixture.put({"stop_flags": ended})
        self.fixture.release(slots)

    def succeed(self) -> None:
        """Let the short requests follow, and then middling ones."""
        self.release()
        before, at_once = succeed(self.fixture, np.random.default_rng(2).permutation(len(CASES)).tolist())
        self.insert(before, "requests that leave before the next enter")
        self.insert(at_once, f"short requests after those that were {', '.join(FORMERS)}")
        self.step(speculative=True)
        tasks = self.fixture.leaving(ALL, TaskKind.ABORTED)
        tasks += [enter(self.fixture, slot, 2, CASES[slot][0]) for slot in ALL]
        self.insert(tasks, "requests of middling length after short ones")
        self.step(speculative=False)


FIELDS = [StateField("kit_row", "int16", 5, reset=-3, value=lambda request: [*range(len(request.prompt) % 6)])]
COMPANIONS: dict[str, list[Companion]] = {
    "alone": [],
    "companions": [Companion("own slots"), Companion("same slots", FIELDS, same_slots=True)],
}


@guarantee(11, also=(9, 12, 18, 19))
@pytest.mark.parametrize("companions", COMPANIONS)
def test_g11_each_way_in_after_each_history_and_each_way_out(kit: Kit, companions: str) -> None:
    one = Generations(kit, COMPANIONS[companions])
    one.former()
    one.succeed()


@guarantee(11, also=(9, 12, 19, 22))
@pytest.mark.parametrize("devices", [1, 2], ids=["one device", "two devices"])
def test_g11_two_states_of_one_size_go_through_it_by_turns(kit: Kit, devices: int) -> None:
    """The second state's slots are in other orders of length: an order that was kept for one state serves no other."""
    other = kit.another() if devices == 2 else kit
    try:
        one, two = Generations(kit), Generations(other, name="target" if devices == 2 else "other")
        one.former()
        two.insert([enter(two.fixture, slot, 1, "whole") for slot in ALL], "short requests in another state")
        two.step(speculative=True)
        one.succeed()
        two.insert(two.fixture.leaving(ALL, TaskKind.PREEMPTED), "the other state's requests leave")
        two.step(speculative=False)
        two.former()
        one.fixture.check("the other state's former requests")
        two.succeed()
        one.fixture.check("the other state's turn")
    finally:
        if other is not kit:
            other.renew()


# -- the same again ----------------------------------------------------------------------------------------------------


@guarantee(19, also=(8, 9, 11, 12))
@pytest.mark.parametrize("where", ["the same slot at once", "the same slot later", "another slot at once"])
def test_g19_a_preempted_request_goes_on_under_its_name(kit: Kit, where: str) -> None:
    """Admitted again with its output so far: one report that it was preempted, and each token once, at its place."""
    fixture = World(kit, SIZES)
    first = request_of(fixture, 0, 0)
    other = enter(fixture, 5, 0, "whole")
    fixture.enter([Task(TaskKind.PREFILL, 0, first, 0, first.total, [*range(10)]), other])
    given: list[int] = []
    counts = {SlotStatus.PREEMPTED: 0, SlotStatus.TOKEN: 0}
    slot = 0
    for turn in range(4):
        sampled(fixture, turn)
        step = fixture.advance([5, slot] if turn % 2 else [slot, 5], speculative=turn == 1)
        for row in fixture.output(step):
            if row.request_id == first.request_id:
                counts[row.status] += 1
                assert row.status is SlotStatus.PREEMPTED or row.position == len(given), "the kit's own rows have a gap"
                given += row.tokens
        fixture.check(f"step {turn}")
        if turn == 1:
            former = fixture.model.residents[0]
            gone = Task(TaskKind.PREEMPTED, 0, former.admitted)
            if where.endswith("later"):
                fixture.enter([gone])
                fixture.output(fixture.step([0]))
                counts[SlotStatus.PREEMPTED] += 1
            request = structs.replace(former.request, output=[*former.request.output, *given])
            again, slot = fixture.admit(request), 3 if where.startswith("another") else 0
            entering = Task(TaskKind.PREFILL, slot, again, 0, again.total, [*range(20, 40)][: -(-again.total // 2)])
            fixture.enter([entering] if where.endswith("later") else [gone, entering])
            fixture.check("the request entered again")
            if slot:
                fixture.output(fixture.step([0]))
                counts[SlotStatus.PREEMPTED] += 1
    assert counts == {SlotStatus.PREEMPTED: 1, SlotStatus.TOKEN: 4}, f"the kit's own rows: {counts}"


@guarantee(9, also=(11, 19))
@pytest.mark.parametrize("way", ["aborted", "released", "preempted at once"])
def test_g09_one_admitted_request_enters_again_and_again(kit: Kit, way: str) -> None:
    """In other slots, and in a second state of the same sizes; a device that stages it may not have let it go."""
    fixture, other = World(kit, SIZES), World(kit, SIZES, name="other")
    kept = [request_of(fixture, slot, 0) for slot in range(6)]
    for request in kept:
        other.model.requests[request.admission_id] = fixture.model.requests[request.admission_id]
    for turn in range(4):
        slots = [(slot + turn) % 6 for slot in range(6)]
        entering = [
            Task(TaskKind.PREFILL, slot, one, 0, one.total, [*range(slot, slot + 11)])
            for slot, one in zip(slots, kept, strict=True)
        ]
        gone = fixture.leaving(sorted(fixture.model.residents), TaskKind.PREEMPTED) if turn else []
        if way == "preempted at once":  # each slot gets another of them
            fresh = [request_of(fixture, slot, 1) for slot in range(6)]
            short = [Task(TaskKind.PREFILL, at, one, 0, one.total, [1, 2, 3, 4]) for at, one in enumerate(fresh)]
            fixture.enter([*gone, *short])
            fixture.output(fixture.step(range(6)))
            fixture.enter([*fixture.leaving(range(6), TaskKind.ABORTED)])
        elif turn and way == "aborted":
            fixture.enter(fixture.leaving(range(6), TaskKind.ABORTED))
        elif turn:
            fixture.release(range(6))
        fixture.output(fixture.step(range(6)))
        fixture.enter(entering, f"requests that enter for the {turn + 1}. time")
        fixture.check(f"requests that entered for the {turn + 1}. time")
        sampled(fixture, turn)
        step = fixture.advance(slots, speculative=turn % 2 == 1)
        fixture.output(step)
    other.enter([Task(TaskKind.PREFILL, 7 - at, one, 0, one.total, [*range(11)]) for at, one in enumerate(kept)])
    other.check("requests that were in another state before")


# -- every form of a batch ---------------------------------------------------------------------------------------------


def as_prefill(tasks: list[Task]) -> TaskBatch:
    """Return new requests as columns."""
    return TaskBatch.prefill(
        [task.slot for task in tasks],
        [task.request for task in tasks],
        [task.num_scheduled_tokens for task in tasks],
        [np.array(task.blocks, np.int64) for task in tasks],
        [task.num_computed_tokens for task in tasks],
    )


def as_columns(tasks: list[Task]) -> TaskBatch:
    """Return tasks of any kind as columns."""
    return TaskBatch(
        [task.kind for task in tasks],
        [task.slot for task in tasks],
        [task.request for task in tasks],
        [task.num_computed_tokens for task in tasks],
        [task.num_scheduled_tokens for task in tasks],
        [task.blocks for task in tasks],
        [task.first_block for task in tasks],
        [task.first_token for task in tasks],
        [task.drafts for task in tasks],
    )


def with_blocks(form: Callable[[Sequence[int]], object]) -> Callable[[list[Task]], list[Task]]:
    """Return tasks whose block ids and drafts have another form."""
    return lambda tasks: [
        structs.replace(task, blocks=cast(Sequence[int], form(task.blocks)), drafts=tuple(task.drafts))
        for task in tasks
    ]


FORMS: dict[str, Callable[[list[Task]], object]] = {
    "a list": list,
    "a tuple": tuple,
    "a batch": TaskBatch.of,
    "columns": as_columns,
    "block ids as a tuple": with_blocks(tuple),
    "block ids as int32": with_blocks(lambda given: np.array(given, np.int32)),
    "block ids as int64": with_blocks(lambda given: np.array(given, np.int64)),
    "block ids as a strided array": with_blocks(lambda given: np.repeat(np.array(given, np.int32), 2)[::2]),
}


@guarantee(9, also=(8, 10, 11, 12))
@pytest.mark.parametrize("form", [*FORMS, "new requests as columns"])
def test_g09_a_batch_has_the_same_effect_in_every_form(kit: Kit, form: str) -> None:
    """One task and many, of every kind, with cached tokens; each batch at most two submissions where that is due."""
    fixture = World(kit, SIZES)
    make = FORMS.get(form, TaskBatch.of)

    def put(tasks: list[Task], what: str) -> None:
        given = as_prefill(tasks) if form not in FORMS and what.startswith("new") else make(tasks)
        before = fixture.bound.counters()
        ticket = fixture.bound.insert_tasks(state=fixture.state, tasks=given, stream=fixture.stream)  # type: ignore[arg-type]
        cost = (fixture.bound.counters() - before).submissions
        assert cost <= 2 or not kit.capabilities.fused_scatter, (
            f"{what} as {form}: {cost} submissions, at most 2 are due"
        )
        fixture.model.insert(tasks)
        arrive(ticket)
        fixture.check(f"{what} as {form}")

    def cached(slot: int) -> Task:
        one = request_of(fixture, slot, 0)
        return Task(TaskKind.PREFILL, slot, one, 3, 4 + slot % 5, [*range(slot, slot + 9)])

    put([cached(70)], "new requests, one")
    put([cached(slot) for slot in (9, 3, 40, 0, 76, 21)], "new requests, some")
    put([enter(fixture, slot, 0, "handed over") for slot in (1, 2, 3 + 5, 55)], "handoffs")
    idle = {name: np.zeros(SIZES.num_slots) for name in ("seq_lens_this_time", "seq_lens_encoder")}
    fixture.put(idle)
    held = fixture.model.residents
    chunks = [
        Task(TaskKind.PREFILL_CHUNK, slot, held[slot].admitted, held[slot].prefilled, 2, [77], held[slot].blocks)
        for slot in (9, 40, 76)
    ]
    more = [
        Task(TaskKind.MORE_BLOCKS, slot, held[slot].admitted, blocks=[5, 4], first_block=held[slot].blocks)
        for slot in (3, 1, 55)
    ]
    put([*chunks, *more, *fixture.leaving([0, 2], TaskKind.PREEMPTED), enter(fixture, 0, 1, "whole"),
         *fixture.leaving([21], TaskKind.ABORTED)], "chunks, more blocks, leavings and one that enters")  # fmt: skip
    put([], "nothing")
    none = [
        structs.replace(more[0], blocks=(), first_block=held[3].blocks),
        structs.replace(more[1], blocks=[3], first_block=held[1].blocks),
    ]
    put(none, "no more blocks, and one more")
    put([cached(slot) for slot in (2, 21)], "new requests in slots that were left")
