"""Liars about output: records and their rows, the host mirror, steps that lost theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hal_core.memory.plan import WritePlan
from hal_core.memory.views import ByteRange
from hal_core.output.records import OutputRecord, SlotStatus
from hal_core.slots.fields import SplitRole

from .proxies import HELD_COPIES
from .rows import Call, How, first, register, row, then

# -- another record than the step's ------------------------------------------------------------------------------------


def record(change: Callable[[OutputRecord], OutputRecord]) -> How:
    """Return a lie that reports another record than the step's."""
    return lambda call: change(call())


def last_token_lost(record: OutputRecord) -> OutputRecord:
    rows = np.flatnonzero(record.counts > 1)
    if not len(rows) or record.logprobs is not None:
        return record
    counts = record.counts.copy()
    counts[rows[0]] -= 1
    end = int(record.counts[: rows[0] + 1].sum()) - 1
    return replace(record, counts=counts, tokens=np.delete(record.tokens, end))


def logprobs_rolled(record: OutputRecord) -> OutputRecord:
    if record.logprobs is None:
        return record
    return replace(record, logprobs=np.ascontiguousarray(np.roll(record.logprobs, 1, axis=0)))


def drafts_rolled(record: OutputRecord) -> OutputRecord:
    return record if record.draft_counts is None else replace(record, draft_counts=np.roll(record.draft_counts, -1))


def last_draft_lost(record: OutputRecord) -> OutputRecord:
    if record.drafts is None or record.draft_counts is None or not record.draft_counts.max(initial=0) > 1:
        return record
    counts, at = record.draft_counts.copy(), int(record.draft_counts.argmax())
    counts[at] -= 1
    end = int(record.draft_counts[: at + 1].sum())
    return replace(record, drafts=np.delete(record.drafts, end - 1), draft_counts=counts)


def of_first_tokens(**left: None) -> How:
    """Return a lie that leaves columns out of a record with first tokens."""

    def change(record: OutputRecord) -> OutputRecord:
        changed: Any = left
        return replace(record, **changed) if record.first_token.any() else record

    return lambda call: change(call())


def aborted_as_preempted(record: OutputRecord) -> OutputRecord:
    aborted = record.status == SlotStatus.ABORTED
    status, finish = record.status.copy(), record.finish.copy()
    status[aborted], finish[aborted] = SlotStatus.PREEMPTED, 0
    return replace(record, status=status, finish=finish)


def recovered_as_error(record: OutputRecord) -> OutputRecord:
    status = record.status.copy()
    status[status == SlotStatus.RECOVERED] = SlotStatus.ERROR
    return replace(record, status=status)


def once_under_a_name(record: OutputRecord) -> OutputRecord:
    names = record.request_ids
    gone = [name for name, status in zip(names, record.status, strict=True) if status == SlotStatus.PREEMPTED]
    rows = np.array(
        [
            names.count(name) == 1 or name not in gone or status != SlotStatus.PREEMPTED
            for name, status in zip(names, record.status, strict=True)
        ],
        np.bool_,
    )
    if rows.all():
        return record
    columns = ("status", "finish", "positions", "counts", "first_token")
    kept = tuple(name for name, one in zip(names, rows, strict=True) if one)
    arrays: Any = {name: getattr(record, name)[rows] for name in columns}
    return replace(record, request_ids=kept, messages={}, **arrays)


RECORD = "record of an output"
RECORDS = {
    "a count is one too small where there are several tokens": row(
        "CountOffByOne", 24, RECORD, record(last_token_lost), seen="FastDeploy 7442"
    ),  # the last token of a row with several is lost
    "log-probabilities are shifted by one token": row(
        "LogprobsShifted", 24, RECORD, record(logprobs_rolled), seen="FastDeploy 7442"
    ),  # row i has the log-probabilities of row i - 1
    "the drafts of a prefill node are cut off": row(
        "FirstDraftsCutOff", 24, RECORD, of_first_tokens(drafts=None, draft_counts=None), seen="SGLang 31466"
    ),  # drafts for the decode node's first step that are not sent
    "the last draft of a first token is cut off where all drafts are used": row(
        "LastDraftCutOff", 24, RECORD, record(last_draft_lost)
    ),  # a bound that is one too low, for the first slot that meets it
    "drafts are told of the row before theirs": row(
        "DraftsOfTheNextRow", 24, RECORD, record(drafts_rolled), seen="FastDeploy: rows of two lists in two orders"
    ),  # the counts are in another order than the rows
    "the log-probabilities of a prefill node are cut off": row(
        "FirstLogprobsCutOff",
        24,
        RECORD,
        of_first_tokens(logprobs=None, logprob_token_ids=None, ranks=None),
        seen="vLLM 51919",
    ),  # a first token without log-probabilities
    "the position of a token is one too high after the first": row(
        "PositionOffByOne",
        19,
        RECORD,
        record(lambda found: replace(found, positions=found.positions + (found.positions > 0))),
    ),  # positions count from one
    "an aborted request is reported as preempted": row(
        "OneWordForTwo", 19, RECORD, record(aborted_as_preempted), seen="FastDeploy 5796: one sentinel for two things"
    ),  # one status for two ways of leaving
    "a recovered request is reported as failed": row(
        "RecoveredAsError", 19, RECORD, record(recovered_as_error)
    ),  # one status for both
    "a preemption is not told of a request that goes on in the same frame": row(
        "ToldUnderItsNameOnce", 19, RECORD, record(once_under_a_name)
    ),  # a frame has each name once, it is thought
}
register(__name__, RECORDS)

# -- what a record is built of -----------------------------------------------------------------------------------------


def clip(call: Call) -> object:
    snapshot = call.snapshot
    most = snapshot.max_accept if snapshot.step.speculative else 1
    return call(columns=call.columns | {"accept_num": np.clip(call.columns["accept_num"], 0, most)})


def any_token(call: Call) -> object:
    names = ("sampled_token_ids", "accept_tokens", "draft_tokens", "topk_token_ids")
    changed = {name: call.columns[name] & (2**63 - 1) for name in names if name in call.columns}
    return call(columns=call.columns | changed, snapshot=call.snapshot._replace(token_limit=2**63))


def first_is_checked(call: Call) -> object:
    if "accept_tokens" not in call.columns or call.snapshot.step.logprobs is not None:
        return call()
    tokens = call.columns["accept_tokens"].copy()
    later = tokens[:, 1:]
    later[(later < 0) | (later >= call.snapshot.token_limit)] = 0
    return call(columns=call.columns | {"accept_tokens": tokens})


def without_a_proposer(call: Call) -> object:
    found, batch_ids, violation = call()
    if call.snapshot.max_draft_tokens and not call.snapshot.step.speculative:
        changes = {"tokens": np.zeros_like(found.tokens)}
        if found.logprob_token_ids is not None:
            changes["logprob_token_ids"] = found.logprob_token_ids.copy()
            changes["logprob_token_ids"][:, 0] = 0
        found = replace(found, **changes)
    return found, batch_ids, violation


def forget_earlier_failures(call: Call) -> object:
    earlier = [*call.snapshot.failed]
    built = call()
    for slot in earlier:
        call.snapshot.failed.pop(slot, None)
    return built


def slots_now(change: Callable[[Any, Sequence[Any]], Any]) -> How:
    """Return a lie: a record is built with the requests that hold the slots then.

    ``change(snapshot, requests)`` returns the snapshot with them; a free slot of the step's order has None.
    """

    def lie(call: Call) -> object:
        ticket = call.self
        if ticket._record is None:
            requests = [ticket._state.host_table.requests[slot] for slot in ticket._snapshot.order.tolist()]
            ticket._snapshot = change(ticket._snapshot, requests)
        return call()

    return lie


def with_their_names(snapshot: Any, requests: Sequence[Any]) -> Any:  # noqa: ANN401 (the core's)
    pairs = zip(snapshot.names, requests, strict=True)
    return snapshot._replace(names=tuple(one.request_id if one and name else name for name, one in pairs))


def without_the_gone(snapshot: Any, requests: Sequence[Any]) -> Any:  # noqa: ANN401 (the core's)
    held = np.array([one is not None for one in requests])
    names = tuple(name if one else "" for name, one in zip(snapshot.names, requests, strict=True))
    return snapshot._replace(names=names, admission_ids=np.where(held, snapshot.admission_ids, 0), plain=False)


def snapshot_of_the_orders(call: Call) -> object:
    ticket, known = call(), call.me.__dict__.get("known")
    if known and known[0] is call.state and known[1] is call.step.orders:
        ticket._snapshot = known[2]._replace(step=call.step)
    else:
        call.me.__dict__["known"] = call.state, call.step.orders, ticket._snapshot
    return ticket


BUILD = "build of a record"
BUILT = {
    "a count out of bounds is clipped without an error": row("ClipsCounts", 21, BUILD, clip),
    "a token outside the vocabulary is reported as valid": row(
        "TakesAnyToken", 21, BUILD, any_token
    ),  # a vocabulary as large as int64, into which negative ids are wrapped
    "of the tokens of a row only the first is compared with the vocabulary": row(
        "FirstTokensAreChecked", 21, BUILD, first_is_checked
    ),  # as it was when a step gave one
    "that a request got a token outside the vocabulary is remembered for one more record": row(
        "FailureIsForgotten", 21, BUILD, forget_earlier_failures
    ),  # the record after that has its tokens again
    "without a proposer there are no tokens": row(
        "NeedsAProposer", 25, BUILD, without_a_proposer, seen="FastDeploy 7172: the naive path"
    ),  # a plain step on a state sized for drafts that reports no tokens
    "a record has the names of the requests that hold the slots when it is built": row(
        "NamesOfNow", 19, RECORD, slots_now(with_their_names)
    ),  # a free slot's is kept
    "a record leaves out the requests whose slot is free when it is built": row(
        "GoneAreLeftOut", 19, RECORD, slots_now(without_the_gone)
    ),  # nobody waits for their tokens, it is thought
    "what is known of the slots is kept while steps have the same orders": row(
        "SlotsOfTheOrdersAreKept", 19, "save_output", snapshot_of_the_orders
    ),  # ``Step.again`` gives a step the orders of an earlier one, and the slots may hold other requests by then
    "an output is checked against its broadcast where its copy begins with the header": row(
        "LogprobsAreUnchecked",
        14,
        "check of an output's broadcast",
        lambda call: call() if call.part.offset == call.state.broadcast_range().offset else None,
    ),  # a copy with log-probabilities begins before it
}
register(__name__, BUILT)

# -- the host mirror, and steps ----------------------------------------------------------------------------------------


def read_again(call: Call) -> None:
    state = call.self
    part = state.output_range(topk=False)
    copied = state.device.copy_out(state.memory, [part], state.device.default_stream)
    copied.wait()
    state.mirror = {name: state.columns(copied.data[0], part)[name] for name in state.mirror}


def with_the_record(call: Call) -> object:
    ticket = call.self
    made = ticket._record is None
    found = call()
    if made:
        ticket._state.mirror = {name: ticket.columns[name] for name in ticket._state.mirror}
    return found


def call_late_errors(call: Call) -> None:
    if call.step.late_errors is not None:
        call.step.late_errors()


def another_next_token(call: Call) -> None:
    place = call.state.layout.fields["next_tokens"]
    call.write(call.state.memory, (place.offset, np.int64(-7).tobytes()))


def restart_prefills(call: Call) -> None:
    state = call.state
    held = enumerate(state.host_table.requests)
    slots = [slot for slot, request in held if request is not None and request.role is SplitRole.PREFILL]
    places = [state.layout.fields[name] for name in ("accept_num", "stop_reason")]
    parts = [ByteRange(place.offset + slot * place.stride, 4) for slot in slots for place in places]
    copied = call.me.copy_out(state.memory, parts, call.stream)
    copied.wait(60.0)
    numbers = [int(part.view(np.int32)[0]) for part in copied.data]
    flags, lengths = (state.layout.fields[name] for name in ("stop_flags", "seq_lens_this_time"))
    for slot, given, reason in zip(slots, numbers[::2], numbers[1::2], strict=True):
        if given > 0 and reason == 0:
            call.write(state.memory, (flags.offset + slot * flags.stride, b"\0"))
            call.write(state.memory, (lengths.offset + slot * lengths.stride, np.int32(1).tobytes()))


def nobody_feeds(call: Call) -> object:
    plan, place = call(), call.state.layout.fields["seq_lens_this_time"]
    begin, end = place.offset, place.offset + place.stride * call.state.sizes.num_slots
    kept = [not begin <= dst < end for dst in plan.writes["dst"].tolist()]
    return WritePlan(plan.memory, plan.writes[np.array(kept)], plan.pieces)


STEPS = {
    "the host mirror shows the device as it is now, not as of the output that was taken": row(
        "MirrorRunsAhead", 12, "host mirror", then(read_again)
    ),  # a mirror that is refreshed from the device
    "the host mirror is of the output that was read last, by the sink too": row(
        "MirrorFollowsTheSink", 12, RECORD, with_the_record
    ),  # it is set where a record is made, which the worker does not do alone
    "late errors are read at the call": row(
        "LateErrorsReadEarly", 19, "policy.save_output", first(call_late_errors), HELD_COPIES
    ),  # they read fields that are not on the host yet
    "late errors are left out": row(
        "LateErrorsDropped", 19, "policy.save_output", lambda call: call(step=replace(call.step, late_errors=None))
    ),  # a record is built before they are known
    "the token that decoding feeds next is the one before": row(
        "FeedsTheTokenBefore", 9, "update_inputs", then(another_next_token)
    ),  # an off-by-one in the step's own kernel
    "a slot of the prefill role continues to decode after its first token": row(
        "PrefillGoesOn", 12, "update_inputs", then(restart_prefills), seen="hal"
    ),  # a step without roles: every request that has not ended feeds its next token
    "drafts are written, but the next step does not feed them": row(
        "DraftsThatNobodyFeeds", 12, "plan of drafts", nobody_feeds, seen="FastDeploy 7172"
    ),  # tokens and their number without ``seq_lens_this_time``
}
register(__name__, STEPS)
