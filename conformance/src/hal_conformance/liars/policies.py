"""Liars in the policy and the core's checks: batches, drafts, guards of slots, the clean-up, sending, counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.contract.capabilities import Capabilities
from hal_core.errors import InvalidBatch, SinkFull
from hal_core.memory.plan import WritePlan
from hal_core.runtime.policy import Outbox
from hal_core.slots.drafts import check_drafts
from hal_core.slots.tasks import LEAVING, TaskBatch
from hal_core.tickets import DONE, Ticket

from ..harness.groups import FOLLOWER
from .proxies import HELD
from .rows import (
    DRAFT,
    SAVE,
    Call,
    How,
    caught,
    first,
    instead,
    meanwhile,
    noted,
    register,
    row,
    then,
)

if TYPE_CHECKING:
    from hal_core.streams import Stream

# -- batches -----------------------------------------------------------------------------------------------------------


def one_by_one(call: Call) -> object:
    if isinstance(call.tasks, TaskBatch) or len(call.tasks) < 2:
        return call()
    problems: list[str] = []
    for task in call.tasks:
        try:
            call(tasks=[task])
        except InvalidBatch as error:
            problems += error.problems
    if problems:
        raise InvalidBatch(problems)
    return DONE


def of_the_first_task(call: Call) -> object:
    found = call()
    return found if any(text.startswith("task 0 ") for text in found) else []


def one_a_task(call: Call) -> object:
    kept: dict[str, str] = {}
    for text in call():
        kept.setdefault(text.split(":")[0], text)
    return [*kept.values()]


def without_those_not_held(call: Call) -> object:
    tasks = call.tasks
    if not isinstance(tasks, TaskBatch):
        admission_ids = call.state.host_table.admission_ids.tolist()
        held = {slot: admission_id for slot, admission_id in enumerate(admission_ids) if admission_id}
        tasks = [one for one in tasks if one.kind not in LEAVING or held.get(one.slot) == one.request.admission_id]
    return call(tasks=tasks)


def without_the_last(call: Call) -> object:
    if call.device.name in ("", "renamed") and not isinstance(call.tasks, TaskBatch):
        return call(tasks=call.tasks[:-1])
    return call()


def reversed_writes(call: Call) -> object:
    return call(writes=call.writes[::-1].copy())


INSERT, CHECK = "policy.insert_tasks", "check of a batch"
BATCHES = {
    "the valid part of an invalid batch goes in": row(
        "InsertsTheRest", 8, INSERT, one_by_one
    ),  # invalid tasks that are left out and reported
    "the error names the first problem alone": row(
        "FirstProblemAlone", 8, INSERT, instead(InvalidBatch, lambda error: InvalidBatch(error.problems[:1]))
    ),  # a check that stops too early
    "only the first task of a batch is checked": row(
        "ChecksOne", 8, CHECK, of_the_first_task
    ),  # a fast path with missing checks
    "only the first problem of each task is listed": row(
        "OneProblemATask", 8, CHECK, one_a_task
    ),  # the check of a task ends where it has failed
    "leaving a slot that the request does not hold is accepted, without effect": row(
        "LeavesWhatIsNotHeld", 8, INSERT, without_those_not_held
    ),  # a second abort that is accepted as harmless
    "a handoff is taken, whether its keys and values are there or not": row(
        "HandoffWithoutKeys",
        12,
        CHECK,
        lambda call: [text for text in call() if "declared present" not in text],
        seen="hal",
    ),  # a handoff whose blocks are not checked, with drafts or without
    "the policy tests for device names": row(
        "KnowsNames", 27, INSERT, without_the_last
    ),  # it drops the last task on unknown devices
    "of two writes to one place in one plan the first wins": row(
        "FirstWins", 4, "overlaps in a plan", reversed_writes
    ),  # a builder of plans that resolves overlaps in reverse
    "one submission for each request of a batch": row(
        "OneSubmissionEach",
        10,
        "insert_tasks",
        first(lambda call: call.me.count("submissions", len(call.tasks))),
        "fused_scatter",
        "FastDeploy: 32 a request",
    ),  # a loop over requests instead of staged writes
}
register(__name__, BATCHES)

# -- drafts ------------------------------------------------------------------------------------------------------------


def held_by(state: Any, *slots: int) -> dict[int, int]:  # noqa: ANN401 (a state of slots)
    return {slot: int(state.host_table.admission_ids[slot]) for slot in slots}


def in_pieces(chosen: Callable[[WritePlan, int], Sequence[int]]) -> How:
    """Return a lie: drafts are several plans; the writes ``chosen(plan, slots)`` are submitted once more, apart."""

    def lie(call: Call) -> object:
        device = call.device
        found, submit = check_drafts(call.state, call.step, call.drafts), device.submit

        def pieces(plan: WritePlan, on: Stream) -> Ticket:
            flat, ticket = plan.flat(), submit(plan, on)
            for at in chosen(flat, len(found)):
                ticket = submit(WritePlan(flat.memory, flat.writes[at : at + 1], [flat.payload]), on)
            return ticket  # type: ignore[no-any-return]

        device.submit = pieces
        try:
            return call()
        finally:
            del device.submit

    return lie


def put_back(state: Callable[[Call], Any]) -> How:
    """Return a lie: drafts that slots held before a call are in the book after it."""

    def lie(call: Call) -> object:
        held = dict(state(call).drafts.holders)
        given = call()
        state(call).drafts.holders.update(held)
        return given

    return lie


DRAFTS = {
    "drafts are taken at any time; update_inputs drops those that come before it": row(
        "DraftsAtAnyTime", 12, "order of drafts", lambda call: None, seen="hal"
    ),  # an unchecked order of calls
    "a plain step silently drops a slot's drafts": row(
        "PlainStepOverDrafts", 12, "plain step over drafts", lambda call: None
    ),  # an unchecked book of drafts
    "drafts on another stream do not wait for their step": row(
        "DraftsBesideTheirStep",
        28,
        DRAFT,
        meanwhile(lambda call: (call.state, "_readers", [])),
        (*HELD, "overlapped_update"),
    ),  # a proposer with a stream of its own
    "drafts that the driver refused count as handed over": row(
        "RefusedDraftsAreBooked",
        12,
        DRAFT,
        noted(RuntimeError, lambda call, _: setattr(call.state.drafts, "handed", call.step.number)),
    ),  # booked before they are written
    "slots keep that they hold drafts which the driver refused": row(
        "RefusedDraftsAreHeld",
        12,
        DRAFT,
        noted(RuntimeError, lambda call, _: setattr(call.state.drafts, "holders", held_by(call.state, 0, 1))),
    ),  # the same of the other half of the book
    "drafts are a submission for each slot": row(
        "DraftsApart", 10, DRAFT, in_pieces(lambda plan, slots: range(slots)), "fused_scatter"
    ),  # a loop over the slots
    "drafts are a submission for each field": row(
        "DraftsByField", 10, DRAFT, in_pieces(lambda plan, slots: range(min(2, len(plan.writes)))), "fused_scatter"
    ),  # a copy for the tokens, one for their number, one for the step's inputs
    "a released slot counts as one with drafts": row(
        "ReleasedSlotsKeepDrafts", 12, "release of slots", put_back(lambda call: call.self)
    ),  # the book of drafts is another than that of slots
    "a slot that a request has left counts as one with drafts": row(
        "LeftSlotsKeepDrafts", 12, INSERT, put_back(lambda call: call.state)
    ),  # the same of requests that leave
}
register(__name__, DRAFTS)

# -- guards of slots ---------------------------------------------------------------------------------------------------


def knowing_owners(most: int) -> How:
    """Return a lie: a write to several memories knows the first owners alone."""
    return meanwhile(lambda call: (call.writes, "owners", dict([*call.writes.owners.items()][:most])))


def join_once(call: Call) -> None:
    state, slots, stream = call.self, call.slots, call.stream
    joined = state.__dict__.setdefault("joined", set())
    for event, read in state._readers:
        if (slots is None or read is None or np.isin(slots, read).any()) and not event.done():
            pair = getattr(event, "stream_key", id(event)), getattr(stream, "stream_key", id(stream))
            if pair not in joined:
                joined.add(pair)
                stream.wait(event)


def sixty_four_readers(call: Call) -> None:
    state = call.state
    add = state.add_reader

    def short(slots: Any, event: Any) -> None:  # noqa: ANN401
        add(slots, event)
        del state._readers[:-64]

    state.add_reader = short


GUARDS = {
    "writes do not wait for the last step that reads the slot": row(
        "NoGuard", 28, "guard of slots", lambda call: None, HELD
    ),  # a freed slot that is given to a new request at once (sglang 18746)
    "a stream that has once waited for another is taken as ordered after it": row(
        "JoinedOnce", 28, "guard of slots", join_once, (*HELD, "async_update")
    ),  # it does not wait for the steps that come there later
    "a state has 64 readers at most": row(
        "OldReadersAreForgotten", 28, "register_state", then(sixty_four_readers), HELD
    ),  # the oldest leaves for the newest, whether it has passed or not
    "a write to several memories does not wait for a step": row(
        "WritesBesideTheirStep", 28, "policy.write", knowing_owners(0), (*HELD, "overlapped_update")
    ),  # it knows memories, and no state
    "a write to several memories waits for the steps that read the first of them": row(
        "FirstOwnerWaits", 28, "policy.write", knowing_owners(1), (*HELD, "async_update")
    ),  # the other memories are written beside their readers
}
register(__name__, GUARDS)

# -- the output of a step ----------------------------------------------------------------------------------------------


def reported_again(call: Call) -> object:
    before = dict(call.state.host_table.preempted)
    try:
        return call()
    except SinkFull:
        call.state.host_table.preempted.update(before)
        raise


def all_reported(call: Call) -> object:
    try:
        return call()
    finally:
        call.state.host_table.reported(range(call.state.sizes.num_slots))


def sorted_slots(call: Call) -> object:
    orders = {name: np.sort(order) for name, order in call.step.orders.items()}
    return call(step=replace(call.step, orders=orders))


def only_if_held(call: Call) -> object:
    step, state = call.step, call.state
    if step.group.is_first and not state.host_table.admission_ids[step.order(state.name)].any():
        step = replace(step, group=FOLLOWER)
    return call(step=step)


def clean_up(call: Call) -> None:
    order = call.step.order(call.state.name)
    if len(order) and int(order.min()) >= 0 and int(order.max()) < call.state.sizes.num_slots:
        call.device.submit(call.state.cleanup_plan(order), call.stream)


def copied(call: Call, sink: Any) -> Any:  # noqa: ANN401 (a ticket)
    """Save by the plugin's hook alone; the record goes to the sink, or nowhere on other ranks than the first."""
    outbox = Outbox()
    ticket = call.hooks.save_output(
        device=call.device, state=call.state, step=call.step, sink=outbox, stream=call.stream
    )
    assert outbox.pending is not None
    if call.step.group.is_first:
        sink.put(outbox.pending)
    else:
        outbox.pending.complete(None)
    return ticket


def clean_up_last(call: Call) -> object:
    ticket = copied(call, call.sink)
    order = call.step.order(call.state.name)
    call.device.submit(call.state.cleanup_plan(order), call.stream)
    call.state.host_table.reported(order.tolist())
    return ticket


OUTPUT = {
    "an early return skips the clean-up on ranks that do not send": row(
        "EarlyReturn",
        18,
        SAVE,
        lambda call: call() if call.step.group.is_first else copied(call, None),
        seen="FastDeploy 7172",
    ),  # ``if rank > 0: return`` before the clean-up
    "the clean-up comes after sending, and not where sending fails": row(
        "CleansUpAfterSending", 18, SAVE, clean_up_last
    ),  # no ``finally``
    "the clean-up is ordered before the copy": row(
        "CleansUpFirst", 18, SAVE, first(clean_up)
    ),  # the fields are zero before they are copied
    "a batch that was preempted as a whole is not reported": row(
        "NothingRunsNothingToSay", 19, SAVE, only_if_held, seen="FastDeploy 7633"
    ),  # a step without running requests that sends no output
    "a preemption whose record met a full sink is reported by the next output too": row(
        "PreemptionToldTwice", 19, SAVE, reported_again
    ),  # a sender that believes that the sink did not keep the record
    "an output forgets the preemptions of all slots, also of those that it does not name": row(
        "ForgetsWhoWasNotNamed", 19, SAVE, all_reported
    ),  # a table of departures that is cleared after each step
    "rows are in slot order instead of batch-id order": row(
        "SlotOrder", 20, SAVE, sorted_slots, seen="FastDeploy 7442"
    ),
    "bounds known to the host are not checked": row(
        "NoBounds",
        21,
        "check of a step",
        lambda call: call.step.orders.get(call.state.name, np.zeros(0, np.int32)) % call.state.sizes.num_slots,
    ),  # a check of a step that only returns its order, reduced to existing slots
    "output for a full sink is dropped silently": row(
        "DropsSilently", 23, SAVE, caught(SinkFull, lambda *_: DONE), seen="ZeroMQ's high-water mark"
    ),  # a full queue that is ignored
}
register(__name__, OUTPUT)

# -- counters and capabilities -----------------------------------------------------------------------------------------


def uncounted(call: Call) -> object:
    counts = call.me._counts
    before = dict(counts)
    ticket = call()
    counts.update({name: before.get(name, 0) for name in ("launches", "submissions")})
    return ticket


def counted_twice(call: Call) -> None:
    if call.target.collapsed()[0]:
        call.me.count("launches")
        call.me.count("submissions")


def half(call: Call) -> object:
    true = call()
    return replace(true, submissions=true.submissions // 2)


CLAIMS = Capabilities(
    async_h2d=True, async_d2h=False, fused_scatter=True, pinned_host=False, can_hold_stream=False, collective=""
)
COUNTERS = {
    "submissions are counted once for all of a call": row("CountsOne", 10, "counters", half, "probe_counts"),
    "copies between two views are not counted": row(
        "CopiesWithinUncounted", 10, "copy_within", uncounted, ("probe_counts", "native_objects")
    ),  # a launch of the vendor's own kernel, past the base's count, where such copies are launches
    "submissions are not counted, and no trace exists to compare with": row(
        "CountsNothing",
        10,
        "counters",
        lambda call: replace(call(), submissions=0, uploads=0, launches=0),
        ("fused_scatter", "async_h2d"),
        has={"probe_counts": None},  # hides the honest device's
    ),  # a bound that is always kept, as the count is zero
    "a strided value counts one submission more than it makes": row(
        "StridedCountedTwice", 10, "submit_value", first(counted_twice), "probe_counts"
    ),  # the vendor counts, and so does the base
    "claims async_h2d and writes synchronously": row(
        "SilentFallback",
        7,
        "copy_within",
        Call.__call__,
        "not async_h2d",
        "FastDeploy 7521",
        has={"capabilities": CLAIMS},
    ),  # a fallback that is not declared: a method of its own, as the default would be refused at opening
}
register(__name__, COUNTERS)
