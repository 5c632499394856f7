"""``set_drafts`` beside other work: another stream, a held step, a driver that refuses, a slot that is used again."""

from __future__ import annotations

from hal_core.errors import TicketTimeout
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.tasks import Task, TaskKind

from .harness.asserts import assert_no_error, assert_raises
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .harness.waiters import A_WHILE
from .kit import Kit
from .liars import faults
from .test_drafts import hand, running, stepped
from .test_faults import under
from .test_readers import update_held

OVERLAP = ("async_h2d", "can_hold_stream", "overlapped_update")


@guarantee(28, requires=OVERLAP, also=(12,))
def test_g28_drafts_on_another_stream_come_after_their_held_step(kit: Kit) -> None:
    """The step resets drafts, and what the next one feeds: drafts written before it would be gone."""
    rig, _ = running(kit)
    first, second = kit.device.stream(), kit.device.stream()
    rig.stream = first
    with kit.held(first, "set_drafts on another stream than its step's") as latch:
        advanced = update_held(rig, latch, (0, 1, 2))
        rig.stream = second
        written = rig.propose({0: [5, 6], 1: []})
        assert not advanced.done(), "a step on a held stream is done"
        why = "synchronize of the stream of drafts whose step is held"
        assert_raises(TicketTimeout, lambda: second.synchronize(A_WHILE), why)
        assert not written.done(), "drafts are done, but the step that they follow is held"
    arrive(advanced)
    arrive(written)
    rig.check("drafts that were handed over on another stream while their step was held")


@guarantee(12, also=(8, 26))
def test_g12_drafts_that_the_driver_refuses_leave_no_trace(kit: Kit) -> None:
    """They may be handed over again, or left out: a plain step has nothing to verify."""
    for again in (True, False):
        with under(kit, faults.FailingWrites) as (laid, fuse):
            rig, last = running(laid)
            fuse.at = 1
            assert_raises(faults.CopyFailed, lambda: hand(rig, last, {0: [5, 6], 1: [7]}), "drafts, refused")  # noqa: B023
            rig.check("drafts that the driver refused")
            if again:
                assert_no_error(lambda: arrive(rig.propose({0: [8], 1: [9, 4]})), "drafts handed over again")  # noqa: B023
                rig.check("drafts handed over after the driver refused them once")
                stepped(rig, speculative=True)
            else:
                assert_no_error(lambda: stepped(rig), "a plain step after drafts that were refused")  # noqa: B023
            rig.check("the step after drafts that the driver refused")


@guarantee(12, also=(11,))
def test_g12_a_slot_that_is_used_again_has_drafts_of_its_own_request_alone(kit: Kit) -> None:
    rig, _ = running(kit)
    arrive(rig.propose({0: [5, 6], 1: [7]}))
    new = rig.admit(Request("new", [9, 8], SamplingParams(max_tokens=20)))
    gone = Task(TaskKind.PREEMPTED, 0, rig.model.residents[0].admitted)
    arrive(rig.insert([gone, Task(TaskKind.PREFILL, 0, new, 0, 2, [0])]))
    rig.check("a request in a slot whose former one held drafts")
    stepped(rig, speculative=True)
    rig.check("a step that verifies the other slot's drafts")
    arrive(rig.propose({0: [3], 1: []}))
    rig.check("drafts of the new request")
    stepped(rig, speculative=True)
    rig.check("a step that verifies them")
