"""Reports in the steps after an event (G18, G19, G21): the second, third and tenth, in each form of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from hal_core.errors import SinkClosed, Undelivered
from hal_core.group import ALONE, Group
from hal_core.output.records import SlotStatus
from hal_core.output.sinks import MemorySink, complete_with
from hal_core.output.ticket import OutputTicket
from hal_core.slots.fields import StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import TaskKind

from .fixtures.world import FOLLOWER, Outputs, World, assert_rows
from .harness.asserts import assert_raises
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .harness.sinks import DeadSink, FullSink, KeepingSink
from .harness.waiters import SHORT
from .kit import Kit
from .oracle.output import Row

VOCABULARY, SLOTS = 50, 4
SIZES = StateConfig(
    num_slots=SLOTS, max_model_len=64, block_size=8, max_draft_tokens=2, max_logprobs=2, vocab_size=VOCABULARY
)
NOTHING: Mapping[str, Any] = MappingProxyType({})
LATER = 11
"""Steps after the one with the error."""
BAD = (0, 2)
"""Slots with a token outside the vocabulary; the second gets it three steps after the first."""
ALL, SOME, FALLING = "all slots", "some slots", "falling"
AT_ONCE, LATE = "at once", "late"
LONG: dict[str, Any] = {"max_tokens": 60, "logprobs": 2}
"""Parameters of requests that outlive a test."""


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


def working(kit: Kit, name: str = "target") -> World:
    """Return a state with a request in each slot."""
    fixture = World(kit, SIZES, name=name)
    fixture.enter(fixture.entering(slot, name=f"{name}{slot}", **LONG) for slot in range(SLOTS))
    return fixture


def order_of(case: Case, turn: int) -> list[int]:
    """Return the slots of a step; the slots of errors are left out now and then where not all are named."""
    if case.order == SOME:
        return [slot for slot in np.roll(range(SLOTS), turn).tolist() if turn == 0 or (slot + turn) % 3]
    return [*range(SLOTS)] if case.order == ALL else [*range(SLOTS)][::-1]


def feed(fixture: World, order: Sequence[int]) -> None:
    """Let the slots run that a step names, and no other: those that are left out wait, as a scheduler lets them."""
    lengths = fixture.model.cells["seq_lens_this_time"].copy()
    for slot in range(SLOTS):
        if slot not in order:
            lengths[slot] = 0
        elif slot in fixture.model.residents and not fixture.model.get("stop_flags", slot):
            lengths[slot] = max(1, fixture.model.get("seq_lens_encoder", slot), int(lengths[slot, 0]))
    fixture.poke({"seq_lens_this_time": lengths})


def sampled(fixture: World, order: Sequence[int], turn: int, strange: Sequence[int] = ()) -> None:
    """Write the sampler's fields for a step over these slots; its tokens differ from turn to turn."""
    ids = (np.arange(SLOTS * 9, dtype=np.int64).reshape(SLOTS, 3, 3) + turn) % VOCABULARY
    ids[list(strange), 0, 0] = VOCABULARY + turn
    fixture.sample(ids, np.arange(SLOTS) % 2 + 1)
    feed(fixture, order)


def advance(
    fixture: World,
    case: Case,
    turn: int,
    strange: tuple[int, ...] = (),
    messages: Mapping[str, Any] = NOTHING,
) -> Step:
    """Run a step in which each slot gets a token of its own, and those in ``strange`` one outside the vocabulary.

    ``messages``: ``errors``, ``recovered`` or ``late_errors`` of the step.
    """
    order = order_of(case, turn)
    sampled(fixture, order, turn, strange)
    form = {"speculative": case.speculative, "logprobs": case.logprobs, "group": case.group, **messages}
    step = fixture.step(order, **form)
    fixture.update_inputs(step)
    return step


def told(should: list[Row], status: SlotStatus) -> list[str]:
    """Return the requests with this status."""
    return sorted(row.request_id for row in should if row.status is status)


@guarantee(21, also=(19, 20))
@pytest.mark.parametrize("form", CASES)
def test_g21_nothing_is_told_of_a_request_in_any_step_after_its_error(kit: Kit, form: str) -> None:
    """Of two requests, whose errors are three steps apart; another state has the same slots without an error."""
    case = CASES[form]
    fixture, other, outputs = working(kit), working(kit, "other"), Outputs(case.sink())
    failed: set[str] = set()
    for turn in range(1 + LATER):
        bad = {0: BAD[:1], 3: BAD[1:]}.get(turn, ())
        step = advance(fixture, case if turn not in (0, 3) else case._replace(order=FALLING), turn, bad)
        should = outputs.save(fixture, step)
        failed |= {f"target{slot}" for slot in bad}
        assert told(should, SlotStatus.ERROR) == [f"target{slot}" for slot in bad], f"the kit's own rows: {should}"
        assert not failed & {*told(should, SlotStatus.TOKEN)}, f"the kit's own rows: {should}"
        outputs.save(other, advance(other, case, turn))
        if case.taken == AT_ONCE or turn == LATER:
            outputs.compare()
    resolved = len(outputs.resolve())
    should_send = 2 * (1 + LATER) if case.group.is_first and case.sink is not DeadSink else 0
    assert resolved == should_send, f"the sink was given {resolved} outputs, but should be given {should_send}"


EVENTS: Mapping[int, tuple[tuple[TaskKind, int], ...]] = {
    0: ((TaskKind.PREEMPTED, 1),),
    1: ((TaskKind.ABORTED, 3), (TaskKind.PREEMPTED, 0)),
    2: ((TaskKind.PREEMPTED, 1), (TaskKind.ABORTED, 2)),
    9: ((TaskKind.PREEMPTED, 0), (TaskKind.PREEMPTED, 1), (TaskKind.PREEMPTED, 2), (TaskKind.ABORTED, 3)),
    10: ((TaskKind.ABORTED, 0),),
}
"""Before which steps which slots are left, and entered again."""


@guarantee(18, also=(17, 19, 20))
@pytest.mark.parametrize("form", CASES)
def test_g18_each_request_that_leaves_is_told_once_in_ten_steps(kit: Kit, form: str) -> None:
    """The clean-up of a step is compared too, whatever became of its output."""
    case = CASES[form]
    fixture, outputs = working(kit), Outputs(case.sink())
    gone: list[str] = []
    seen: list[str] = []
    for turn in range(1 + LATER):
        tasks = []
        for kind, slot in EVENTS.get(turn, ()):
            gone.append(fixture.model.residents[slot].request.request_id)
            tasks += [*fixture.leaving([slot], kind), fixture.entering(slot, **LONG)]
        fixture.insert(tasks)
        step = advance(fixture, case if turn not in EVENTS else case._replace(order=FALLING), turn)
        should = outputs.save(fixture, step)
        seen += told(should, SlotStatus.PREEMPTED) + told(should, SlotStatus.ABORTED)
        fixture.check(f"save_output of step {turn}")
        if case.taken == AT_ONCE or turn == LATER:
            outputs.compare()
    assert sorted(seen) == sorted(gone), f"the kit's own rows tell of {seen}, but should of {gone}"
    outputs.resolve()


MESSAGES: Mapping[int, Mapping[str, Mapping[int, str]]] = {
    0: {"recovered": {1: "the worker was restarted"}},
    1: {"errors": {0: "no block left"}},
    2: {"recovered": {0: "again"}, "errors": {2: "logits that are no numbers"}},
    9: {"recovered": {0: "one", 1: "two", 2: "three", 3: "four"}},
}
"""The errors and recovered requests of a step. The same slots have none in the steps after it."""


@guarantee(19, also=(20, 21))
@pytest.mark.parametrize("form", CASES)
def test_g19_messages_are_of_their_step_alone(kit: Kit, form: str) -> None:
    """Recovered and failed requests of several steps, in each form: the next steps do not report it again."""
    case = CASES[form]
    fixture, outputs = working(kit), Outputs(case.sink())
    for turn in range(1 + LATER):
        given = MESSAGES.get(turn, {})
        step = advance(fixture, case if not given else case._replace(order=FALLING), turn, messages=given)
        should = outputs.save(fixture, step)
        marked = len(told(should, SlotStatus.ERROR)) + len(told(should, SlotStatus.RECOVERED))
        assert marked == sum(map(len, given.values())), f"the kit's own rows: {should}"
        if case.taken == AT_ONCE or turn == LATER:
            outputs.compare()
    outputs.resolve()


@guarantee(19, also=(21, 26))
@pytest.mark.parametrize("form", CASES)
def test_g19_late_errors_that_raise_are_the_error_of_their_step_alone(kit: Kit, form: str) -> None:
    """Of the second and the third step: neither has a record, the tickets raise, and the other steps have records."""
    case = CASES[form]
    fixture, sink = working(kit), KeepingSink()
    outputs, broken = Outputs(sink), list[OutputTicket]()

    def unreadable() -> Mapping[int, str]:
        raise ArithmeticError("the reasons cannot be read")

    for turn in range(5):
        given = {"late_errors": unreadable} if turn in (1, 2) else {}
        outputs.save(fixture, advance(fixture, case, turn, messages=given))
        fixture.check(f"save_output of step {turn}")
        if given:
            ticket, _ = outputs.saved.pop()
            assert_raises(ArithmeticError, ticket.record, f"the record of step {turn}, whose late_errors raises")
            broken.append(ticket)
    sound = [ticket.step for ticket, _ in outputs.saved]
    outputs.compare()
    lost = [pending for pending in sink.pending if complete_with(pending) is None]
    assert lost == (broken if case.group.is_first else []), f"the sink lost {len(lost)} outputs, not {len(broken)}"
    for pending in lost:
        why = "waiting for an output whose late_errors raises"
        assert_raises(ArithmeticError, lambda: cast(OutputTicket, pending).wait(PATIENCE), why)  # noqa: B023
        sink.pending.remove(pending)
    sent = [record.step for record in outputs.resolve()]
    should_send = sound if case.group.is_first else []
    assert sent == should_send, f"the sink was given the steps {sent}, but should be given {should_send}"


@guarantee(19, requires=("async_d2h", "can_hold_stream", "overlapped_update"), also=(23,))
@pytest.mark.parametrize("form", [form for form, case in CASES.items() if case.group.is_first])
def test_g19_what_a_closing_sink_cannot_deliver_is_reported_and_not_delivered(kit: Kit, form: str) -> None:
    """One step is delivered first; the outputs of the next three are pending when their sink is closed."""
    case, fixture, sink = CASES[form], working(kit), MemorySink(threaded=True)
    first = advance(fixture, case, 0)
    rows = fixture.rows_of(first)
    arrive(fixture.save(first, sink))
    tickets, named = list[OutputTicket](), list[str]()
    with kit.held(fixture.stream, "save_output into a sink that is closed"):
        for turn in (1, 2, 3):
            step = advance(fixture, case, turn)
            named += [row.request_id for row in fixture.rows_of(step)]
            tickets.append(cast(OutputTicket, fixture.save(step, sink)))
        error = assert_raises(Undelivered, lambda: sink.close(SHORT), "closing a sink with three pending outputs")
        reported = [name for name, _, _ in error.records]
    for ticket in tickets:
        assert_raises(SinkClosed, lambda: ticket.wait(PATIENCE), f"step {ticket.step}, which was reported as lost")  # noqa: B023
    assert reported == named, f"reported as lost are {reported}, but should be {named}"
    delivered = [record.step for record in sink.records]
    assert delivered == [first.number], f"the sink has the steps {delivered}, but should have {[first.number]}"
    assert_rows(sink.records[0], rows, first.number)
    again = advance(fixture, case, 4)
    assert_raises(SinkClosed, lambda: fixture.save(again, sink), "save_output into a closed sink")
    fixture.check("save_output into a closed sink")
    fixture.output(advance(fixture, case, 5))
