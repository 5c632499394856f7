"""``set_drafts`` beside other work: another stream, a held step, a driver that refuses, a slot that is used again."""

from __future__ import annotations

import pytest
from hal_core.errors import TicketTimeout
from hal_core.memory.writes import Writes

from .fixtures.hook_cases import filled
from .fixtures.world import World
from .harness.asserts import assert_no_error, assert_raises
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .harness.waiters import A_WHILE
from .kit import Kit
from .liars import faults
from .test_device_faults import TELLS
from .test_drafts import hand, running, stepped
from .test_faults import under
from .test_readers import update_held
from .test_streams import run_beside_each
from .test_submissions import A_CALL

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


@guarantee(4, also=(1, 12))
def test_g04_drafts_are_written_in_the_order_of_their_stream(kit: Kit) -> None:
    run_beside_each(kit, "set_drafts")


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
        fixture.stream.synchronize(PATIENCE)
        view = fixture.state.view("seed")
        call = {
            "the next call": lambda: laid.bound.async_set_value(target=view, value=4, stream=fixture.stream),
            "closing": laid.bound.close,
        }[by]
        assert_raises(faults.CopyFailed, call, f"{by} after {what}, which failed unseen")
