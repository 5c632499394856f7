"""``insert_tasks``: all or nothing (G8)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hal_core.errors import InvalidBatch, InvalidValue
from hal_core.slots.admission import admit
from hal_core.slots.layout import lay_out
from hal_core.slots.tasks import Task, TaskBatch, TaskKind
from hypothesis import assume
from hypothesis import strategies as st

from .draw.requests import requests, sizes
from .fixtures import hook_calls
from .fixtures.batches import draw_batch, draw_entering, told
from .fixtures.invalid_batches import INVALID_TASKS
from .fixtures.stepping import run_step
from .fixtures.world import World
from .harness.asserts import assert_raises, assert_says
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .kit import Draw, Kit, examples


def prepared(kit: Kit, draw: Draw) -> World:
    """Return a state with some requests in it."""
    fixture = World(kit, draw(sizes(), "sizes"))
    fixture.enter(draw_batch(draw, fixture))
    if draw(st.booleans(), "a step has run"):
        fixture.output(run_step(draw, fixture))
    return fixture


def refuse(fixture: World, tasks: list[Task]) -> InvalidBatch:
    """Assert that the batch is refused without any change."""
    __tracebackhide__ = True
    error = assert_raises(
        InvalidBatch,
        lambda: fixture.bound.insert_tasks(state=fixture.state, tasks=tasks, stream=fixture.stream),
        f"insert_tasks({told(tasks)})",
    )
    fixture.check(f"the batch ({told(tasks)}) was refused")
    assert_says(error, device=fixture.bound.name, hook="insert_tasks", argument="tasks")
    return error


@guarantee(8)
@examples(2.0)
def test_g08_an_invalid_batch_changes_nothing_and_every_problem_is_listed(kit: Kit, draw: Draw) -> None:
    fixture = prepared(kit, draw)
    tasks = draw_batch(draw, fixture, least=1)
    alone = [task for task in tasks if [other.slot for other in tasks].count(task.slot) == 1]
    assume(alone)
    chosen = draw(st.lists(st.sampled_from(range(len(alone))), min_size=1, unique=True), "tasks to spoil")
    spoilt = list(tasks)
    names = []
    for at in chosen:
        task = alone[at]
        applicable = [bad for invalid in INVALID_TASKS if (bad := invalid(fixture, task)) is not None]
        bad = draw(st.sampled_from(applicable), f"what is wrong with the task of slot {task.slot}")
        assume(bad.slot == task.slot or bad.slot not in {other.slot for other in spoilt})
        spoilt[spoilt.index(task)] = bad
        names.append((spoilt.index(bad), bad.request.request_id))
    error = refuse(fixture, spoilt)
    for index, name in names:
        mine = [text for text in error.problems if f"task {index} " in text and name in text]
        assert mine, f"task {index} ({name!r}) is invalid, but the problems are {error.problems}"
    sound = [text for text in error.problems if not any(f"task {index} " in text for index, _ in names)]
    assert not sound or any("already" in text for text in sound), f"sound tasks were called invalid: {sound}"


@guarantee(8)
def test_g08_of_a_batch_in_which_all_is_wrong_every_task_is_listed(kit: Kit) -> None:
    fixture = hook_calls.working(kit)
    free = range(hook_calls.ENTERED, hook_calls.SIZES.num_slots)
    tasks = [hook_calls.entering(fixture, slot) for slot in free] + [
        hook_calls.leaving(fixture, slot) for slot in range(hook_calls.ENTERED)
    ]
    wrong = [one for task in tasks for invalid in INVALID_TASKS[:3] if (one := invalid(fixture, task)) is not None]
    error = refuse(fixture, wrong)
    for index, task in enumerate(wrong):
        mine = [text for text in error.problems if f"task {index} " in text and task.request.request_id in text]
        assert mine, f"task {index} of {len(wrong)} invalid ones is not among the problems: {error.problems}"


@guarantee(8)
@examples()
def test_g08_the_batch_goes_in_once_it_is_mended(kit: Kit, draw: Draw) -> None:
    fixture = prepared(kit, draw)
    tasks = draw_batch(draw, fixture, least=1)
    assume(tasks)
    bad = Task(tasks[0].kind, -1, tasks[0].request)
    refuse(fixture, [*tasks, bad])
    fixture.enter(tasks)
    fixture.check(f"{told(tasks)} was inserted after a refusal")


@guarantee(8)
@examples(0.5)
def test_g08_one_slot_is_entered_once_a_batch(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"))
    slot = draw(st.integers(0, fixture.sizes.num_slots - 1), "slot")
    tasks = [draw_entering(draw, fixture, slot, TaskKind.PREFILL, None) for _ in range(2)]
    refuse(fixture, tasks)


@guarantee(8)
@examples(0.5)
def test_g08_one_request_enters_one_slot(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(most_slots=7).filter(lambda size: size.num_slots > 1), "sizes"))
    task = draw_entering(draw, fixture, 0, TaskKind.PREFILL, None)
    twin = Task(task.kind, 1, task.request, task.num_computed_tokens, task.num_scheduled_tokens, task.blocks)
    refuse(fixture, [task, twin])


@guarantee(8)
@examples(0.5)
def test_g08_a_slot_that_is_held_is_not_entered(kit: Kit, draw: Draw) -> None:
    fixture = prepared(kit, draw)
    assume(fixture.model.residents)
    slot = draw(st.sampled_from(sorted(fixture.model.residents)), "slot")
    refuse(fixture, [draw_entering(draw, fixture, slot, TaskKind.PREFILL, None)])


@guarantee(8)
@pytest.mark.parametrize("kind", [TaskKind.PREEMPTED, TaskKind.ABORTED], ids=lambda kind: kind.name)
def test_g08_only_who_is_in_a_slot_can_leave_it(kit: Kit, kind: TaskKind) -> None:
    fixture = hook_calls.working(kit)
    (inside, *_) = fixture.model.residents.values()
    outside = hook_calls.entering(fixture, hook_calls.ENTERED).request  # admitted, but in no slot
    refuse(fixture, [Task(kind, 0, outside)])
    refuse(fixture, [Task(kind, hook_calls.ENTERED, inside.admitted)])
    fixture.enter([hook_calls.leaving(fixture, 0, kind)])
    fixture.check("the slot's request has left it")


@guarantee(8)
@examples(0.5)
def test_g08_a_slot_is_not_preempted_again_before_that_was_reported(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"))
    for _ in range(2):
        entering = draw_entering(draw, fixture, 0, TaskKind.PREFILL, None)
        fixture.enter([entering])
        leaving = [Task(TaskKind.PREEMPTED, 0, entering.request)]
        if 0 in fixture.model.leavers:
            refuse(fixture, leaving)
        else:
            fixture.enter(leaving)
            fixture.check("preempted")


@guarantee(8)
@examples()
def test_g08_a_request_admitted_for_a_state_of_other_sizes_is_refused(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"))
    alike = {
        "num_slots": fixture.sizes.num_slots,
        "block_size": fixture.sizes.block_size,
    }  # requests do not depend on these
    other = draw(sizes().filter(lambda size: replace(size, **alike) != fixture.sizes), "other sizes")
    foreign = admit(draw(requests(other, "foreign"), "request"), lay_out(other))
    own = [draw_entering(draw, fixture, slot, TaskKind.PREFILL, None) for slot in range(1, fixture.sizes.num_slots)]
    blocks = [0] * min(fixture.sizes.max_blocks, -(-foreign.total // fixture.sizes.block_size))
    batch = [*own, Task(TaskKind.PREFILL, 0, foreign, 0, foreign.total, blocks)]
    error = assert_raises(
        InvalidValue,
        lambda: fixture.bound.insert_tasks(state=fixture.state, tasks=batch, stream=fixture.stream),
        f"a request admitted for {other}, inserted into {fixture.sizes}",
    )
    fixture.check("a request of other sizes was refused")
    assert_says(error, device=fixture.bound.name, hook="insert_tasks")


@guarantee(8)
@examples(0.5)
def test_g08_an_empty_batch_changes_nothing(kit: Kit, draw: Draw) -> None:
    fixture = prepared(kit, draw)
    arrive(fixture.bound.insert_tasks(state=fixture.state, tasks=TaskBatch.of([]), stream=fixture.stream))
    fixture.check("an empty batch")
