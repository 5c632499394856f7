"""Requests that follow one another in their slots, two states, counts out of bounds: ten steps (G20, G21, G24)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hal_core.errors import InvalidBatch, InvalidValue
from hal_core.group import Group
from hal_core.output.records import SlotStatus
from hal_core.output.ticket import OutputTicket
from hal_core.slots.fields import SplitRole
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind

from .fixtures.stepping import draftable, free_ended
from .fixtures.world import Outputs, World
from .harness.asserts import assert_no_error, assert_raises
from .harness.backdoor import PATIENCE
from .harness.guarantees import guarantee
from .harness.sinks import KeepingSink
from .kit import Kit
from .test_later_steps import (
    AT_ONCE,
    CASES,
    FALLING,
    LATER,
    LONG,
    SIZES,
    SLOTS,
    Case,
    advance,
    order_of,
    sampled,
    told,
    working,
)

SHORT: dict[str, Any] = {"max_tokens": 2, "logprobs": 2}


def enter_free(fixture: World, turn: int) -> None:
    """Put a new request into each free slot, by turns of the prefill role of a split and of none."""
    tasks = []
    for slot in range(SLOTS):
        if slot not in fixture.model.residents:
            role = SplitRole.PREFILL if (slot + turn) % 3 else SplitRole.MIXED
            tasks.append(fixture.entering(slot, role=role, **SHORT))
    fixture.insert(tasks)


@guarantee(24, also=(12, 19, 20, 25))
@pytest.mark.parametrize("form", CASES)
def test_g24_first_tokens_are_told_of_each_request_in_a_slot(kit: Kit, form: str) -> None:
    """A slot whose first token was reported gets another request before the next step; so does the mirror."""
    case = CASES[form]
    fixture, outputs = World(kit, SIZES), Outputs(case.sink())
    copied: list[dict[str, np.ndarray]] = []
    firsts = 0
    for turn in range(1 + LATER):
        enter_free(fixture, turn)
        step = advance(fixture, case._replace(order=FALLING) if turn % 4 == 0 else case, turn)
        if case.speculative:
            fixture.propose({slot: [7 + turn] * ((slot + turn) % 3) for slot in draftable(fixture)})
        copied.append({name: fixture.model.cells[name].copy() for name in fixture.state.mirror})
        firsts += sum(row.first for row in outputs.save(fixture, step))
        free_ended(fixture)
        if case.taken == AT_ONCE or turn == LATER:
            tickets = [ticket for ticket, _ in outputs.saved]
            outputs.compare()
            for ticket, should_be in zip(tickets, copied, strict=True):
                assert_mirrored(fixture, ticket, should_be)
            copied.clear()
    assert firsts > 5, f"the kit's own rows have {firsts} first tokens"
    outputs.resolve()
    fixture.check("ten steps of first tokens")


def assert_mirrored(fixture: World, ticket: OutputTicket, should: dict[str, np.ndarray]) -> None:
    """Take an output, and assert that the mirror has become it."""
    __tracebackhide__ = True
    assert_no_error(lambda: fixture.state.take(ticket), f"taking the output of step {ticket.step}")
    for name, cells in should.items():
        got = fixture.state.mirror[name]
        wrong = (
            f"the mirror's {name} after step {ticket.step} was taken is {got.ravel()}, but should be {cells.ravel()}"
        )
        assert (got.reshape(cells.shape) == cells).all(), wrong


@guarantee(20, also=(19, 24))
@pytest.mark.parametrize("form", CASES)
def test_g20_a_step_of_two_states_has_the_order_of_each_in_every_form(kit: Kit, form: str) -> None:
    case, outputs = CASES[form], Outputs(CASES[form].sink())
    fixtures = [working(kit), working(kit, "other")]
    for turn in range(1 + LATER):
        orders: Any = [order_of(case, turn), np.roll(range(SLOTS), turn + 1).tolist()]
        names = [fixture.name for fixture in fixtures]
        step = Step(
            100 + turn, dict(zip(names, orders, strict=True)), speculative=case.speculative, logprobs=case.logprobs,
            group=case.group,
        )  # fmt: skip
        for fixture, order in zip(fixtures, orders, strict=True):
            sampled(fixture, order, turn + (fixture is fixtures[1]))
            fixture.update_inputs(step)
        for fixture in fixtures:
            outputs.save(fixture, step)
        if case.taken == AT_ONCE or turn == LATER:
            outputs.compare()
    outputs.resolve()


COUNTS = {1: ("accept_num", 9, (1,)), 2: ("draft_num", -1, (0, 3)), 4: ("accept_num", -1, (1, 2))}
"""Before which outputs a kernel writes which field out of bounds, and in which slots."""


@guarantee(21, also=(19,))
@pytest.mark.parametrize("form", CASES)
def test_g21_a_count_out_of_bounds_is_an_error_of_its_step_alone(kit: Kit, form: str) -> None:
    """The steps after it report their tokens; the ticket of a rank that sends raises."""
    case: Case = CASES[form]._replace(sink=KeepingSink)
    fixture, outputs = working(kit), Outputs(KeepingSink())
    for turn in range(1 + LATER):
        name, value, slots = COUNTS.get(turn, ("", 0, ()))
        step = advance(fixture, case._replace(order=FALLING) if slots else case, turn)
        for slot in slots:
            fixture.poke_cell(name, slot, value)
        should = outputs.save(fixture, step)
        assert len(told(should, SlotStatus.ERROR)) == len(slots), f"the kit's own rows: {should}"
        ((ticket, _),) = outputs.saved
        outputs.compare()
        outputs.resolve()
        if slots and case.group.is_first:
            assert_raises(InvalidValue, lambda: ticket.wait(PATIENCE), "waiting for output out of bounds")  # noqa: B023
        if slots and name == "draft_num":  # the kernel's next step writes it well
            for slot in slots:
                fixture.poke_cell(name, slot, 0)


def wrong_batch(fixture: World, turn: int) -> list[Task]:
    """Return tasks that are all refused: into held slots, into one beyond the last, and out of another's slot."""
    entering = [fixture.entering(slot, blocks=[0], **SHORT) for slot in (turn % SLOTS, SLOTS + turn, 0)]
    kind = (TaskKind.PREEMPTED, TaskKind.ABORTED)[turn % 2]
    return [*entering[:2], Task(kind, (turn + 1) % SLOTS, entering[2].request)]


@guarantee(8, also=(9, 19))
@pytest.mark.parametrize("form", CASES)
def test_g08_a_refused_batch_before_each_step_changes_nothing(kit: Kit, form: str) -> None:
    """Of each such batch every problem is listed, in the tenth step too; the steps go on, and so do departures."""
    case, outputs = CASES[form], Outputs(CASES[form].sink())
    fixture = working(kit)
    for turn in range(1 + LATER):
        tasks, before = wrong_batch(fixture, turn), kit.bound.counters().submissions
        call: Any = {"state": fixture.state, "tasks": tasks, "stream": fixture.stream}
        error = assert_raises(InvalidBatch, lambda: kit.bound.insert_tasks(**call), f"a wrong batch before step {turn}")  # noqa: B023
        assert len(error.problems) == len(tasks), f"{len(tasks)} tasks are wrong, but listed are {error.problems}"
        spent = kit.bound.counters().submissions - before
        assert spent == 0, f"a refused batch made {spent} submissions before step {turn}"
        if turn % 3 == 2:
            slot = turn % SLOTS
            fixture.insert([*fixture.leaving([slot]), fixture.entering(slot, **LONG)])
        fixture.check(f"a refused batch before step {turn}")
        step = advance(fixture, case._replace(order=FALLING) if turn % 3 == 2 else case, turn)
        outputs.save(fixture, step)
        if case.taken == AT_ONCE or turn == LATER:
            outputs.compare()
    outputs.resolve()


@guarantee(15, also=(13, 17))
@pytest.mark.parametrize("form", [form for form, case in CASES.items() if len(case.group.ranks) == 1])
def test_g15_a_group_of_one_communicates_nothing_in_any_step(kit: Kit, form: str) -> None:
    """Whatever its rank, with drafts and log-probabilities, and of two states; its output is sent."""
    case, fixtures, asked = CASES[form]._replace(sink=KeepingSink), [working(kit), working(kit, "other")], list[Group]()
    outputs = Outputs(KeepingSink())

    def communicator(group: Group) -> object:
        asked.append(group)
        raise AssertionError(f"a group of one asked for its collectives: {group}")

    device: Any = kit.device
    device.communicator = communicator
    try:
        for turn in range(1 + LATER):
            for fixture in fixtures:
                before = kit.bound.counters().submissions
                call: Any = {"state": fixture.state, "group": case.group, "stream": fixture.stream}
                kit.bound.broadcast_tokens(**call).wait(PATIENCE)
                spent = kit.bound.counters().submissions - before
                assert spent == 0, f"broadcast_tokens in {case.group} made {spent} submissions in step {turn}"
                outputs.save(fixture, advance(fixture, case, turn))
                outputs.compare()
    finally:
        del device.communicator
    assert not asked, f"collectives were asked for in a group of one: {asked}"
    sent = len(outputs.resolve())
    assert sent == 2 * (1 + LATER), f"the first and only rank sent {sent} outputs, but should send {2 * (1 + LATER)}"
