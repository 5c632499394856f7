"""What is told in the steps after an error (G21, G19): the next, the third and the tenth, in each form of a step."""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
import pytest
from hal_core.errors import SinkClosed, SinkFull
from hal_core.group import ALONE, Group
from hal_core.output.records import SlotStatus
from hal_core.output.ticket import OutputTicket
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind

from .fixtures.state import FOLLOWER, StateFixture, assert_rows
from .harness.asserts import assert_no_error
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .harness.sinks import DeadSink, FullSink, KeepingSink
from .kit import Kit
from .oracle.output import Row

VOCABULARY, SLOTS = 50, 4
SIZES = StateConfig(
    num_slots=SLOTS, max_model_len=64, block_size=8, max_draft_tokens=2, max_logprobs=2, vocab_size=VOCABULARY
)
LATER = 11
"""Steps after the one with the error."""
BAD = (0, 2)
"""Slots with a token outside the vocabulary; the second gets it three steps after the first."""
ALL, SOME, FALLING = "all slots", "some slots", "falling"
AT_ONCE, LATE = "at once", "late"


class Case(NamedTuple):
    """One form of all steps of a test."""

    speculative: bool
    logprobs: int | None
    order: str
    group: Group
    taken: str
    sink: type[KeepingSink]


CASES = {
    "plain": Case(False, None, ALL, ALONE, AT_ONCE, KeepingSink),
    "plain, some slots, late": Case(False, None, SOME, Group((7,), 7), LATE, KeepingSink),
    "plain, falling, dead sink": Case(False, None, FALLING, Group((3, 1), 3), AT_ONCE, DeadSink),
    "plain, other rank": Case(False, None, SOME, FOLLOWER, AT_ONCE, KeepingSink),
    "drafts": Case(True, None, FALLING, Group((7,), 7), AT_ONCE, KeepingSink),
    "drafts, full sink, late": Case(True, None, ALL, Group((3, 1), 3), LATE, FullSink),
    "drafts, other rank, some slots": Case(True, None, SOME, FOLLOWER, LATE, KeepingSink),
    "no alternatives": Case(False, 0, SOME, Group((3, 1), 3), LATE, KeepingSink),
    "no alternatives, drafts, dead sink": Case(True, 0, ALL, Group((7,), 7), AT_ONCE, DeadSink),
    "all alternatives, full sink": Case(False, 2, FALLING, Group((7,), 7), AT_ONCE, FullSink),
    "all alternatives, drafts, other rank": Case(True, 2, FALLING, FOLLOWER, LATE, KeepingSink),
    "all alternatives, drafts, alone": Case(True, 2, SOME, ALONE, AT_ONCE, KeepingSink),
}
"""Every value of one axis with most values of each other one."""


def working(kit: Kit, name: str = "target") -> StateFixture:
    """Return a state with a request in each slot."""
    fixture, params = StateFixture(kit, SIZES, name=name), SamplingParams(max_tokens=60, logprobs=2)
    requests = [fixture.admit(Request(f"{name}{slot}", [1, 2], params)) for slot in range(SLOTS)]
    arrive(fixture.insert([Task(TaskKind.PREFILL, at, one, 0, 2, [at]) for at, one in enumerate(requests)]))
    return fixture


def order_of(case: Case, turn: int) -> list[int]:
    """Return the slots of a step; the slots of errors are left out now and then where not all are named."""
    if case.order == SOME:
        return [slot for slot in np.roll(range(SLOTS), turn).tolist() if turn == 0 or (slot + turn) % 3]
    return [*range(SLOTS)] if case.order == ALL else [*range(SLOTS)][::-1]


def advance(fixture: StateFixture, case: Case, turn: int, strange: tuple[int, ...] = ()) -> Step:
    """Run a step in which each slot gets a token of its own, and those in ``strange`` one outside the vocabulary."""
    ids = (np.arange(SLOTS * 9, dtype=np.int64).reshape(SLOTS, 3, 3) + turn) % VOCABULARY
    ids[list(strange), 0, 0] = VOCABULARY + turn
    fixture.poke(
        {
            "sampled_token_ids": ids[:, 0, 0].copy(), "accept_tokens": ids[:, :, 0].copy(),
            "accept_num": np.arange(SLOTS, dtype=np.int32) % 2 + 1, "topk_token_ids": ids,
            "topk_logprobs": -np.arange(ids.size, dtype=np.float32), "topk_ranks": np.arange(SLOTS * 3, dtype=np.int32),
        }
    )  # fmt: skip
    form = {"speculative": case.speculative, "logprobs": case.logprobs, "group": case.group}
    step = fixture.step(order_of(case, turn), **form)
    fixture.update_inputs(step)
    return step


def saved(fixture: StateFixture, step: Step, sink: KeepingSink) -> OutputTicket:
    """Save the output; where the sink does not take it, the error has the ticket."""
    try:
        return cast(OutputTicket, fixture.save(step, sink))
    except (SinkFull, SinkClosed) as error:
        return cast(OutputTicket, error.ticket)


def told(should: list[Row], status: SlotStatus) -> list[str]:
    """Return the requests with this status."""
    return sorted(row.request_id for row in should if row.status is status)


@guarantee(21, also=(19, 20))
@pytest.mark.parametrize("form", CASES)
def test_g21_nothing_is_told_of_a_request_in_any_step_after_its_error(kit: Kit, form: str) -> None:
    """Of two requests, whose errors are three steps apart; another state has the same slots without an error."""
    case = CASES[form]
    fixture, other, sink = working(kit), working(kit, "other"), case.sink()
    late: list[tuple[OutputTicket, list[Row]]] = []
    failed: set[str] = set()
    for turn in range(1 + LATER):
        bad = {0: BAD[:1], 3: BAD[1:]}.get(turn, ())
        step = advance(fixture, case if turn not in (0, 3) else case._replace(order=FALLING), turn, bad)
        should = fixture.rows_of(step)
        failed |= {f"target{slot}" for slot in bad}
        assert told(should, SlotStatus.ERROR) == [f"target{slot}" for slot in bad], f"the kit's own rows: {should}"
        assert not failed & {*told(should, SlotStatus.TOKEN)}, f"the kit's own rows: {should}"
        late.append((saved(fixture, step, sink), should))
        beside = advance(other, case, turn)
        theirs = other.rows_of(beside)
        late.append((saved(other, beside, sink), theirs))
        if case.taken == AT_ONCE or turn == LATER:
            for ticket, rows in late:
                record = assert_no_error(ticket.record, f"the record of step {ticket.step}")
                assert_rows(record, rows, ticket.step)
            late.clear()
    resolved = len(assert_no_error(sink.resolve_all, "outputs whose records were taken"))
    should_send = 2 * (1 + LATER) if case.group.is_first and case.sink is not DeadSink else 0
    assert resolved == should_send, f"the sink was given {resolved} outputs, but should be given {should_send}"
