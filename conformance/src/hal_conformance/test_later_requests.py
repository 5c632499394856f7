"""Requests that follow one another in their slots, two states, counts out of bounds: ten steps (G20, G21, G24)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_core.output.records import SlotStatus
from hal_core.output.ticket import OutputTicket
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import SplitRole
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind

from .fixtures.state import StateFixture
from .fixtures.stepping import draftable, free_ended
from .harness.asserts import assert_no_error, assert_raises
from .harness.backdoor import PATIENCE
from .harness.guarantees import guarantee
from .harness.sinks import KeepingSink
from .kit import Kit
from .oracle.output import Row
from .test_later_steps import (
    AT_ONCE,
    CASES,
    FALLING,
    LATER,
    SIZES,
    SLOTS,
    Case,
    advance,
    compared,
    order_of,
    sampled,
    saved,
    told,
    working,
)

PARAMS = SamplingParams(max_tokens=2, logprobs=2)


def enter_free(fixture: StateFixture, turn: int) -> None:
    """Put a new request into each free slot, by turns of the prefill role of a split and of none."""
    tasks = []
    for slot in range(SLOTS):
        if slot not in fixture.model.residents:
            role = SplitRole.PREFILL if (slot + turn) % 3 else SplitRole.MIXED
            request = fixture.admit(Request(fixture.new_name(), [1, 2], PARAMS, role=role))
            tasks.append(Task(TaskKind.PREFILL, slot, request, 0, 2, [slot]))
    fixture.insert(tasks)


@guarantee(24, also=(12, 19, 20, 25))
@pytest.mark.parametrize("form", CASES)
def test_g24_first_tokens_are_told_of_each_request_in_a_slot(kit: Kit, form: str) -> None:
    """A slot whose first token was told gets another request before the next step, taken or not; so does the mirror."""
    case = CASES[form]
    fixture, sink = StateFixture(kit, SIZES), case.sink()
    late: list[tuple[OutputTicket, list[Row]]] = []
    copied: list[dict[str, np.ndarray]] = []
    firsts = 0
    for turn in range(1 + LATER):
        enter_free(fixture, turn)
        step = advance(fixture, case._replace(order=FALLING) if turn % 4 == 0 else case, turn)
        if case.speculative:
            fixture.propose({slot: [7 + turn] * ((slot + turn) % 3) for slot in draftable(fixture)})
        should = fixture.rows_of(step)
        firsts += sum(row.first for row in should)
        copied.append({name: fixture.model.cells[name].copy() for name in fixture.state.mirror})
        late.append((saved(fixture, step, sink), should))
        free_ended(fixture)
        if case.taken == AT_ONCE or turn == LATER:
            compared(late)
            for (ticket, _), should_be in zip(late, copied, strict=True):
                assert_mirrored(fixture, ticket, should_be)
            late.clear()
            copied.clear()
    assert firsts > 5, f"the kit's own rows have {firsts} first tokens"
    assert_no_error(sink.resolve_all, "outputs whose records were taken")
    fixture.check("ten steps of first tokens")


def assert_mirrored(fixture: StateFixture, ticket: OutputTicket, should: dict[str, np.ndarray]) -> None:
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
    case, sink = CASES[form], CASES[form].sink()
    fixtures = [working(kit), working(kit, "other")]
    late: list[tuple[OutputTicket, list[Row]]] = []
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
            rows = fixture.rows_of(step)
            late.append((saved(fixture, step, sink), rows))
        if case.taken == AT_ONCE or turn == LATER:
            compared(late)
            late.clear()
    assert_no_error(sink.resolve_all, "outputs whose records were taken")


COUNTS = {1: ("accept_num", 9, (1,)), 2: ("draft_num", -1, (0, 3)), 4: ("accept_num", -1, (1, 2))}
"""Before which outputs a kernel writes which field out of bounds, and in which slots."""


@guarantee(21, also=(19,))
@pytest.mark.parametrize("form", CASES)
def test_g21_a_count_out_of_bounds_is_an_error_of_its_step_alone(kit: Kit, form: str) -> None:
    """The steps after it tell their tokens; the ticket of a rank that sends raises."""
    case: Case = CASES[form]._replace(sink=KeepingSink)
    fixture, sink = working(kit), KeepingSink()
    for turn in range(1 + LATER):
        name, value, slots = COUNTS.get(turn, ("", 0, ()))
        step = advance(fixture, case._replace(order=FALLING) if slots else case, turn)
        for slot in slots:
            fixture.poke_cell(name, slot, value)
        should = fixture.rows_of(step)
        assert len(told(should, SlotStatus.ERROR)) == len(slots), f"the kit's own rows: {should}"
        ticket = saved(fixture, step, sink)
        compared([(ticket, should)])
        assert_no_error(sink.resolve_all, f"the output of step {turn}")
        if slots and case.group.is_first:
            assert_raises(InvalidValue, lambda: ticket.wait(PATIENCE), "waiting for output out of bounds")  # noqa: B023
        if slots and name == "draft_num":  # the kernel's next step writes it well
            for slot in slots:
                fixture.poke_cell(name, slot, 0)
