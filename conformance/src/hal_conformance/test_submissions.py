"""``insert_tasks``: submissions do not grow with requests or fields (G10); counts, not times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hal_core.contract.counters import Counters
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import StateConfig
from hal_core.slots.tasks import Task, TaskKind
from hypothesis import strategies as st

from .draw.requests import sizes
from .fixtures.batches import ALL, draw_batch
from .fixtures.hook_cases import RICH
from .fixtures.many import MANY, blocks, handoff, prefill, request
from .fixtures.stepping import run_step
from .fixtures.world import World
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .harness.reached import Reached
from .kit import Draw, Kit, examples

COUNTS = (1, 65, 130, 512)
"""Requests of one batch: some take more threads than a wavefront or two have."""
A_CALL = 2
"""Submissions (copies plus launches) that one call may make for each staging block that it fills."""


def entering(fixture: World, slots: range, *, rich: bool) -> list[Task]:
    """Return a task with a request for each slot; rich ones use every field."""
    params = RICH if rich else SamplingParams(max_tokens=9)
    requests = [fixture.admit(Request(fixture.new_name(), [1, 2, 3], params, [4] if rich else [])) for _ in slots]
    return [Task(TaskKind.PREFILL, slot, request, 0, 3, [0, 1]) for slot, request in zip(slots, requests, strict=True)]


def spent(fixture: World, tasks: list[Task]) -> Counters:
    """Return the cost of one insertion, by the device's own counters."""
    before = fixture.bound.counters()
    ticket = fixture.insert(tasks)
    counted = fixture.bound.counters() - before
    arrive(ticket)
    return counted


@guarantee(10, requires="fused_scatter")
def test_g10_submissions_grow_with_neither_requests_nor_fields(kit: Kit) -> None:
    fixture = World(kit, StateConfig(num_slots=64, max_model_len=32, block_size=2))
    costs = {
        "one plain request": spent(fixture, entering(fixture, range(1), rich=False)),
        "one request that uses every field": spent(fixture, entering(fixture, range(1, 2), rich=True)),
        "60 plain requests": spent(fixture, entering(fixture, range(2, 62), rich=False)),
    }
    told = {what: cost.submissions for what, cost in costs.items()}
    assert max(told.values()) <= A_CALL, f"submissions a call: {told}, but each should be at most {A_CALL}"
    waits = {what: cost.host_waits for what, cost in costs.items()}
    assert not any(waits.values()), f"host waits a call: {waits}, but each should be 0"
    fixture.check("insertions of one and of many requests")


@guarantee(10, requires="fused_scatter")
@examples(0.5)
def test_g10_any_batch_is_at_most_two_submissions(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"))
    for _ in range(2):
        cost = spent(fixture, draw_batch(draw, fixture, ALL))
        assert cost.submissions <= A_CALL, f"{cost.submissions} submissions for one batch, but at most {A_CALL} are due"
        assert cost.host_waits == 0, f"the host waited {cost.host_waits} times for the device during one insertion"
        fixture.output(run_step(draw, fixture))


@guarantee(10, requires="probe_counts")
@examples(0.5)
def test_g10_the_devices_own_counters_agree_with_a_count_below_it(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"))
    below = kit.device.probe_counts()  # type: ignore[attr-defined]  # the seam that `requires` asks for
    own = kit.bound.counters()
    fixture.enter(draw_batch(draw, fixture, least=1))
    arrive(fixture.save(run_step(draw, fixture)))
    seen = kit.device.probe_counts() - below  # type: ignore[attr-defined]
    said = kit.bound.counters() - own
    for name in ("submissions", "uploads", "launches", "copies_out"):
        got, should = getattr(said, name), getattr(seen, name)
        assert got == should, f"counters() says {got} {name}, but {should} reached the driver"


@guarantee(10, requires=("fused_scatter", "async_h2d", "can_hold_stream"))
@examples(0.5)
def test_g10_an_insertion_does_not_wait_for_the_device(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"))
    size = draw(st.integers(1, 3), "batches")
    tickets = []
    with kit.held(fixture.stream):
        for _ in range(size):
            tickets.append(fixture.insert(draw_batch(draw, fixture, (TaskKind.PREFILL, TaskKind.MORE_BLOCKS))))
    for ticket in tickets:
        arrive(ticket)
    fixture.check("insertions into a held stream")


# -- at the sizes of production ----------------------------------------------------------------------------------------


def cost(fixture: World, tasks: Sequence[Task], what: str) -> Counters:
    """Return the cost of an insertion by the device's own counters, which must have counted it as the driver has."""
    __tracebackhide__ = True
    probe = None if fixture.kit.missing(("probe_counts",)) else fixture.device.probe_counts  # type: ignore[attr-defined]
    before, below = fixture.bound.counters(), probe() if probe else None
    ticket = fixture.insert(tasks)
    spent = fixture.bound.counters() - before
    arrive(ticket)
    if probe:
        seen = (probe() - below).submissions
        assert seen == spent.submissions, (
            f"{what}: counters() says {spent.submissions} submissions, the driver had {seen}"
        )
    later = fixture.bound.counters() - before
    assert spent.submissions >= 1, f"{what} wrote to the device, but counters() has {spent.submissions} submissions"
    assert spent.submissions <= A_CALL, f"{what}: {spent.submissions} submissions, but at most {A_CALL} are due"
    assert spent.uploads + spent.launches == spent.submissions, (
        f"{what}: {spent.uploads} uploads and {spent.launches} launches are not {spent.submissions} submissions"
    )
    assert spent.host_waits == 0, f"{what}: the host waited {spent.host_waits} times for the device"
    assert later.submissions == spent.submissions, (
        f"{what}: {later.submissions - spent.submissions} submissions came late"
    )
    return spent


@guarantee(10, requires="fused_scatter")
def test_g10_every_kind_of_batch_is_counted_and_large_ones_cost_the_same(kit: Kit) -> None:
    fixture, reached = World(kit, MANY), Reached(kind.name for kind in TaskKind)
    for turn, count in enumerate(COUNTS):
        slots = np.random.default_rng(turn).permutation(MANY.num_slots)[:count].tolist()
        entering = [request(fixture, slot) for slot in slots]
        halves = [
            prefill(fixture, slot, one, max(1, one.total // 2)) for slot, one in zip(slots, entering, strict=True)
        ]
        cost(fixture, halves, f"{count} requests entering")
        chunks = [
            Task(TaskKind.PREFILL_CHUNK, slot, one, half.num_scheduled_tokens, one.total - half.num_scheduled_tokens,
                 blocks(MANY, 4 * (-(-one.total // 4) - len(half.blocks)), slot), len(half.blocks))
            for slot, one, half in zip(slots, entering, halves, strict=True) if one.total > half.num_scheduled_tokens
        ]  # fmt: skip
        fixture.put({"seq_lens_this_time": np.zeros(MANY.num_slots), "seq_lens_encoder": np.zeros(MANY.num_slots)})
        if chunks:
            cost(fixture, chunks, f"{len(chunks)} chunks")
        going = [Task(TaskKind.MORE_BLOCKS, slot, fixture.model.residents[slot].admitted, blocks=[1, 2],
                      first_block=fixture.model.residents[slot].blocks) for slot in slots]  # fmt: skip
        cost(fixture, going, f"{count} requests with more blocks")
        kind = TaskKind.PREEMPTED if turn % 2 else TaskKind.ABORTED
        cost(fixture, fixture.leaving(slots, kind), f"{count} requests leaving")
        fixture.output(fixture.step(slots))
        cost(fixture, [handoff(fixture, slot, request(fixture, slot)) for slot in slots], f"{count} handoffs")
        kind = TaskKind.ABORTED if turn % 2 else TaskKind.PREEMPTED
        mixed = [
            *fixture.leaving(slots, kind),
            *(prefill(fixture, slot, request(fixture, slot + 1)) for slot in slots),
        ]
        cost(fixture, mixed, f"{count} requests leaving and as many entering")
        cost(
            fixture,
            fixture.leaving(slots, TaskKind.ABORTED if kind is TaskKind.PREEMPTED else TaskKind.PREEMPTED),
            "all leave",
        )
        fixture.output(fixture.step(slots))
        for task in (*halves, *chunks, *going, *mixed):
            reached.note(task.kind.name)
        reached.note("REMOTE_PREFILL")
        fixture.check(f"batches of {count}")
    reached.check()


@guarantee(10, requires=("fused_scatter", "async_h2d", "can_hold_stream"))
def test_g10_a_large_insertion_does_not_wait_for_the_device(kit: Kit) -> None:
    fixture = World(kit, MANY)
    tasks = [prefill(fixture, slot, request(fixture, slot)) for slot in range(512)]
    with kit.held(fixture.stream):
        before = fixture.bound.counters()
        tickets = [fixture.insert(tasks[low:high]) for low, high in ((0, 1), (1, 66), (66, 512))]
        waited = (fixture.bound.counters() - before).host_waits
        done = [ticket.done() for ticket in tickets]
    assert not waited, f"the host waited {waited} times for the device"
    assert not any(done), f"tickets answer done={done} while their stream is held"
    for ticket in tickets:
        arrive(ticket)
    fixture.check("512 requests entered on a held stream")
