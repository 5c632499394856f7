"""``insert_tasks``: what reaches the device does not grow with requests or fields (G10); counts, not times."""

from __future__ import annotations

from hypothesis import strategies as st

from ..contract.counters import Counters
from ..slots.admission import Request, SamplingParams
from ..slots.fields import Sizes
from ..slots.tasks import Task, TaskKind
from .draw.requests import sizes
from .harness.backdoor import PATIENCE
from .harness.guarantees import guarantee
from .kit import Draw, Kit, examples
from .rigs.batches import ALL, draw_batch
from .rigs.rig import Rig
from .rigs.stepping import run_step

A_CALL = 2
"""Submissions (copies plus launches) that one call may make for each staging block that it fills."""


def entering(rig: Rig, slots: range, *, rich: bool) -> list[Task]:
    """A request for each slot; rich ones use every field."""
    params = SamplingParams(max_tokens=9)
    if rich:
        params = SamplingParams(0.5, 3, 0.9, 0.1, 7, 1.1, 0.2, 0.3, 1, 9, ((1, 2), (3,)), (4, 5), (6,), 1)
    requests = [rig.admit(Request(rig.new_name(), [1, 2, 3], params, [4] if rich else [])) for _ in slots]
    return [Task(TaskKind.PREFILL, slot, request, 0, 3, [0, 1]) for slot, request in zip(slots, requests, strict=True)]


def spent(rig: Rig, tasks: list[Task]) -> Counters:
    """What one insertion costs, by the device's own counters."""
    before = rig.bound.counters()
    ticket = rig.insert(tasks)
    counted = rig.bound.counters() - before
    ticket.wait(PATIENCE)
    return counted


@guarantee(10, requires="fused_scatter")
def test_g10_submissions_grow_with_neither_requests_nor_fields(kit: Kit) -> None:
    rig = Rig(kit, Sizes(slots=64, max_tokens=32, block_size=2))
    costs = {
        "one plain request": spent(rig, entering(rig, range(1), rich=False)),
        "one request that uses every field": spent(rig, entering(rig, range(1, 2), rich=True)),
        "60 plain requests": spent(rig, entering(rig, range(2, 62), rich=False)),
    }
    told = {what: cost.submissions for what, cost in costs.items()}
    assert max(told.values()) <= A_CALL, f"submissions a call: {told}, but each should be at most {A_CALL}"
    waits = {what: cost.host_waits for what, cost in costs.items()}
    assert not any(waits.values()), f"host waits a call: {waits}, but each should be 0"
    rig.check("insertions of one and of many requests")


@guarantee(10, requires="fused_scatter")
@examples(0.5)
def test_g10_any_batch_is_at_most_two_submissions(kit: Kit, draw: Draw) -> None:
    rig = Rig(kit, draw(sizes(), "sizes"))
    for _ in range(2):
        cost = spent(rig, draw_batch(draw, rig, ALL))
        assert cost.submissions <= A_CALL, f"{cost.submissions} submissions for one batch, but at most {A_CALL} are due"
        assert cost.host_waits == 0, f"the host waited {cost.host_waits} times for the device during one insertion"
        rig.output(run_step(draw, rig))


@guarantee(10, requires="probe_counts")
@examples(0.5)
def test_g10_the_devices_own_counters_agree_with_a_count_below_it(kit: Kit, draw: Draw) -> None:
    rig = Rig(kit, draw(sizes(), "sizes"))
    below = kit.device.probe_counts()  # type: ignore[attr-defined]  # the seam that `requires` asks for
    own = kit.bound.counters()
    rig.insert(draw_batch(draw, rig, least=1)).wait(PATIENCE)
    rig.save(run_step(draw, rig)).wait(PATIENCE)
    seen = kit.device.probe_counts() - below  # type: ignore[attr-defined]
    said = kit.bound.counters() - own
    for name in ("submissions", "uploads", "launches", "copies_out"):
        got, should = getattr(said, name), getattr(seen, name)
        assert got == should, f"counters() says {got} {name}, but {should} reached the driver"


@guarantee(10, requires=("fused_scatter", "async_h2d", "can_hold_stream"))
@examples(0.5)
def test_g10_an_insertion_does_not_wait_for_the_device(kit: Kit, draw: Draw) -> None:
    rig = Rig(kit, draw(sizes(), "sizes"))
    size = draw(st.integers(1, 3), "batches")
    tickets = []
    with kit.held(rig.stream):
        for _ in range(size):
            tickets.append(rig.insert(draw_batch(draw, rig, (TaskKind.PREFILL, TaskKind.DECODE))))
    for ticket in tickets:
        ticket.wait(PATIENCE)
    rig.check("insertions into a held stream")
