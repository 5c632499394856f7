"""``insert_tasks`` into a state with companions: the same requests in their own slots (G9), in one call (G10)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hal_core.errors import HalError, TicketTimeout
from hal_core.group import ALONE, Group
from hal_core.slots.admission import Request, SamplingParams, admit
from hal_core.slots.declared import Companion, StateField
from hal_core.slots.fields import StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind
from hypothesis import strategies as st

from .draw.requests import sizes
from .fixtures.batches import ALL, LEAVE, draw_batch, text_of
from .fixtures.stepping import free_ended, run_step
from .fixtures.world import World
from .harness import backdoor
from .harness.asserts import assert_raises
from .harness.backdoor import arrive
from .harness.groups import FOLLOWER
from .harness.guarantees import guarantee
from .harness.waiters import A_WHILE
from .kit import Draw, Kit, examples
from .liars import faults
from .test_faults import under
from .test_readers import step_held
from .test_submissions import A_CALL

NAMES = ("proposer", "other", "third")


FIXED = StateConfig(num_slots=4, max_model_len=24, block_size=4, max_draft_tokens=2, max_logprobs=0)


def entering(fixture: World, slots: Sequence[int]) -> list[Task]:
    """New requests of three tokens for some slots."""
    return [fixture.entering(slot, [1, 2, 3]) for slot in slots]


@guarantee(9, also=(8, 26))
def test_g09_a_release_frees_the_slots_of_every_companion(kit: Kit) -> None:
    """Every slot is held; those of two requests are released, and two new requests take them."""
    fixture = World(kit, FIXED, companions=NAMES[:2])
    fixture.enter(entering(fixture, range(FIXED.num_slots)))
    for turn in range(2):
        fixture.release([1, 2])
        held = {resident.admission_id for resident in fixture.model.residents.values()}
        for other in fixture.others:
            live = {*other.state.host_table.live}
            assert live == held, f"requests {held} hold slots after a release, but {live} in {other.state.name!r}"
        tasks = entering(fixture, [1, 2])
        fixture.enter(tasks, "requests that enter released slots")
        fixture.check(f"requests that entered released slots, turn {turn}")


@guarantee(9, also=(11, 12, 18))
@examples()
def test_g09_one_insertion_serves_a_state_and_its_companions(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"), companions=NAMES[: draw(st.integers(1, 2), "companions")])
    for _ in range(draw(st.integers(1, 3), "rounds")):
        tasks = draw_batch(draw, fixture, ALL)
        fixture.enter(tasks)
        fixture.check(f"insert_tasks({text_of(tasks)})")
        fixture.output(run_step(draw, fixture))
        fixture.check("a step of the target, and its output")
        free_ended(fixture)


@guarantee(9, also=(11, 12))
def test_g09_every_kind_of_task_reaches_each_of_three_companions(kit: Kit) -> None:
    """In batches of one kind, and then of several; requests get chunks and blocks more than once."""
    fixture = World(kit, FIXED, companions=NAMES)
    requests = [
        fixture.admit(Request(fixture.new_name(), [*range(12)], SamplingParams(max_tokens=9))) for _ in range(5)
    ]

    def batch(what: str, *tasks: Task) -> None:
        fixture.enter([*tasks])
        fixture.check(what)

    def more(slot: int, first: int, ids: Sequence[int]) -> Task:
        return Task(TaskKind.MORE_BLOCKS, slot, requests[slot], blocks=ids, first_block=first)

    batch("requests that enter", *[Task(TaskKind.PREFILL, at, requests[at], 0, 4, [at]) for at in range(3)])
    handed = Task(TaskKind.REMOTE_PREFILL, 3, requests[3], 12, 0, [7, 8, 9], first_token=5, drafts=[6])
    batch("a handoff", handed)
    batch("more blocks for some", more(0, 1, [11, 12]), more(3, 3, [13]))
    batch("more blocks once more", more(0, 3, [14]), more(3, 4, [15]))
    fixture.put({name: np.zeros(FIXED.num_slots) for name in ("seq_lens_this_time", "seq_lens_encoder")})
    batch("a chunk", Task(TaskKind.PREFILL_CHUNK, 1, requests[1], 4, 4, [21], 1))
    leaving = [Task(kind, slot, requests[slot]) for slot, kind in ((0, LEAVE[0]), (3, LEAVE[1]))]
    batch("requests that leave, enter and grow", *leaving, Task(TaskKind.PREFILL, 0, requests[4], 0, 8, [31, 32]),
          more(1, 2, [33]), more(2, 1, [34]))  # fmt: skip


@guarantee(10, requires="fused_scatter", also=(9, 11))
@examples(0.5)
def test_g10_companions_take_no_submission_of_their_own(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"), companions=NAMES[:2])
    for kinds in ((TaskKind.PREFILL,), ALL):
        before = fixture.bound.counters()
        tasks = draw_batch(draw, fixture, kinds, least=1)
        ticket = fixture.insert(tasks)
        cost = fixture.bound.counters() - before
        arrive(ticket)
        assert cost.submissions <= A_CALL, (
            f"{cost.submissions} submissions for three states, but at most {A_CALL} are due"
        )
        fixture.check(f"insert_tasks({text_of(tasks)})")
        fixture.output(run_step(draw, fixture))
        free_ended(fixture)


@guarantee(28, requires=("async_h2d", "can_hold_stream", "overlapped_update"), also=(9,))
@pytest.mark.parametrize("how", ["enters", "leaves", "gets blocks"])
def test_g28_an_insertion_waits_for_a_companions_last_reader(kit: Kit, how: str) -> None:
    """A proposer's step runs on a stream of its own, on slots of its own."""
    fixture = World(kit, FIXED, companions=NAMES[:2])
    fixture.enter(entering(fixture, [0, 1]))
    left, more = [fixture.model.residents[slot].admitted for slot in (0, 1)]
    for other in fixture.others:
        first, second = kit.device.stream(), kit.device.stream()
        at = fixture.others.index(other)
        tasks = {
            "enters": lambda at: entering(fixture, [2 + at]),
            "leaves": lambda at: [Task(TaskKind.PREEMPTED, at, (left, more)[at])],
            "gets blocks": lambda at: [Task(TaskKind.MORE_BLOCKS, 1, more, blocks=[8 + at], first_block=1 + at)],
        }[how](at)
        with kit.held(first, "an insertion beside a companion's held step") as latch:
            step = Step(50, {other.state.name: range(FIXED.num_slots)})  # type: ignore[dict-item]
            call = {"state": other.state, "step": step, "stream": first}
            stepped = step_held(kit, latch, lambda: fixture.bound.update_inputs(**call))  # type: ignore[arg-type]  # noqa: B023
            fixture.stream = second
            inserted = fixture.insert(tasks)
            why = f"synchronize of an insertion's stream while a step of companion {other.state.name!r} is held"
            assert_raises(TicketTimeout, lambda: second.synchronize(A_WHILE), why)  # noqa: B023
            assert not inserted.done(), f"an insertion is done, but a step of companion {other.state.name!r} is held"
        arrive(stepped)
        arrive(inserted)


@guarantee(26, also=(8, 9))
def test_g26_an_insertion_that_fails_books_nothing_in_companions(kit: Kit) -> None:
    with under(kit, faults.FailingWrites) as (laid, fuse):
        fixture = World(laid, FIXED, companions=NAMES[:2])
        fixture.enter(entering(fixture, [1]))
        tasks = entering(fixture, [0, 3])
        before = [dict(other.state.host_table.live) for other in fixture.others]
        fuse.at = 1
        call = {"state": fixture.state, "tasks": tasks, "stream": fixture.stream}
        assert_raises(faults.CopyFailed, lambda: fixture.bound.insert_tasks(**call), "an insertion, refused")  # type: ignore[arg-type]
        after = [dict(other.state.host_table.live) for other in fixture.others]
        assert after == before, f"an insertion failed, and companions hold {after}, not {before}"
        fixture.check("an insertion that the driver refused")
        fixture.enter(tasks, "the same insertion again")
        fixture.check("the same insertion again")


@guarantee(18, also=(9,))
@pytest.mark.parametrize("group", [ALONE, FOLLOWER], ids=["first rank", "another rank"])
def test_g18_companions_are_cleaned_on_every_rank(kit: Kit, group: Group) -> None:
    """Fields that a step reports are cleaned in every state, also if this rank sends no record."""
    fixture = World(kit, FIXED, companions=NAMES[:2])
    fixture.enter(entering(fixture, [0, 1, 2]))
    gone = [Task(kind, slot, fixture.model.residents[slot].admitted) for slot, kind in enumerate(LEAVE)]
    fixture.enter(gone)
    step = fixture.advance(range(FIXED.num_slots), group=group)
    arrive(fixture.save(step))
    fixture.check("the output of a step that requests left")


def booked(fixture: World) -> list[tuple[dict[int, int], list[object], list[int]]]:
    """Return the host's entries of a state and each of its companions: slots, requests, slots that were left."""
    tables = [one.host_table for one in (fixture.state, *fixture.state.companions)]
    return [(dict(one.live), [*one.requests], sorted({*one.preempted, *one.aborted})) for one in tables]


@guarantee(8, also=(9, 26))
@pytest.mark.parametrize("why", ["a held slot", "an unknown request", "a request without the companion's fields"])
def test_g08_a_refused_batch_books_nothing_in_companions(kit: Kit, why: str) -> None:
    """Neither those before the companion that refuses nor those after it; the mended batch gets the same slots."""
    own = StateField("kit_own", "int32", value=None)
    fixture = World(kit, FIXED, companions=["first", Companion("second", [own]), "third"])
    fixture.enter(entering(fixture, [1]))
    (inside,) = fixture.model.residents.values()
    good = entering(fixture, [0, 3])
    bare = admit(Request("bare", [1, 2, 3], SamplingParams(max_tokens=9)), fixture.state.layout)
    bad = {
        "a held slot": Task(TaskKind.PREFILL, 1, entering(fixture, [2])[0].request, 0, 3, [1]),
        "an unknown request": Task(TaskKind.ABORTED, 2, good[1].request),
        "a request without the companion's fields": Task(TaskKind.PREFILL, 2, bare, 0, 3, [2]),
    }[why]
    leaving = Task(TaskKind.PREEMPTED, 1, inside.admitted)
    before, was = booked(fixture), backdoor.read(fixture.device, fixture.state.memory, fixture.stream)
    batch = [*good, bad] if bad.slot == 1 else [*good, leaving, bad]
    call = {"state": fixture.state, "tasks": batch, "stream": fixture.stream}
    assert_raises(HalError, lambda: fixture.bound.insert_tasks(**call), f"a batch with {why}")  # type: ignore[arg-type]
    after, now = booked(fixture), backdoor.read(fixture.device, fixture.state.memory, fixture.stream)
    assert after == before, f"a batch with {why} was refused, and the host has booked {after}, before {before}"
    changed = np.flatnonzero(now != was)
    assert not len(changed), f"a batch with {why} was refused, and {len(changed)} bytes of the states have changed"
    fixture.enter([*good, leaving])
    fixture.check("the batch without what was wrong")
    for companion, (live, *_), (first, *_) in zip(
        fixture.state.companions, booked(fixture)[1:], before[1:], strict=True
    ):
        held = len(set(live.values()))
        assert held == len(live) == len(first) + 1, f"companion {companion.name!r} holds {live}, before {first}"
