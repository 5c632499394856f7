"""``broadcast_tokens`` in one process (G14, G15)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hal_core.errors import StateUnusable
from hal_core.group import Group
from hal_core.slots.fields import StateConfig
from hal_core.slots.layout import lay_out
from hypothesis import strategies as st

from .draw.requests import sizes
from .fixtures.batches import ENTER, draw_batch
from .fixtures.state import StateFixture
from .fixtures.stepping import draw_sampling, draw_step
from .harness.asserts import assert_no_error, assert_raises, assert_says
from .harness.backdoor import PATIENCE
from .harness.guarantees import guarantee
from .kit import Draw, Kit, examples


@guarantee(15)
@examples()
def test_g15_a_group_of_one_communicates_nothing(kit: Kit, draw: Draw) -> None:
    rig = StateFixture(kit, draw(sizes(), "sizes"))
    rig.insert(draw_batch(draw, rig, ENTER, least=1)).wait(PATIENCE)
    draw_sampling(draw, rig, draw_step(draw, rig))
    rank = draw(st.integers(0, 9), "rank")
    group = Group((rank,), rank)
    before = kit.bound.counters()

    def broadcast() -> None:
        kit.bound.broadcast_tokens(state=rig.state, group=group, stream=rig.stream).wait(PATIENCE)

    assert_no_error(broadcast, f"broadcast_tokens in a group of rank {rank} alone")
    counted = kit.bound.counters() - before
    assert counted.collectives == 0, f"a group of one made {counted.collectives} collectives, but should make none"
    assert counted.submissions == 0, f"a group of one made {counted.submissions} submissions, but should make none"
    rig.check("broadcast_tokens in a group of one")


@guarantee(14)
@examples(0.5)
def test_g14_a_state_that_ranks_disagree_about_is_refused_by_every_hook(kit: Kit, draw: Draw) -> None:
    rig = StateFixture(kit, draw(sizes(), "sizes"))
    tasks = draw_batch(draw, rig, ENTER, least=1)
    rig.state.mark_unusable("rank 1 sent step 4, rank 0 step 5")
    step = rig.step([0])
    calls: dict[str, Callable[[], object]] = {
        "insert_tasks": lambda: rig.bound.insert_tasks(state=rig.state, tasks=tasks, stream=rig.stream),
        "save_output": lambda: rig.bound.save_output(state=rig.state, step=step, sink=rig.sink, stream=rig.stream),
        "broadcast_tokens": lambda: rig.bound.broadcast_tokens(state=rig.state, group=Group(), stream=rig.stream),
        "async_set_value": lambda: rig.bound.async_set_value(target=rig.state.view("seed"), value=1, stream=rig.stream),
        "update_inputs": lambda: rig.bound.update_inputs(state=rig.state, step=step, stream=rig.stream),
    }
    for hook, call in calls.items():
        error = assert_raises(StateUnusable, call, f"{hook} on a state that is unusable")
        assert_says(error, device=kit.bound.name, hook=hook)
        assert "rank 1 sent step 4" in str(error), f"{error} does not explain why the state is unusable"
    assert not rig.sink.records, "output of a state that is unusable was sent"
    rig.check("every hook was refused")


@guarantee(14)
@examples(0.5)
def test_g14_sizes_that_differ_have_digests_that_differ(kit: Kit, draw: Draw) -> None:
    size = draw(sizes(), "sizes")
    name = draw(st.sampled_from(size.__slots__), "what differs")
    other = replace(size, **{name: getattr(size, name) + 1})
    mine, theirs = lay_out(size).digest, lay_out(other).digest
    assert mine != theirs, f"{size} and {other} have one digest"
    assert mine == lay_out(StateConfig(**{field: getattr(size, field) for field in size.__slots__})).digest, (
        "no constant"
    )
