"""Drafts set in a state (G12): the bytes written, the order of calls, every form, and other work beside them (G4, G10,
G26, G28)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hal_core.errors import InvalidValue, TicketTimeout
from hal_core.memory.writes import Writes
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import SplitRole, StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind
from hypothesis import strategies as st

from .fixtures.batches import draw_batch, draw_world
from .fixtures.hook_cases import filled
from .fixtures.stepping import draw_advance, draw_proposal, free_ended
from .fixtures.world import World
from .harness.asserts import assert_no_error, assert_raises, assert_says
from .harness.backdoor import arrive, drain
from .harness.guarantees import guarantee
from .harness.waiters import A_WHILE
from .kit import Draw, Kit, examples
from .liars import faults
from .test_device_faults import TELLS
from .test_faults import under
from .test_readers import update_held
from .test_submissions import A_CALL

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
    fixture = draw_world(draw, kit, drafts=True)
    for _ in range(3):
        step = draw_advance(draw, fixture)
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


MANY = StateConfig(num_slots=10, max_model_len=64, block_size=8, max_draft_tokens=5, max_logprobs=0)
Drafts = Mapping[int, Sequence[int]]

FORMS: dict[str, Callable[[Drafts], Any]] = {
    "lists": lambda given: {slot: list(row) for slot, row in given.items()},
    "tuples": lambda given: {slot: tuple(row) for slot, row in given.items()},
    "int64 arrays": lambda given: {slot: np.array(row, np.int64) for slot, row in given.items()},
    "int32 arrays": lambda given: {slot: np.array(row, np.int64).astype(np.int32) for slot, row in given.items()},
    "strided arrays": lambda given: {slot: np.repeat(np.array(row, np.int64), 3)[::3] for slot, row in given.items()},
    "slots of NumPy": lambda given: {np.int32(slot): list(row) for slot, row in given.items()},
    "numbers of NumPy": lambda given: {slot: [np.int64(one) for one in row] for slot, row in given.items()},
    "a mapping that is no dict": lambda given: MappingProxyType({slot: list(row) for slot, row in given.items()}),
    "slots in falling order": lambda given: {slot: list(given[slot]) for slot in sorted(given, reverse=True)},
}
TURNS: tuple[dict[int, tuple[int, ...]], ...] = (
    {0: (1, 2, 3, 4, 5), 7: (6,), 3: (), 9: (8, 9), 4: (2**31 - 1, 0)},
    {9: (3, 4, 5, 6, 7), 0: (8,)},
    {},
    {slot: tuple(range(slot, slot + 1 + slot % 5)) for slot in (2, 5, 0, 9, 1, 8, 3, 7, 6, 4)},
    {3: (), 4: ()},
    {4: (0,), 8: (1, 1, 1, 1, 1)},
)
"""The drafts of six steps: full rows, then shorter and longer ones, none, those of all slots, and those of two."""


def decoding(kit: Kit, name: str) -> World:
    """Return a state whose slots all decode."""
    fixture = World(kit, MANY, name=name)
    fixture.enter(fixture.entering(slot, [slot, 1, 2], max_tokens=50) for slot in range(MANY.num_slots))
    return fixture


def accept(fixture: World, turn: int) -> None:
    """Run a step that accepts one to three tokens of each slot, and compare its output."""
    n, most = MANY.num_slots, MANY.max_accept
    tokens = 1000 * (turn + 1) + 10 * np.arange(n)[:, None] + np.arange(most)
    fixture.put({"accept_tokens": tokens, "accept_num": 1 + (np.arange(n) + turn) % 3})
    step = fixture.advance(range(n), speculative=True)
    fixture.check(f"step {turn}")
    fixture.output(step)


@guarantee(12, also=(9, 10, 11))
@pytest.mark.parametrize("form", FORMS)
def test_g12_drafts_have_the_same_effect_in_every_form(kit: Kit, form: str) -> None:
    """Step by step, in two states by turns; the caller's arrays change once the call has returned."""
    fixtures = [decoding(kit, name) for name in ("target", "other")]
    for turn, _ in enumerate(TURNS):
        for at, fixture in enumerate(fixtures):
            accept(fixture, turn)
            rows = TURNS[(turn + at) % len(TURNS)]
            given = FORMS[form](rows)
            call = {"state": fixture.state, "step": fixture.advanced, "drafts": given, "stream": fixture.stream}
            what = f"drafts {rows} as {form}"
            before = fixture.bound.counters()
            ticket = assert_no_error(lambda: fixture.bound.set_drafts(**call), what)  # noqa: B023
            cost = (fixture.bound.counters() - before).submissions
            assert cost <= 2 or not kit.capabilities.fused_scatter, f"{what}: {cost} submissions, at most 2 are due"
            for row in given.values():
                if isinstance(row, np.ndarray):
                    row[...] = -9
            fixture.model.hand(rows)
            arrive(ticket, what)
            fixture.check(what)


@guarantee(12, also=(11,))
def test_g12_rows_of_drafts_are_their_own_requests_alone_from_turn_to_turn(kit: Kit) -> None:
    """Requests leave with full rows, others enter with fewer drafts, and get more or fewer by the next step."""
    fixture = decoding(kit, "target")
    for turn in range(5):
        accept(fixture, turn)
        fixture.draft({slot: [7 + turn] * (1 + (slot + turn) % 5) for slot in range(0, 10, 1 + turn % 2)})
        fixture.check(f"drafts of step {turn}")
        slots = [(turn + k) % 10 for k in (0, 3, 7)]
        params = SamplingParams(max_tokens=50)
        new = [fixture.admit(Request(fixture.new_name(), [slot, 5], params)) for slot in slots]
        tasks = [
            Task(TaskKind.REMOTE_PREFILL, slot, one, 2, 0, [slot], first_token=turn, drafts=[9] * ((slot + turn) % 6))
            for slot, one in zip(slots, new, strict=True)
        ]
        fixture.enter([*fixture.leaving(slots, TaskKind.ABORTED), *tasks])
        fixture.check(f"handoffs after step {turn}")


OVERLAP = ("async_h2d", "can_hold_stream", "overlapped_update")


@guarantee(10, requires="fused_scatter", also=(12,))
def test_g10_drafts_of_any_number_of_slots_are_one_submission(kit: Kit) -> None:
    spent = {}
    for count in (1, 5):
        fixture, _ = filled(kit)
        fixture.advance(range(count))
        before = fixture.bound.counters()
        ticket = fixture.propose({slot: [7, 8] for slot in range(count)})
        spent[count] = fixture.bound.counters() - before
        arrive(ticket)
        fixture.check(f"drafts of {count} slots")
    found = {count: cost.submissions for count, cost in spent.items()}
    assert 1 <= found[5] <= A_CALL, f"submissions by slots with drafts: {found}, but at most {A_CALL} are due"
    waits = {count: cost.host_waits for count, cost in spent.items()}
    assert not any(waits.values()), f"host waits by slots with drafts: {waits}, but none is due"


@guarantee(28, requires=OVERLAP, also=(12,))
def test_g28_drafts_on_another_stream_come_after_their_held_step(kit: Kit) -> None:
    """The step resets drafts, and what the next one feeds: drafts written before it would be gone."""
    fixture, _ = running(kit)
    first, second = kit.device.stream(), kit.device.stream()
    fixture.stream = first
    with kit.held(first, "set_drafts on another stream than its step's") as latch:
        advanced = update_held(fixture, latch, (0, 1, 2))
        fixture.stream = second
        written = fixture.propose({0: [5, 6], 1: []})
        assert not advanced.done(), "a step on a held stream is done"
        why = "synchronize of the stream of drafts whose step is held"
        assert_raises(TicketTimeout, lambda: second.synchronize(A_WHILE), why)
        assert not written.done(), "drafts are done, but the step that they follow is held"
    arrive(advanced)
    arrive(written)
    fixture.check("drafts that were handed over on another stream while their step was held")


@guarantee(12, also=(8, 26))
def test_g12_drafts_that_the_driver_refuses_leave_no_trace(kit: Kit) -> None:
    """They may be handed over again, or left out: a plain step has nothing to verify."""
    for again in (True, False):
        with under(kit, faults.FailingWrites) as (laid, fuse):
            fixture, last = running(laid)
            fuse.at = 1
            assert_raises(faults.CopyFailed, lambda: hand(fixture, last, {0: [5, 6], 1: [7]}), "drafts, refused")  # noqa: B023
            fixture.check("drafts that the driver refused")
            if again:
                fixture.draft({0: [8], 1: [9, 4]}, "drafts handed over again")
                fixture.check("drafts handed over after the driver refused them once")
                stepped(fixture, speculative=True)
            else:
                assert_no_error(lambda: stepped(fixture), "a plain step after drafts that were refused")  # noqa: B023
            fixture.check("the step after drafts that the driver refused")


@guarantee(12, also=(11,))
def test_g12_a_slot_that_is_used_again_has_drafts_of_its_own_request_alone(kit: Kit) -> None:
    fixture, _ = running(kit)
    fixture.draft({0: [5, 6], 1: [7]})
    fixture.enter([*fixture.leaving([0]), fixture.entering(0, [9, 8], max_tokens=20)])
    fixture.check("a request in a slot whose former one held drafts")
    stepped(fixture, speculative=True)
    fixture.check("a step that verifies the other slot's drafts")
    fixture.draft({0: [3], 1: []})
    fixture.check("drafts of the new request")
    stepped(fixture, speculative=True)
    fixture.check("a step that verifies them")


def _drafts(fixture: World) -> object:
    return fixture.propose({0: [5, 6], 1: []})


def _several(fixture: World) -> object:
    writes = Writes()
    writes.fill(fixture.state.view("next_tokens"), [0], 3)
    return fixture.bound.write(writes=writes, stream=fixture.stream)


CALLS = {"set_drafts": _drafts, "write": _several}


@guarantee(26, also=(12, *TELLS))
@pytest.mark.parametrize("by", ["the next call", "closing"])
@pytest.mark.parametrize("what", CALLS)
def test_g26_a_late_error_of_an_unawaited_draft_or_write_is_raised(kit: Kit, what: str, by: str) -> None:
    with under(kit, faults.LateWrites) as (laid, fuse):
        fixture, _ = running(laid)
        fuse.at = 1
        CALLS[what](fixture)
        if not fuse.met:
            pytest.skip("its write to one memory is no submit()")
        drain(fixture.stream)
        view = fixture.state.view("seed")
        call = {
            "the next call": lambda: laid.bound.async_set_value(target=view, value=4, stream=fixture.stream),
            "closing": laid.bound.close,
        }[by]
        assert_raises(faults.CopyFailed, call, f"{by} after {what}, which failed unseen")
