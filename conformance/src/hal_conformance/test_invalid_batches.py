"""Batches that are refused (G8): every mistake by itself and among others, all of them listed, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hal_core.errors import InvalidBatch, InvalidValue
from hal_core.slots.admission import Request, SamplingParams, admit
from hal_core.slots.fields import StateConfig
from hal_core.slots.layout import lay_out
from hal_core.slots.tasks import Task, TaskBatch, TaskKind
from hypothesis import assume
from hypothesis import strategies as st
from msgspec import structs

from .draw.requests import requests, sizes
from .fixtures import hook_calls
from .fixtures.batches import draw_batch, draw_entering, text_of
from .fixtures.hook_calls import SIZES
from .fixtures.invalid_batches import INVALID_TASKS
from .fixtures.many import MANY, prefill, request
from .fixtures.stepping import run_step
from .fixtures.world import World
from .harness.asserts import assert_no_error, assert_raises, assert_says
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
        f"insert_tasks({text_of(tasks)})",
    )
    fixture.check(f"the batch ({text_of(tasks)}) was refused")
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
    fixture.check(f"{text_of(tasks)} was inserted after a refusal")


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


FREE = hook_calls.ENTERED
"""The first slot without a request; the one after it is free too."""


def entering(fixture: World) -> Task:
    """Return a task that puts a new request into a free slot."""
    return hook_calls.entering(fixture, FREE)


def handed(fixture: World) -> Task:
    """Return a task that hands a new request over."""
    one = hook_calls.entering(fixture, FREE).request
    return Task(TaskKind.REMOTE_PREFILL, FREE, one, one.total, 0, [1, 2], first_token=4, drafts=[5])


def growing(fixture: World) -> Task:
    """Return a task that gives a request more blocks."""
    one = fixture.model.residents[1]
    return Task(TaskKind.MORE_BLOCKS, 1, one.admitted, blocks=[1], first_block=one.blocks)


NEGATIVE, ELSEWHERE, TOO_MANY = {"blocks": [3, -1]}, {"first_block": 2}, {"drafts": [-1] * (SIZES.max_draft_tokens + 1)}
SPOILT: dict[str, tuple[Callable[[World], Task], list[dict[str, Any]], int]] = {
    "a request that enters": (
        entering, [NEGATIVE, ELSEWHERE, {"drafts": [1]}, {"first_token": 3}, {"num_computed_tokens": -1}], 5
    ),
    "a request that enters a held slot": (entering, [{"slot": 1}, NEGATIVE, {"drafts": [-1]}, {"first_token": 0}], 5),
    "a handoff": (handed, [NEGATIVE, ELSEWHERE, TOO_MANY, {"first_token": -1}, {"num_computed_tokens": 0}], 6),
    "more blocks": (growing, [NEGATIVE, ELSEWHERE, {"drafts": [-2]}, {"first_token": 1}], 5),
}  # fmt: skip
"""A task, the changes that spoil it, and how many problems they are; negative drafts that do not fit are two."""


@guarantee(8, also=(26,))
@pytest.mark.parametrize("what", SPOILT)
def test_g08_every_problem_of_one_task_is_listed(kit: Kit, what: str) -> None:
    fixture = hook_calls.working(kit)
    make, changes, count = SPOILT[what]
    bad = make(fixture)
    for change in changes:
        bad = structs.replace(bad, **change)
    sound = hook_calls.entering(fixture, FREE + 1)
    for tasks in ([bad], [sound, bad], [hook_calls.leaving(fixture, 0), sound, bad]):
        error = refuse(fixture, tasks)
        mine = {text for text in error.problems if f"task {len(tasks) - 1} " in text and bad.request.request_id in text}
        assert len(mine) >= count, f"{what} has {count} problems, of which {len(mine)} are listed: {error.problems}"
        assert len(mine) == len(error.problems), f"sound tasks were called invalid: {error.problems}"


@guarantee(8)
@pytest.mark.parametrize("form", [list, TaskBatch.of], ids=["list", "batch"])
def test_g08_of_hundreds_of_invalid_tasks_each_is_listed(kit: Kit, form: Callable[[list[Task]], Any]) -> None:
    """All but one in three are invalid, the first and the last among them."""
    fixture = World(kit, MANY)
    slots = np.random.default_rng(3).permutation(MANY.num_slots).tolist()
    tasks = [prefill(fixture, slot, request(fixture, slot)) for slot in slots]
    wrong = [at for at in range(len(tasks)) if at % 3 != 1]
    for at in wrong:
        tasks[at] = structs.replace(tasks[at], first_block=1)
    call = {"state": fixture.state, "tasks": form(tasks), "stream": fixture.stream}
    error = assert_raises(InvalidBatch, lambda: fixture.bound.insert_tasks(**call), "hundreds of invalid tasks")
    assert_says(error, device=fixture.bound.name, hook="insert_tasks", argument="tasks")
    listed = [at for at in range(len(tasks)) if any(f"task {at} " in text for text in error.problems)]
    assert listed == wrong, f"{len(wrong)} tasks are invalid, and {len(listed)} are listed: {listed}"
    fixture.check("hundreds of invalid tasks were refused")
    right = [structs.replace(task, first_block=0) for task in tasks]
    arrive(assert_no_error(lambda: fixture.insert(right), "the same tasks, mended"))
    fixture.check("the same tasks, mended")


def left_after_entering(fixture: World) -> list[Task]:
    """Enter a slot, and let its former request leave after that."""
    return [hook_calls.entering(fixture, 0), hook_calls.leaving(fixture, 0)]


def left_twice(fixture: World) -> list[Task]:
    """Let a request leave in two ways."""
    return [hook_calls.leaving(fixture, 0), hook_calls.leaving(fixture, 0, TaskKind.ABORTED)]


def left_and_grown(fixture: World) -> list[Task]:
    """Give blocks to a request that leaves."""
    return [hook_calls.leaving(fixture, 1), growing(fixture)]


def grown_and_left(fixture: World) -> list[Task]:
    """Let a request leave that gets blocks."""
    return [growing(fixture), hook_calls.leaving(fixture, 1)]


def grown_twice(fixture: World) -> list[Task]:
    """Give blocks twice."""
    one = growing(fixture)
    return [one, structs.replace(one, first_block=one.first_block + 1)]


def entered_twice_after_leaving(fixture: World) -> list[Task]:
    """Enter a slot twice that is left."""
    return [hook_calls.leaving(fixture, 0), *[hook_calls.entering(fixture, 0) for _ in range(2)]]


def entered_and_left(fixture: World) -> list[Task]:
    """Let a request leave that enters in the same batch."""
    one = entering(fixture)
    return [one, Task(TaskKind.ABORTED, one.slot, one.request)]


def moved(fixture: World) -> list[Task]:
    """Let a request leave one slot and enter another."""
    gone = hook_calls.leaving(fixture, 0)
    return [gone, structs.replace(hook_calls.entering(fixture, FREE), request=gone.request)]


TWICE = (left_after_entering, left_twice, left_and_grown, grown_and_left, grown_twice, entered_twice_after_leaving,
         entered_and_left, moved)  # fmt: skip


@guarantee(8, also=(9, 19))
@pytest.mark.parametrize("what", TWICE, ids=lambda what: what.__name__)
def test_g08_tasks_that_contradict_each_other_are_refused(kit: Kit, what: Callable[[World], list[Task]]) -> None:
    """Each is sound by itself; the last one is the problem, or the one before it that it contradicts."""
    fixture = hook_calls.working(kit)
    for before in ([], [hook_calls.entering(fixture, FREE + 1)]):
        error = refuse(fixture, [*before, *what(fixture)])
        assert not [text for text in error.problems if before and "task 0 " in text], f"a sound task: {error.problems}"
    fixture.output(fixture.step(range(hook_calls.ENTERED)))
    fixture.check("the output after refusals")


@guarantee(8, also=(12, 19))
@pytest.mark.parametrize("form", [list, TaskBatch.of], ids=["list", "batch"])
def test_g08_a_refused_batch_is_no_submission_and_leaves_no_trace(kit: Kit, form: Callable[[list[Task]], Any]) -> None:
    """On a held stream, where it can be held; then drafts, the output and the mended batch go as if it had not been."""
    fixture = hook_calls.working(kit)
    fixture.poke({"sampled_token_ids": 30 + np.arange(SIZES.num_slots)})
    step = fixture.advance(range(hook_calls.ENTERED))
    mended = [hook_calls.leaving(fixture, 0), hook_calls.entering(fixture, FREE), growing(fixture)]
    wrong = [*mended[:2], structs.replace(mended[2], blocks=[-5])]
    with kit.held(fixture.stream, "a batch that is refused"):
        before = fixture.bound.counters()  # a device may hold a stream by work of its own
        call = {"state": fixture.state, "tasks": form(wrong), "stream": fixture.stream}
        assert_raises(InvalidBatch, lambda: fixture.bound.insert_tasks(**call), "a batch with a negative block")
        cost = fixture.bound.counters() - before
    assert (cost.submissions, cost.host_waits) == (0, 0), f"a refused batch cost {cost}"
    fixture.check("a refused batch")
    arrive(assert_no_error(lambda: fixture.propose({0: [7, 8], 1: [9]}), "drafts after a refused batch"))
    fixture.output(step)
    arrive(assert_no_error(lambda: fixture.insert(mended), "the batch without what was wrong"))
    fixture.check("the batch without what was wrong")


LIMITS = StateConfig(
    num_slots=4, max_model_len=12, block_size=3, max_draft_tokens=2, max_logprobs=2, max_eos=2, max_stop_sequences=2,
    max_stop_length=3, max_bad_words=2, vocab_size=30,
)  # fmt: skip
FULL = SamplingParams(
    max_tokens=9, logprobs=2, eos_token_ids=(29, 0), stop_sequences=((29, 0, 1), (2, 3, 29)), bad_words=(29, 0)
)
PROMPT = (29, 0, 5, 6, 7, 8, 9, 10, 11, 12)
ABOVE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one token more": ({"prompt": (*PROMPT, 13, 14)}, {}),
    "a token outside the vocabulary": ({"prompt": (30,)}, {}),
    "one alternative more": ({}, {"logprobs": 3}),
    "one end token more": ({}, {"eos_token_ids": (1, 2, 3)}),
    "one stop sequence more": ({}, {"stop_sequences": ((1,), (2,), (3,))}),
    "a stop sequence of one token more": ({}, {"stop_sequences": ((1, 2, 3, 4),)}),
    "one bad word more": ({}, {"bad_words": (1, 2, 3)}),
}
"""Values one above their limits, of the request and of its parameters."""


@guarantee(8, also=(9, 21))
def test_g08_what_is_at_its_limit_goes_in_and_what_is_above_does_not(kit: Kit) -> None:
    """A request above a limit is refused at its admission, and takes no other along."""
    fixture = World(kit, LIMITS)
    for what, (changes, params) in ABOVE.items():
        given: dict[str, Any] = {"request_id": "above", "prompt": PROMPT, "params": replace(FULL, **params), **changes}
        error = assert_raises(InvalidValue, lambda: fixture.state.admit(Request(**given)), what)  # noqa: B023
        assert "above" in str(error), f"the error does not name the request: {error}"
        assert error.cure, f"{error} names no cure"
    blocks = [*range(LIMITS.max_blocks)]
    one = [fixture.admit(Request(fixture.new_name(), PROMPT[: 10 - (at == 1)], FULL)) for at in range(3)]
    tasks = [
        Task(TaskKind.PREFILL, 3, one[0], 0, 10, blocks),
        Task(TaskKind.REMOTE_PREFILL, 0, one[1], 9, 0, blocks, first_token=29, drafts=[29, 0]),
        Task(TaskKind.PREFILL, 2, one[2], 9, 1, blocks),
    ]
    beyond: list[dict[str, Any]] = [{"blocks": [*blocks, 4]}, {"drafts": [1, 2, 3]}, {"num_scheduled_tokens": 2}]
    for at, change in enumerate(beyond):
        wrong = [structs.replace(task, **change) if number == at else task for number, task in enumerate(tasks)]
        error = refuse(fixture, wrong)
        assert all(f"task {at} " in text for text in error.problems), f"{change} of task {at}: {error.problems}"
    arrive(assert_no_error(lambda: fixture.insert(tasks), "a batch whose requests are at every limit"))
    fixture.check("requests at every limit")
