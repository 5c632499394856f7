"""Fields that a worker declares: inserted, reset, kept, copied out and broadcast as those of the slot table."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hal_core.slots.declared import Companion, StateField
from hypothesis import strategies as st

from .draw.fields import draw_fields
from .draw.requests import sizes
from .fixtures.batches import ALL, ENTER, LEAVE, draw_batch, told
from .fixtures.fake_group import PAIR, can_fake_group, fake_source
from .fixtures.stepping import draw_proposal, draw_sampling, draw_step, free_ended, run_step
from .fixtures.world import World
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .kit import Draw, Kit, examples
from .test_companions import Beside
from .test_submissions import A_CALL


def drawn(kit: Kit, draw: Draw) -> World:
    """A state with declared fields: the worker's (``--fields``), or some."""
    return World(kit, draw(sizes(most_slots=4), "sizes"), fields=kit.fields or draw_fields(draw))


@guarantee(9, also=(11,))
@examples()
def test_g09_declared_fields_have_the_requests_values(kit: Kit, draw: Draw) -> None:
    fixture = drawn(kit, draw)
    for _ in range(draw(st.integers(1, 3), "rounds")):
        tasks = draw_batch(draw, fixture, ALL)
        fixture.enter(tasks)
        fixture.check(f"insert_tasks({told(tasks)})")
        fixture.output(run_step(draw, fixture))
        fixture.check("save_output")
        free_ended(fixture)


@guarantee(11, also=(9,))
@examples()
def test_g11_declared_fields_are_reset_unless_they_are_kept(kit: Kit, draw: Draw) -> None:
    fixture = drawn(kit, draw)
    for kinds in (ENTER, LEAVE, ENTER, (*ENTER, *LEAVE)):
        tasks = draw_batch(draw, fixture, kinds, least=1)
        fixture.enter(tasks)
        fixture.check(f"insert_tasks({told(tasks)})")
        fixture.output(run_step(draw, fixture))
        free_ended(fixture)


@guarantee(10, requires="fused_scatter")
@examples(0.5)
def test_g10_declared_fields_take_no_submission_of_their_own(kit: Kit, draw: Draw) -> None:
    fixture = drawn(kit, draw)
    before = fixture.bound.counters()
    fixture.enter(draw_batch(draw, fixture, ENTER, least=1))
    cost = fixture.bound.counters() - before
    assert cost.submissions <= A_CALL, f"{cost.submissions} submissions, but at most {A_CALL} are due"


@guarantee(9)
@examples(0.5)
def test_g09_declared_fields_are_copied_out_with_their_groups(kit: Kit, draw: Draw) -> None:
    fixture = drawn(kit, draw)
    fixture.enter(draw_batch(draw, fixture, ENTER, least=1))
    state, inputs = fixture.state, fixture.state.layout.groups["step_input"]
    ranges = {"step_input": inputs, "output": state.output_range(topk=False)}
    ranges["output_topk"] = state.output_range(topk=True)
    copied = fixture.bound.copy_out(memory=state.memory, parts=[*ranges.values()], stream=fixture.stream)
    arrive(copied)
    for (group, part), data in zip(ranges.items(), copied.data, strict=True):
        columns = state.columns(data, part)
        for name in [field.name for field in fixture.fields if group in field.groups.split()]:
            should = fixture.model.cells[name]
            assert name in columns, f"{name} of {group} is not copied out with it, as {sorted(columns)} are"
            got = columns[name]
            assert got.tobytes() == should.tobytes(), f"{name} is copied out as {got.tolist()}, not {should.tolist()}"


@guarantee(12)
@examples(0.5)
def test_g12_declared_fields_of_the_output_are_in_the_mirror(kit: Kit, draw: Draw) -> None:
    fixture = drawn(kit, draw)
    inside = [field.name for field in fixture.fields if {"output", "broadcast"} & {*field.groups.split()}]
    assert {*inside} <= fixture.state.mirror.keys(), (
        f"the mirror has {sorted(fixture.state.mirror)}, and not all of {inside}"
    )
    fixture.enter(draw_batch(draw, fixture, ENTER, least=1))
    step = draw_step(draw, fixture)
    draw_sampling(draw, fixture, step)
    fixture.run(step)
    draw_proposal(draw, fixture)
    should = fixture.mirrored()
    fixture.take(fixture.save(step))
    fixture.check_mirror(should, "a step was taken")


@guarantee(13)
@examples(0.5)
def test_g13_declared_fields_of_broadcast_are_in_the_slice(kit: Kit, draw: Draw) -> None:
    if not can_fake_group(kit):
        pytest.skip("the hook is the device's own; test_broadcast_slice.py runs it among ranks")
    fixture = World(kit, draw(sizes(), "sizes"), fields=draw_fields(draw, groups=("broadcast",)))
    part, layout = fixture.state.broadcast_range(), fixture.state.layout
    for field in fixture.fields:
        place = layout.fields[field.name]
        end = place.offset + place.stride * fixture.sizes.num_slots
        assert part.offset <= place.offset < end <= part.end, f"{field.name} lies outside the slice"
    with fake_source(fixture):
        arrive(fixture.bound.broadcast_tokens(state=fixture.state, group=PAIR, stream=fixture.stream))
    fixture.check("broadcast_tokens")


@guarantee(9, also=(11,))
@examples(0.5)
def test_g09_a_companion_has_its_own_fields_and_may_have_the_targets_slots(kit: Kit, draw: Draw) -> None:
    fields = draw_fields(draw, groups=("", "step_input"))
    for same in (False, True):
        check_companion(kit, draw, fields, same=same)


def check_companion(kit: Kit, draw: Draw, fields: Sequence[StateField], *, same: bool) -> None:
    """Compare a companion with declared fields, and with the target's slots if ``same``, with its model."""
    fixture = World(kit, draw(sizes(), "sizes"), beside=[Companion("proposer", fields, same_slots=same)])
    fixture.extra = tuple([field for field in fields if field.value == "extra"])
    other = Beside(fixture, 0, fields)
    for _ in range(draw(st.integers(1, 3), "rounds")):
        tasks = draw_batch(draw, fixture, ALL)
        fixture.enter(tasks)
        other.inserted(tasks)
        entered = {task.request.admission_id: task.slot for task in tasks if task.kind in ENTER}
        if same:
            assert entered.items() <= other.slots.items(), f"slots are {other.slots}, but should be {entered}"
        fixture.check(f"insert_tasks({told(tasks)})")
        other.check(f"insert_tasks({told(tasks)})")
        fixture.output(run_step(draw, fixture))
        free_ended(fixture)
        other.model.clean_up(range(fixture.sizes.num_slots))
        other.follow_releases()
