"""Drafts set in a state: the bytes written, and the allowed order of calls (G12)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_core.slots.admission import Request
from hal_core.slots.fields import SplitRole, StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind
from hypothesis import strategies as st

from .draw.requests import sizes
from .fixtures.batches import ENTER, draw_batch
from .fixtures.stepping import draw_proposal, draw_sampling, draw_step, free_ended
from .fixtures.world import World
from .harness.asserts import assert_no_error, assert_raises, assert_says
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .kit import Draw, Kit, examples

SIZES = StateConfig(num_slots=4, max_model_len=24, block_size=4, max_draft_tokens=2, max_logprobs=0)


@guarantee(12)
def test_g12_drafts_that_left_with_their_request_bind_nobody(kit: Kit) -> None:
    fixture, _ = running(kit)
    fixture.draft({0: [5, 6], 1: [7]})
    fixture.enter(fixture.leaving([0]))
    fixture.release([1])
    why = "a plain step after the slots with drafts were freed"
    assert_no_error(lambda: stepped(fixture), why)
    fixture.check(why)


@guarantee(12, also=(9,))
@examples()
def test_g12_drafts_handed_over_are_what_the_next_step_feeds(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(drafts=True), "sizes"))
    fixture.enter(draw_batch(draw, fixture, ENTER, least=1))
    for _ in range(3):
        step = draw_step(draw, fixture)
        draw_sampling(draw, fixture, step)
        fixture.run(step)
        early = draw(st.booleans(), "drafts before the output")
        if early:
            draw_proposal(draw, fixture)
            fixture.check("drafts handed over before the output")
        fixture.output(step)
        free_ended(fixture)
        fixture.enter(draw_batch(draw, fixture))
        if not early and not any(request.role is SplitRole.PREFILL for request in held(fixture)):
            draw_proposal(draw, fixture)
        fixture.check("drafts handed over")


def held(fixture: World) -> list[Request]:
    """Return the requests in the slots."""
    return [resident.request for resident in fixture.model.residents.values()]


def running(kit: Kit) -> tuple[World, Step]:
    """Return a state after its first step: slots 0 and 1 decode, slot 2 is half prefilled, slot 3 is free."""
    fixture, lengths = World(kit, SIZES), (4, 4, 2)
    fixture.insert(
        [fixture.entering(at, range(1, 5), length=length, max_tokens=20) for at, length in enumerate(lengths)]
    )
    return fixture, stepped(fixture)


def stepped(fixture: World, *, speculative: bool = False) -> Step:
    """Run one more step over slots 0 to 2, which accepts a token each."""
    arrive(fixture.sample(np.full((SIZES.num_slots, SIZES.max_accept, 1), 50), [1] * SIZES.num_slots))
    return fixture.advance([0, 1, 2], speculative=speculative)


def hand(fixture: World, step: Step, drafts: object = None) -> Any:  # noqa: ANN401 (a ticket)
    """Make only the call, without the model."""
    chosen: Any = {0: [5]} if drafts is None else drafts
    return fixture.bound.set_drafts(state=fixture.state, step=step, drafts=chosen, stream=fixture.stream)


def before_its_advance(fixture: World, last: Step) -> Step:
    """Call before the step has advanced the state."""
    return fixture.step([0, 1, 2])


def after_the_next_advance(fixture: World, last: Step) -> Step:
    """Call after another step has advanced the state."""
    stepped(fixture)
    return last


def twice(fixture: World, last: Step) -> Step:
    """Call a second time for the same step."""
    fixture.draft({1: [6]})
    return last


def before_any_step(fixture: World, last: Step) -> Step:
    """Call for a state that never advanced, with another state's step."""
    fresh = World(fixture.kit, SIZES, name="fresh")
    fixture.state, fixture.model = fresh.state, fresh.model
    return Step(last.number, {"fresh": [0]})  # type: ignore[dict-item]


OUT_OF_ORDER: Sequence[Callable[[World, Step], Step]] = (
    before_its_advance,
    after_the_next_advance,
    twice,
    before_any_step,
)


@guarantee(12)
@pytest.mark.parametrize("when", OUT_OF_ORDER, ids=lambda when: when.__name__)
def test_g12_drafts_out_of_order_are_refused_and_change_nothing(kit: Kit, when: Callable[[World, Step], Step]) -> None:
    fixture, last = running(kit)
    step = when(fixture, last)
    error = assert_raises(InvalidValue, lambda: hand(fixture, step), f"drafts {when.__name__.replace('_', ' ')}")
    assert_says(error, device=fixture.bound.name, hook="set_drafts", argument="step")
    fixture.check("drafts that were refused")


@guarantee(12)
def test_g12_a_plain_step_over_unverified_drafts_is_refused(kit: Kit) -> None:
    fixture, _ = running(kit)
    fixture.draft({0: [5, 6]})
    plain = fixture.step([0, 1, 2])
    call = {"state": fixture.state, "step": plain, "stream": fixture.stream}
    error = assert_raises(InvalidValue, lambda: fixture.bound.update_inputs(**call), "a plain step that drops drafts")  # type: ignore[arg-type]
    assert_says(error, device=fixture.bound.name, hook="update_inputs", argument="step")
    fixture.check("a step that was refused")
    stepped(fixture, speculative=True)
    fixture.check("a step that verified them")
    stepped(fixture)
    fixture.check("a plain step after it")


UNFIT: Mapping[str, object] = {
    "more than fit": {0: [1, 2, 3]},
    "no slot": {4: [1]},
    "a slot below": {-1: [1]},
    "a free slot": {3: [1]},
    "a slot that is being prefilled": {2: [1]},
    "a token below 0": {1: [-1]},
    "no token": {1: [0.5]},
    "no list": {1: 7},
    "a slot of another kind": {"0": [1]},
    "no mapping": [[1]],
}


@guarantee(12)
@pytest.mark.parametrize("what", UNFIT)
def test_g12_drafts_that_do_not_fit_are_refused_and_none_is_written(kit: Kit, what: str) -> None:
    fixture, last = running(kit)
    given = UNFIT[what]
    mixed = {0: [5], 1: [6], **given} if isinstance(given, dict) else given
    error = assert_raises(InvalidValue, lambda: hand(fixture, last, mixed), f"drafts for {what}")
    assert_says(error, device=fixture.bound.name, hook="set_drafts", argument="drafts")
    fixture.check("drafts that were refused")
    fixture.draft({0: [5, 6], 1: []})
    fixture.check("valid drafts after refused ones")


@guarantee(12)
def test_g12_a_slot_that_changed_after_the_step_takes_no_drafts_of_it(kit: Kit) -> None:
    fixture, last = running(kit)
    more = fixture.model.residents[1].admitted
    fixture.enter([*fixture.leaving([0], TaskKind.ABORTED), fixture.entering(0, [9], max_tokens=4)])
    fixture.enter([Task(TaskKind.MORE_BLOCKS, 1, more, blocks=[8], first_block=1)])
    error = assert_raises(InvalidValue, lambda: hand(fixture, last, {0: [5]}), "drafts for a request that came later")
    assert_says(error, device=fixture.bound.name, hook="set_drafts", argument="drafts")
    fixture.draft({1: [5, 6]})  # more blocks are not another request
    fixture.check("drafts for a slot that got blocks")
