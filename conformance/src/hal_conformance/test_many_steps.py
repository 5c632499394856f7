"""Ten steps in each form: what a step reports of itself alone, of each request that follows in a slot, and of two
states (G8, G15, G18 to G21, G24)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hal_core.errors import InvalidBatch, InvalidValue, SinkClosed, Undelivered
from hal_core.group import Group
from hal_core.output.records import SlotStatus
from hal_core.output.sinks import MemorySink, complete_with
from hal_core.output.ticket import OutputTicket
from hal_core.slots.fields import SplitRole
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind

from .fixtures.forms import (
    FIRST_RANKS,
    FORMS,
    LATER,
    LONG,
    SINGLE_RANKS,
    SIZES,
    SLOTS,
    Turns,
    advance,
    named,
    order_of,
    sample,
    working,
)  # fmt: skip
from .fixtures.stepping import draftable, free_ended
from .fixtures.world import Outputs, World, assert_rows
from .harness.asserts import assert_raises
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .harness.sinks import DeadSink
from .harness.waiters import SHORT
from .kit import Kit

BAD = (0, 2)
"""Slots with a token outside the vocabulary; the second gets it three steps after the first."""


@guarantee(21, also=(19, 20))
@pytest.mark.parametrize("form", FORMS)
def test_g21_nothing_is_told_of_a_request_in_any_step_after_its_error(kit: Kit, form: str) -> None:
    """Of two requests, whose errors are three steps apart; another state has the same slots without an error."""
    world, other, outputs = working(kit), working(kit, "other"), Turns(FORMS[form])
    failed: set[str] = set()
    for turn in range(1 + LATER):
        bad = {0: BAD[:1], 3: BAD[1:]}.get(turn, ())
        rows = outputs.save(world, advance(world, FORMS[form], turn, bad, every_slot=turn in (0, 3)))
        failed |= {f"target{slot}" for slot in bad}
        assert named(rows, SlotStatus.ERROR) == [f"target{slot}" for slot in bad], f"the kit's own rows: {rows}"
        assert not failed & {*named(rows, SlotStatus.TOKEN)}, f"the kit's own rows: {rows}"
        outputs.save(other, advance(other, FORMS[form], turn))
        outputs.read(turn)
    resolved = len(outputs.sink.resolve_all())
    should = 2 * (1 + LATER) if FORMS[form].group.is_first and FORMS[form].sink is not DeadSink else 0
    assert resolved == should, f"the sink was given {resolved} outputs, but should be given {should}"


EVENTS: Mapping[int, tuple[tuple[TaskKind, int], ...]] = {
    0: ((TaskKind.PREEMPTED, 1),),
    1: ((TaskKind.ABORTED, 3), (TaskKind.PREEMPTED, 0)),
    2: ((TaskKind.PREEMPTED, 1), (TaskKind.ABORTED, 2)),
    9: ((TaskKind.PREEMPTED, 0), (TaskKind.PREEMPTED, 1), (TaskKind.PREEMPTED, 2), (TaskKind.ABORTED, 3)),
    10: ((TaskKind.ABORTED, 0),),
}
"""Before which steps which slots are left, and entered again."""


@guarantee(18, also=(17, 19, 20))
@pytest.mark.parametrize("form", FORMS)
def test_g18_each_request_that_leaves_is_told_once_in_ten_steps(kit: Kit, form: str) -> None:
    """The clean-up of a step is compared too, whatever became of its output."""
    world, outputs = working(kit), Turns(FORMS[form])
    gone: list[str] = []
    seen: list[str] = []
    for turn in range(1 + LATER):
        tasks = []
        for kind, slot in EVENTS.get(turn, ()):
            gone.append(world.model.residents[slot].request.request_id)
            tasks += [*world.leaving([slot], kind), world.entering(slot, **LONG)]
        world.insert(tasks)
        rows = outputs.save(world, advance(world, FORMS[form], turn, every_slot=turn in EVENTS))
        seen += named(rows, SlotStatus.PREEMPTED, SlotStatus.ABORTED)
        world.check(f"save_output of step {turn}")
        outputs.read(turn)
    assert sorted(seen) == sorted(gone), f"the kit's own rows tell of {seen}, but should of {gone}"
    outputs.sink.resolve_all()


MESSAGES: Mapping[int, Mapping[str, Mapping[int, str]]] = {
    0: {"recovered": {1: "the worker was restarted"}},
    1: {"errors": {0: "no block left"}},
    2: {"recovered": {0: "again"}, "errors": {2: "logits that are no numbers"}},
    9: {"recovered": {0: "one", 1: "two", 2: "three", 3: "four"}},
}
"""The errors and recovered requests of a step. The same slots have none in the steps after it."""


@guarantee(19, also=(20, 21))
@pytest.mark.parametrize("form", FORMS)
def test_g19_messages_are_of_their_step_alone(kit: Kit, form: str) -> None:
    """Recovered and failed requests of several steps, in each form: the next steps do not report it again."""
    world, outputs = working(kit), Turns(FORMS[form])
    for turn in range(1 + LATER):
        given = MESSAGES.get(turn, {})
        step = advance(world, FORMS[form], turn, every_slot=bool(given), messages=given)
        rows = outputs.save(world, step)
        marked = len(named(rows, SlotStatus.ERROR, SlotStatus.RECOVERED))
        assert marked == sum(map(len, given.values())), f"the kit's own rows: {rows}"
        outputs.read(turn)
    outputs.sink.resolve_all()


@guarantee(19, also=(21, 26))
@pytest.mark.parametrize("form", FORMS)
def test_g19_late_errors_that_raise_are_the_error_of_their_step_alone(kit: Kit, form: str) -> None:
    """Of the second and the third step: neither has a record, the tickets raise, and the other steps have records."""
    world, outputs, broken = working(kit), Outputs(), list[OutputTicket]()
    first, sink = FORMS[form].group.is_first, outputs.sink

    def unreadable() -> Mapping[int, str]:
        raise ArithmeticError("the reasons cannot be read")

    for turn in range(5):
        given = {"late_errors": unreadable} if turn in (1, 2) else {}
        outputs.save(world, advance(world, FORMS[form], turn, messages=given))
        world.check(f"save_output of step {turn}")
        if given:
            ticket, _ = outputs.saved.pop()
            assert_raises(ArithmeticError, ticket.record, f"the record of step {turn}, whose late_errors raises")
            broken.append(ticket)
    sound = [ticket.step for ticket, _ in outputs.saved]
    outputs.compare()
    lost = [pending for pending in sink.pending if complete_with(pending) is None]
    assert lost == (broken if first else []), f"the sink lost {len(lost)} outputs, not {len(broken)}"
    for pending in lost:
        why = "waiting for an output whose late_errors raises"
        assert_raises(ArithmeticError, lambda: pending.wait(PATIENCE), why)  # noqa: B023
        sink.pending.remove(pending)
    sent = [record.step for record in sink.resolve_all()]
    should = sound if first else []
    assert sent == should, f"the sink was given the steps {sent}, but should be given {should}"


@guarantee(19, requires=("async_d2h", "can_hold_stream", "overlapped_update"), also=(23,))
@pytest.mark.parametrize("form", FIRST_RANKS)
def test_g19_what_a_closing_sink_cannot_deliver_is_reported_and_not_delivered(kit: Kit, form: str) -> None:
    """One step is delivered first; the outputs of the next three are pending when their sink is closed."""
    world, sink = working(kit), MemorySink(threaded=True)
    first = advance(world, FORMS[form], 0)
    rows = world.rows_of(first)
    arrive(world.save(first, sink))
    tickets, pending = list[OutputTicket](), list[str]()
    with kit.held(world.stream, "save_output into a sink that is closed"):
        for turn in (1, 2, 3):
            step = advance(world, FORMS[form], turn)
            pending += [row.request_id for row in world.rows_of(step)]
            tickets.append(world.save(step, sink))
        error = assert_raises(Undelivered, lambda: sink.close(SHORT), "closing a sink with three pending outputs")
        reported = [name for name, _, _ in error.records]
    for ticket in tickets:
        assert_raises(SinkClosed, lambda: ticket.wait(PATIENCE), f"step {ticket.step}, which was reported as lost")  # noqa: B023
    assert reported == pending, f"reported as lost are {reported}, but should be {pending}"
    delivered = [record.step for record in sink.records]
    assert delivered == [first.number], f"the sink has the steps {delivered}, but should have {[first.number]}"
    assert_rows(sink.records[0], rows, first.number)
    again = advance(world, FORMS[form], 4)
    assert_raises(SinkClosed, lambda: world.save(again, sink), "save_output into a closed sink")
    world.check("save_output into a closed sink")
    world.output(advance(world, FORMS[form], 5))


BRIEF: dict[str, Any] = {"max_tokens": 2, "logprobs": 2}


def enter_free(world: World, turn: int) -> None:
    """Put a new request into each free slot, by turns of the prefill role of a split and of none."""
    free = [slot for slot in range(SLOTS) if slot not in world.model.residents]
    roles = [SplitRole.PREFILL if (slot + turn) % 3 else SplitRole.MIXED for slot in free]
    world.insert([world.entering(slot, role=role, **BRIEF) for slot, role in zip(free, roles, strict=True)])


@guarantee(24, also=(12, 19, 20, 25))
@pytest.mark.parametrize("form", FORMS)
def test_g24_first_tokens_are_told_of_each_request_in_a_slot(kit: Kit, form: str) -> None:
    """A slot whose first token was reported gets another request before the next step; so does the mirror."""
    world, outputs = World(kit, SIZES), Turns(FORMS[form])
    mirrored: list[dict[str, np.ndarray]] = []
    firsts = 0
    for turn in range(1 + LATER):
        enter_free(world, turn)
        step = advance(world, FORMS[form], turn, every_slot=turn % 4 == 0)
        if FORMS[form].speculative:
            world.propose({slot: [7 + turn] * ((slot + turn) % 3) for slot in draftable(world)})
        mirrored.append(world.mirrored())
        firsts += sum(row.first for row in outputs.save(world, step))
        free_ended(world)
        if FORMS[form].due(turn):
            tickets = [ticket for ticket, _ in outputs.saved]
            outputs.compare()
            for ticket, should in zip(tickets, mirrored, strict=True):
                world.take(ticket)
                world.check_mirror(should, f"step {ticket.step} was taken")
            mirrored.clear()
    assert firsts > 5, f"the kit's own rows have {firsts} first tokens"
    outputs.sink.resolve_all()
    world.check("ten steps of first tokens")


@guarantee(20, also=(19, 24))
@pytest.mark.parametrize("form", FORMS)
def test_g20_a_step_of_two_states_has_the_order_of_each_in_every_form(kit: Kit, form: str) -> None:
    worlds, outputs = [working(kit), working(kit, "other")], Turns(FORMS[form])
    for turn in range(1 + LATER):
        orders: Any = {"target": order_of(FORMS[form], turn), "other": np.roll(range(SLOTS), turn + 1).tolist()}
        step = Step(100 + turn, orders, **FORMS[form].arguments)
        for at, world in enumerate(worlds):
            sample(world, orders[world.name], turn + at)
            world.update_inputs(step)
        for world in worlds:
            outputs.save(world, step)
        outputs.read(turn)
    outputs.sink.resolve_all()


COUNTS = {1: ("accept_num", 9, (1,)), 2: ("draft_num", -1, (0, 3)), 4: ("accept_num", -1, (1, 2))}
"""Before which outputs a kernel writes which field out of bounds, and in which slots."""


@guarantee(21, also=(19,))
@pytest.mark.parametrize("form", FORMS)
def test_g21_a_count_out_of_bounds_is_an_error_of_its_step_alone(kit: Kit, form: str) -> None:
    """The steps after it report their tokens; the ticket of a rank that sends raises."""
    world, outputs = working(kit), Outputs()
    for turn in range(1 + LATER):
        name, value, slots = COUNTS.get(turn, ("", 0, ()))
        step = advance(world, FORMS[form], turn, every_slot=bool(slots))
        for slot in slots:
            world.poke_cell(name, slot, value)
        rows = outputs.save(world, step)
        assert len(named(rows, SlotStatus.ERROR)) == len(slots), f"the kit's own rows: {rows}"
        ((ticket, _),) = outputs.saved
        outputs.compare()
        outputs.sink.resolve_all()
        if slots and FORMS[form].group.is_first:
            assert_raises(InvalidValue, lambda: ticket.wait(PATIENCE), "waiting for output out of bounds")  # noqa: B023
        if slots and name == "draft_num":  # the kernel's next step writes it well
            for slot in slots:
                world.poke_cell(name, slot, 0)


def wrong_batch(world: World, turn: int) -> list[Task]:
    """Return tasks that are all refused: into held slots, into one beyond the last, and out of another's slot."""
    entering = [world.entering(slot, blocks=[0], **BRIEF) for slot in (turn % SLOTS, SLOTS + turn, 0)]
    kind = (TaskKind.PREEMPTED, TaskKind.ABORTED)[turn % 2]
    return [*entering[:2], Task(kind, (turn + 1) % SLOTS, entering[2].request)]


@guarantee(8, also=(9, 19))
@pytest.mark.parametrize("form", FORMS)
def test_g08_a_refused_batch_before_each_step_changes_nothing(kit: Kit, form: str) -> None:
    """Of each such batch every problem is listed, in the tenth step too; the steps go on, and so do departures."""
    world, outputs = working(kit), Turns(FORMS[form])
    for turn in range(1 + LATER):
        tasks, before, changing = wrong_batch(world, turn), kit.bound.counters().submissions, turn % 3 == 2
        call: Any = {"state": world.state, "tasks": tasks, "stream": world.stream}
        error = assert_raises(InvalidBatch, lambda: kit.bound.insert_tasks(**call), f"a wrong batch before step {turn}")  # noqa: B023
        assert len(error.problems) == len(tasks), f"{len(tasks)} tasks are wrong, but listed are {error.problems}"
        spent = kit.bound.counters().submissions - before
        assert spent == 0, f"a refused batch made {spent} submissions before step {turn}"
        if changing:
            slot = turn % SLOTS
            world.insert([*world.leaving([slot]), world.entering(slot, **LONG)])
        world.check(f"a refused batch before step {turn}")
        outputs.save(world, advance(world, FORMS[form], turn, every_slot=changing))
        outputs.read(turn)
    outputs.sink.resolve_all()


@guarantee(15, also=(13, 17))
@pytest.mark.parametrize("form", SINGLE_RANKS)
def test_g15_a_group_of_one_communicates_nothing_in_any_step(kit: Kit, form: str) -> None:
    """Whatever its rank, with drafts and log-probabilities, and of two states; its output is sent."""
    worlds, asking, outputs = [working(kit), working(kit, "other")], list[Group](), Outputs()

    def communicator(group: Group) -> object:
        asking.append(group)
        raise AssertionError(f"a group of one asked for its collectives: {group}")

    device: Any = kit.device
    device.communicator = communicator
    try:
        for turn in range(1 + LATER):
            for world in worlds:
                before, group = kit.bound.counters().submissions, FORMS[form].group
                arrive(kit.bound.broadcast_tokens(state=world.state, group=group, stream=world.stream))
                spent = kit.bound.counters().submissions - before
                assert spent == 0, f"broadcast_tokens in {group} made {spent} submissions in step {turn}"
                outputs.save(world, advance(world, FORMS[form], turn))
                outputs.compare()
    finally:
        del device.communicator
    assert not asking, f"collectives were asked for in a group of one: {asking}"
    sent = len(outputs.sink.resolve_all())
    assert sent == 2 * (1 + LATER), f"the first and only rank sent {sent} outputs, but should send {2 * (1 + LATER)}"
