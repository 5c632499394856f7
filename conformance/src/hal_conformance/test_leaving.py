"""Requests that leave: refused tasks (G8), and each departure reported once, for all sinks and steps (G18, G19)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hal_core.errors import HalError, InvalidBatch
from hal_core.group import ALONE
from hal_core.output.records import OutputRecord, SlotStatus
from hal_core.output.sinks import MemorySink
from hal_core.slots.tasks import Task, TaskKind
from msgspec.structs import replace

from .fixtures import hook_calls
from .fixtures.batches import LEAVE
from .fixtures.world import FOLLOWER, World, assert_rows
from .harness.asserts import assert_no_error, assert_raises, assert_says
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .harness.sinks import DeadSink, FullSink, KeepingSink
from .kit import Kit

FREE = hook_calls.SIZES.num_slots - 1
LEFT = (SlotStatus.PREEMPTED, SlotStatus.ABORTED)


def of_another(fixture: World, kind: TaskKind) -> Task:
    """Return a leaving task for a slot held by another request."""
    return Task(kind, 0, fixture.model.residents[1].admitted)


def never_entered(fixture: World, kind: TaskKind) -> Task:
    """Return a leaving task for a free slot, with a request that was admitted but never inserted."""
    return replace(
        hook_calls.entering(fixture, FREE), kind=kind, num_computed_tokens=0, num_scheduled_tokens=0, blocks=()
    )


def never_held(fixture: World, kind: TaskKind) -> Task:
    """Return a leaving task with a running request, for a slot that it does not hold."""
    return Task(kind, FREE, fixture.model.residents[1].admitted)


def gone_already(fixture: World, kind: TaskKind) -> Task:
    """Return a leaving task for a request that has left and was reported."""
    task = hook_calls.leaving(fixture, 2, kind)
    fixture.enter([task])
    fixture.output(fixture.step(range(hook_calls.SIZES.num_slots)))
    return task


def released(fixture: World, kind: TaskKind) -> Task:
    """Return a leaving task for a slot that was released, as if its request had ended."""
    task = hook_calls.leaving(fixture, 2, kind)
    fixture.release([2])
    return task


def replaced(fixture: World, kind: TaskKind) -> Task:
    """Return a leaving task for a slot that another request has entered meanwhile."""
    task = hook_calls.leaving(fixture, 2, kind)
    fixture.enter([hook_calls.leaving(fixture, 2), hook_calls.entering(fixture, 2)])
    return task


def outside(fixture: World, kind: TaskKind) -> Task:
    """Return a leaving task for a slot that does not exist: counted from the end, it would be a held one."""
    return Task(kind, 2 - hook_calls.SIZES.num_slots, fixture.model.residents[2].admitted)


NOT_HELD: dict[str, Callable[[World, TaskKind], Task]] = {
    "held by another": of_another,
    "never entered": never_entered,
    "in another slot": never_held,
    "gone and reported": gone_already,
    "released": released,
    "replaced": replaced,
    "no slot": outside,
}
"""The fault of a leaving task."""


@guarantee(19, also=(8, 9, 18))
@pytest.mark.parametrize("why", NOT_HELD)
@pytest.mark.parametrize("kind", LEAVE, ids=lambda kind: kind.name.lower())
def test_g19_a_request_that_is_not_in_the_slot_does_not_leave_it(kit: Kit, kind: TaskKind, why: str) -> None:
    fixture = hook_calls.working(kit)
    bad = NOT_HELD[why](fixture, kind)
    booked = (
        fixture.state.host_table.table.copy(),
        dict(fixture.state.host_table.live),
        [*fixture.state.host_table.requests],
    )
    for tasks in (
        [bad],
        [hook_calls.leaving(fixture, 0), bad] if bad.slot else [hook_calls.leaving(fixture, 1), bad],
        [bad, hook_calls.entering(fixture, 3)],
    ):
        error = assert_raises(
            InvalidBatch,
            lambda tasks=tasks: fixture.bound.insert_tasks(state=fixture.state, tasks=tasks, stream=fixture.stream),  # type: ignore[misc]
            f"a leaving of slot {bad.slot} ({why})",
        )
        assert_says(error, device=fixture.bound.name, hook="insert_tasks", argument="tasks")
        named = [text for text in error.problems if f"task {tasks.index(bad)} " in text]
        assert named, f"the problems {error.problems} do not name task {tasks.index(bad)}, a leaving ({why})"
        fixture.check(f"a leaving ({why}) was refused")
    now = fixture.state.host_table.table, dict(fixture.state.host_table.live), [*fixture.state.host_table.requests]
    assert (now[0] == booked[0]).all(), f"a leaving ({why}) was refused, and booked all the same"
    assert now[1:] == booked[1:], f"a leaving ({why}) was refused, and booked all the same"
    fixture.output(fixture.step(range(hook_calls.SIZES.num_slots)))
    fixture.check("a step after a leaving that was refused")


@guarantee(19, also=(9, 11, 18))
def test_g19_releasing_what_is_free_or_wrong_changes_nothing_else(kit: Kit) -> None:
    fixture = hook_calls.working(kit)
    for free in ([FREE], [], [FREE, FREE]):
        fixture.state.release(free)
    table = fixture.state.host_table.table.copy()
    for wrong in ([0, hook_calls.SIZES.num_slots], [1, -1], [2**40], ["0"]):
        error = assert_raises(HalError, lambda wrong=wrong: fixture.state.release(wrong), f"releasing slots {wrong}")  # type: ignore[misc]
        assert error.cure, f"{error} names no cure"
    assert (fixture.state.host_table.table == table).all(), "a release that was refused has freed a slot all the same"
    fixture.output(fixture.step(range(hook_calls.SIZES.num_slots)))
    fixture.release([1])
    fixture.check("slot 1 was released")
    rows = fixture.output(fixture.step(range(hook_calls.SIZES.num_slots)))
    assert len(rows) == 2, f"one of three requests was released, and {len(rows)} rows are reported"
    arrive(hook_calls.insert(fixture))
    fixture.check("a slot that was released was entered")


def departures(records: list[OutputRecord]) -> Counter[tuple[str, SlotStatus]]:
    """Count the reports of each departure."""
    found: Counter[tuple[str, SlotStatus]] = Counter()
    for record in records:
        for name, status in zip(record.request_ids, record.status.tolist(), strict=True):
            if status in LEFT:
                found[name, SlotStatus(status)] += 1
    return found


def departed(fixture: World) -> Counter[tuple[str, SlotStatus]]:
    """Let one request be preempted and one aborted; return the expected reports, once each."""
    fixture.enter([hook_calls.leaving(fixture, 0), hook_calls.leaving(fixture, 2, TaskKind.ABORTED)])
    names = {slot: leavers[-1].request_id for slot, leavers in fixture.model.leavers.items()}
    return Counter({(names[0], SlotStatus.PREEMPTED): 1, (names[2], SlotStatus.ABORTED): 1})


SINKS = ("full", "full twice", "dead", "late", "good")


@guarantee(19, also=(18, 23))
@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("again", [False, True], ids=["left free", "entered again"])
def test_g19_a_leaving_is_told_once_whatever_its_sink_does(kit: Kit, kind: str, again: bool) -> None:
    fixture = hook_calls.working(kit)
    everything = range(hook_calls.SIZES.num_slots)
    should = departed(fixture)
    records: list[OutputRecord] = []
    for attempt in range(2 if kind == "full twice" else 1):
        sink = {"dead": DeadSink, "late": KeepingSink, "good": MemorySink}.get(kind, FullSink)()
        step = fixture.step(everything)
        rows = fixture.rows_of(step)
        error = None
        try:
            fixture.save(step, sink)
        except HalError as raised:
            error = raised
        assert (error is None) == (kind in ("late", "good")), f"save_output into a {kind} sink raised {error!r}"
        if kind == "dead":
            lost = error.ticket  # type: ignore[union-attr]  # leads to what was lost
            records.append(assert_no_error(lambda: lost.record(PATIENCE), "the record that a dead sink has lost"))  # noqa: B023
        elif kind == "good":
            records += sink.records
        else:
            records += sink.resolve_all()
        assert_rows(records[-1], rows)
        fixture.check(f"save_output of leavings into a {kind} sink")
        if kind == "full twice" and attempt == 0:
            arrive(hook_calls.update_inputs(fixture))
    if again:
        fixture.enter([hook_calls.entering(fixture, 0), hook_calls.entering(fixture, 2)])
    for _ in range(3):
        fixture.poke({"sampled_token_ids": np.arange(hook_calls.SIZES.num_slots)})
        arrive(hook_calls.update_inputs(fixture))
        fixture.output(fixture.step(everything))
    found = departures([*records, *fixture.sink.records])
    assert found == should, f"departures were reported {dict(found)} times, but should be {dict(should)} (sink: {kind})"
    assert not fixture.state.host_table.preempted, f"the host still has {fixture.state.host_table.preempted} to report"
    assert not fixture.state.host_table.aborted, f"the host still has {fixture.state.host_table.aborted} to report"


@guarantee(18, also=(19, 20))
@pytest.mark.parametrize("follower", [False, True], ids=["first rank", "follower"])
def test_g18_a_leaving_waits_for_the_step_that_names_its_slot(kit: Kit, follower: bool) -> None:
    fixture = hook_calls.working(kit)
    should = departed(fixture)
    records = []
    for order in ([1], [1, 2], [FREE, 1], [0, 1], [2, 1, 0]):
        step = fixture.step(order, group=FOLLOWER if follower else ALONE)
        rows = fixture.rows_of(step)
        ticket = fixture.save(step)
        arrive(ticket)
        records.append(fixture.take(ticket))
        assert_rows(records[-1], rows)
        fixture.check(f"save_output of slots {order}")
    assert departures(records) == should, (
        f"departures were reported {dict(departures(records))} times, but should be {dict(should)}"
    )


@guarantee(18, also=(19,))
def test_g18_who_leaves_and_who_enters_one_slot_are_both_told(kit: Kit) -> None:
    fixture = hook_calls.working(kit)
    should: Counter[tuple[str, SlotStatus]] = Counter()
    for kind, status in ((TaskKind.PREEMPTED, LEFT[0]), (TaskKind.ABORTED, LEFT[1])):
        should[fixture.model.residents[1].request.request_id, status] += 1
        fixture.enter([hook_calls.leaving(fixture, 1, kind), hook_calls.entering(fixture, 1)])
        fixture.check(f"{kind.name.lower()} and entered in one batch")
    hook_calls.submit(fixture)
    arrive(hook_calls.update_inputs(fixture))
    before = len(fixture.sink.records)
    rows = fixture.output(fixture.step([1, 0, FREE]))
    assert len(rows) == 4, (
        f"two requests have left slot 1, one is in it and one in slot 0, but {len(rows)} are reported"
    )
    fixture.output(fixture.step([1, 0, FREE]))
    assert departures(fixture.sink.records[before:]) == should, (
        f"departures of one slot: {departures(fixture.sink.records[before:])}"
    )
    assert np.array_equal(fixture.state.host_table.admission_ids != 0, [True, True, True, False, False]), (
        "the requests in the slots"
    )
