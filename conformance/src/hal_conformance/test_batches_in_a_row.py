"""Many batches and steps one after the other without a wait (G9, G11), and large batches with companions (G10)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import pytest
from hal_core.slots.declared import Companion, StateField
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind

from .fixtures.many import MANY, handoff, prefill, request
from .fixtures.world import Outputs, World
from .harness.asserts import assert_no_error
from .harness.guarantees import guarantee
from .harness.sinks import KeepingSink
from .kit import Kit
from .test_submissions import A_CALL, cost

FIELDS = [
    StateField("kit_length", "int64", reset=-1, groups="step_input", value=lambda request: len(request.prompt)),
    StateField("kit_row", "uint8", 3, reset=9, value=lambda request: [*range(len(request.prompt) % 4)], kept=True),
]
COMPANIONS = (Companion("own"), Companion("same", FIELDS, same_slots=True))
SLOTS = (5, 0, 300, 7)
ROUNDS = 6


class InARow:
    """A state with companions and all calls made with it; no ticket is waited for before the end."""

    def __init__(self, kit: Kit, *, companions: bool) -> None:
        self.fixture = World(kit, MANY, companions=COMPANIONS if companions else (), fields=FIELDS)
        self.outputs = Outputs()

    def insert(self, tasks: list[Task]) -> None:
        """Insert a batch."""
        assert_no_error(lambda: self.fixture.insert(tasks), "a valid batch")

    def turn(self, at: int, *, steps: bool) -> None:
        """Let requests enter, grow, leave and enter again, in batches of one and of some; then run and save a step."""
        fixture = self.fixture
        make = (prefill, handoff)[at % 2]
        self.insert([make(fixture, slot, request(fixture, slot + at)) for slot in SLOTS])
        for slot in SLOTS[: 1 + at % 3]:
            one = fixture.model.residents[slot]
            more = Task(TaskKind.MORE_BLOCKS, slot, one.admitted, blocks=[at, 3], first_block=one.blocks)
            self.insert([more])
        gone = fixture.leaving(SLOTS[:2], TaskKind.PREEMPTED)
        self.insert([*gone, prefill(fixture, SLOTS[1], request(fixture, 40 - at))])
        if steps:
            self.step(at)
        self.insert(fixture.leaving(SLOTS[1:], TaskKind.ABORTED))
        self.save(fixture.step(np.roll(SLOTS, at).tolist()))

    def overlap(self, at: int, kind: TaskKind) -> None:
        """Launch a step with log-probabilities, and give two of its slots to others while its output is pending."""
        fixture, n = self.fixture, MANY.num_slots
        ids = np.arange(n * 3 * 2, dtype=np.int64).reshape(n, 3, 2) + 10_000 * (at + 1)
        fixture.sample(ids, (np.arange(n) + at) % 4, turn=at)
        step = fixture.step(np.roll(SLOTS, at).tolist(), speculative=at % 2 == 1, logprobs=(1, 0, 1, None)[at % 4])
        fixture.update_inputs(step)
        self.save(step)
        slots = [SLOTS[at % 4], SLOTS[(at + 1) % 4]]
        make = (prefill, handoff)[at % 2]
        new = [make(fixture, slot, request(fixture, slot + 7 * at + 1, output=at % 3)) for slot in slots]
        self.insert([*fixture.leaving(slots, kind), *new])

    def step(self, at: int) -> None:
        """Sample, advance and save."""
        fixture, n = self.fixture, MANY.num_slots
        fixture.poke({"sampled_token_ids": 1000 * (at + 1) + np.arange(n)})
        step = fixture.step(np.roll(SLOTS, -at).tolist())
        fixture.update_inputs(step)
        self.save(step)

    def save(self, step: Step) -> None:
        """Save a step into a sink that reads it at the end."""
        self.outputs.save(self.fixture, step)

    def check(self, what: str) -> None:
        """Compare every byte of every state, and every record."""
        self.fixture.check(what)
        self.outputs.deliver(what)


@guarantee(9, also=(4, 11, 12, 18, 19, 22))
@pytest.mark.parametrize("companions", [False, True], ids=["alone", "companions"])
@pytest.mark.parametrize("how", ["held", "free", "from stream to stream"])
def test_g09_batches_and_steps_in_a_row_have_the_effect_of_each(kit: Kit, how: str, companions: bool) -> None:
    """On a held stream without steps where a step cannot be held; the slots are left and entered again and again."""
    one = InARow(kit, companions=companions)
    fixture = one.fixture
    waits = bool(kit.missing(("async_h2d", "async_d2h", "can_hold_stream", "overlapped_update")))
    hold = kit.held(fixture.stream, "batches in a row") if how == "held" and not waits else nullcontext()
    with hold:
        for at in range(ROUNDS):
            one.turn(at, steps=True)
            if how == "from stream to stream":
                new = kit.device.stream() if at % 2 else kit.device.default_stream
                new.wait(kit.device.event(fixture.stream))
                fixture.stream = new
    last = prefill(fixture, SLOTS[0], request(fixture, 3))
    one.insert([last])
    one.insert([Task(TaskKind.PREEMPTED, SLOTS[0], last.request), prefill(fixture, SLOTS[0], request(fixture, 8))])
    one.check(f"{ROUNDS} rounds of batches and steps ({how})")  # that departure is not reported yet


@guarantee(9, also=(11, 18, 19, 22, 23, 24))
@pytest.mark.parametrize("kind", [TaskKind.PREEMPTED, TaskKind.ABORTED], ids=lambda kind: kind.name.lower())
def test_g09_slots_change_hands_while_the_outputs_of_their_steps_are_pending(kit: Kit, kind: TaskKind) -> None:
    """Penalties, bad words and log-probabilities of the next request are its own, and the pending ones those before."""
    one = InARow(kit, companions=False)
    fixture = one.fixture
    one.insert([prefill(fixture, slot, request(fixture, slot)) for slot in SLOTS])
    waits = bool(kit.missing(("async_h2d", "async_d2h", "can_hold_stream", "overlapped_update")))
    with nullcontext() if waits else kit.held(fixture.stream, "steps whose slots change hands"):
        for at in range(2 * ROUNDS):
            one.overlap(at, kind)
    one.check(f"{2 * ROUNDS} steps, between which slots changed hands")


@guarantee(10, requires="fused_scatter", also=(9,))
def test_g10_large_batches_with_companions_cost_the_same(kit: Kit) -> None:
    """Of every kind: they enter, get blocks, leave, and leave while others enter."""
    fixture = World(kit, MANY, companions=COMPANIONS, fields=FIELDS)

    def put(tasks: Sequence[Task], what: str) -> None:
        cost(fixture, tasks, what)
        fixture.check(what)

    for turn, count in enumerate((1, 65, 512)):
        slots = np.random.default_rng(turn).permutation(MANY.num_slots)[:count].tolist()
        put([prefill(fixture, slot, request(fixture, slot)) for slot in slots], f"{count} requests entering")
        held = fixture.model.residents
        more = [
            Task(TaskKind.MORE_BLOCKS, slot, held[slot].admitted, blocks=[1, 2], first_block=held[slot].blocks)
            for slot in slots
        ]
        put(more, f"{count} requests with more blocks")
        new = [handoff(fixture, slot, request(fixture, slot + 1)) for slot in slots]
        put([*fixture.leaving(slots, TaskKind.PREEMPTED), *new], f"{count} requests leaving and as many handoffs")
        put(fixture.leaving(slots, TaskKind.ABORTED), f"{count} requests leaving")
        fixture.output(fixture.step(slots))


IN_FLIGHT = 100
"""Batches that wait on a held stream."""


@guarantee(10, requires=("fused_scatter", "async_h2d", "async_d2h", "can_hold_stream"), also=(3, 9))
@pytest.mark.parametrize("where", ["default stream", "own stream"])
def test_g10_a_batch_costs_the_same_whatever_is_in_flight(kit: Kit, where: str) -> None:
    """Behind other batches, behind a step and its output where a step can be held, and on a stream beside them."""
    fixture = World(kit, MANY)
    fixture.stream = kit.device.default_stream if where == "default stream" else kit.device.stream()
    fixture.enter([prefill(fixture, slot, request(fixture, slot)) for slot in range(8)])
    fixture.poke({"sampled_token_ids": np.arange(MANY.num_slots)})
    step, sink = fixture.step(range(8)), KeepingSink()
    overlaps = not kit.missing(("overlapped_update",))
    spent = []
    with kit.held(fixture.stream, f"{IN_FLIGHT} batches"):
        if overlaps:
            fixture.update_inputs(step)
            fixture.save(step, sink)
        for at in range(IN_FLIGHT):
            tasks = [prefill(fixture, 10 + at, request(fixture, at))]
            tasks += fixture.leaving([at % 8], TaskKind.ABORTED) if at < 8 else []
            before = fixture.bound.counters()
            fixture.insert(tasks)
            spent.append(fixture.bound.counters() - before)
    most, waits = max(one.submissions for one in spent), sum(one.host_waits for one in spent)
    assert most <= A_CALL, f"a batch behind others took {most} submissions, but at most {A_CALL} are due"
    assert not waits, f"the host waited {waits} times for the device in {IN_FLIGHT} batches"
    sink.resolve_all()
    fixture.check(f"{IN_FLIGHT} batches that waited")
