"""The rows of a step's record, built from the copied fields and the host table (G17 to G22, G24)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import InvalidValue
from ..slots.fields import FinishReason
from .fast_record import fast_record
from .records import OutputRecord, SlotStatus, narrowed
from .snapshot import OutputSnapshot as OutputSnapshot

Columns = dict[str, np.ndarray[Any, Any]]
Built = tuple[OutputRecord, tuple[int, ...], InvalidValue | None]


def build_record(columns: Columns, snapshot: OutputSnapshot) -> Built:
    """Return the step's record with rows in batch-id order, each row's batch id, and the error for values out of
    bounds.

    Rows with values out of bounds are errors.
    """
    fast = fast_record(columns, snapshot) if snapshot.plain and not snapshot.failed else None
    return fast or _any_record(columns, snapshot)


def _any_record(columns: Columns, snapshot: OutputSnapshot) -> Built:
    """Return the record of any step.

    Arrays are in batch-id order, one entry a slot, until :func:`_arranged` gives each request its row: a request that
    left its slot has one too.
    """
    order, step = snapshot.order, snapshot.step
    held = snapshot.admission_ids != 0
    counts = np.where(held, columns["accept_num"][order, 0], 0)
    if snapshot.failed:
        failed_ids = [snapshot.failed.get(slot, -1) for slot in order.tolist()]
        counts[failed_ids == snapshot.admission_ids] = 0  # an error was reported; later tokens are not
    bad = _out_of_bounds(columns, snapshot, counts, held)
    strange = _strange_tokens(columns, snapshot, counts, bad)
    errors = strange | dict(step.errors) | dict(step.late_errors() if step.late_errors is not None else {})
    for slot, message in (*errors.items(), *step.recovered.items()):
        for batch_id in np.flatnonzero(order == slot).tolist():
            bad[batch_id] = _encodable(message)
    counts, per_slot = _slot_rows(columns, snapshot, counts, bad, held)
    parts = _token_parts(columns, snapshot, counts)
    if step.speculative and snapshot.prefill_role.any():
        per_slot["draft_counts"], parts["drafts"] = _drafts(columns, snapshot, per_slot["first_token"])
    names, batch_ids, left = _arranged(snapshot, held, bad)
    rows = {name: values[np.array(batch_ids, np.int64)] for name, values in per_slot.items()}
    messages = {row: bad[batch_id] for row, batch_id in enumerate(batch_ids) if batch_id in bad} if bad else {}
    for row, gone in enumerate(left):
        if gone is not None:
            for values in rows.values():
                values[row] = 0
            rows["status"][row] = gone
            rows["finish"][row] = FinishReason.ABORT if gone is SlotStatus.ABORTED else FinishReason.NONE
            messages.pop(row, None)
    snapshot.failed.update(
        {int(order[batch_id]): int(snapshot.admission_ids[batch_id]) for batch_id in bad if order[batch_id] in strange}
    )
    record = OutputRecord(step.number, names, messages=messages, **rows, **parts)
    explained = errors.keys() | step.recovered.keys()
    violations = [text for batch_id, text in bad.items() if int(order[batch_id]) not in explained]
    return record, batch_ids, _violation(violations, snapshot) if violations else None


def _encodable(message: str) -> str:
    """Return a step's message with lone surrogates escaped, which no frame carries; the record refuses what is no
    text."""
    return message.encode(errors="backslashreplace").decode() if isinstance(message, str) else message


def _slot_rows(
    columns: Columns,
    snapshot: OutputSnapshot,
    counts: np.ndarray[Any, Any],
    bad: dict[int, str],
    held: np.ndarray[Any, Any],
) -> tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
    """Return each slot's number of reported tokens (0 for batch ids in ``bad``), and the record's columns that have
    one value a slot."""
    order, recovered = snapshot.order, snapshot.step.recovered
    wrong = np.zeros(len(order), np.bool_)
    wrong[list(bad)] = True
    counts = np.where(wrong, 0, counts).astype(np.int32)
    status = np.where(counts > 0, SlotStatus.TOKEN, SlotStatus.NONE).astype(np.uint8)
    status[wrong] = SlotStatus.ERROR
    if recovered:
        status[np.isin(order, [*recovered])] = SlotStatus.RECOVERED
    finish = np.where(counts > 0, columns["stop_reason"][order, 0], 0).astype(np.uint8)
    finish[wrong] = FinishReason.ERROR
    positions = np.maximum(np.where(held, columns["step_idx"][order, 0] - counts, 0).astype(np.int64), 0)
    first = snapshot.prefill_role & (counts > 0) & (positions == 0)
    values = {"status": status, "finish": finish, "positions": positions, "counts": counts, "first_token": first}
    return counts, values


def _violation(texts: list[str], snapshot: OutputSnapshot) -> InvalidValue:
    return InvalidValue(
        f"step {snapshot.step.number}: " + "; ".join(texts),
        cure="a kernel of the step wrote the state out of bounds; the rows named were reported as errors",
        hook="save_output",
        argument="state",
    )


def _out_of_bounds(
    columns: Columns, snapshot: OutputSnapshot, counts: np.ndarray[Any, Any], held: np.ndarray[Any, Any]
) -> dict[int, str]:
    """Return batch id to error text for values of the device that are out of bounds (G21)."""
    order = snapshot.order
    most = snapshot.max_accept if snapshot.step.speculative else 1
    drafts, generated = columns["draft_num"][order, 0], columns["step_idx"][order, 0]
    replaced = held & (columns["request_serial"][order, 0] != snapshot.admission_ids)
    wrong = replaced | (held & ((counts < 0) | (counts > most) | (drafts < 0) | (drafts > snapshot.max_draft_tokens)))
    wrong |= held & (generated < counts)
    reasons = columns["stop_reason"][order, 0]
    unknown = held & (counts > 0) & ((reasons < 0) | (reasons > FinishReason.LENGTH))
    wrong |= unknown
    found = {}
    for batch_id in np.flatnonzero(wrong).tolist():
        name = snapshot.names[batch_id] or f"slot {int(order[batch_id])}"
        if replaced[batch_id]:
            found[batch_id] = f"{name}: the slot holds admission {int(columns['request_serial'][order[batch_id], 0])}"
        elif unknown[batch_id]:
            found[batch_id] = (
                f"{name}: stop_reason is {int(reasons[batch_id])}, but a step gives 0 to {int(FinishReason.LENGTH)}"
            )
        else:
            found[batch_id] = (
                f"{name}: {int(counts[batch_id])} tokens (at most {most}), {int(drafts[batch_id])} drafts (at most "
                f"{snapshot.max_draft_tokens}), {int(generated[batch_id])} generated in all"
            )
    return found


def _strange_tokens(
    columns: Columns, snapshot: OutputSnapshot, counts: np.ndarray[Any, Any], bad: dict[int, str]
) -> dict[int, str]:
    """Return slot to message for reported tokens outside the vocabulary (G21).

    Checked are the step's tokens, their alternatives (-1 is none), and drafts beside a first token. ``bad``: batch
    ids without reported tokens.
    """
    order, highest, step = snapshot.order, snapshot.token_limit - 1, snapshot.step
    groups = [("token", columns["accept_tokens" if step.speculative else "sampled_token_ids"], counts, 0)]
    if step.logprobs is not None:
        alternatives = columns["topk_token_ids"].reshape(len(columns["accept_num"]), snapshot.max_accept, -1)
        groups.append(("alternative", alternatives[..., : step.logprobs + 1], counts, -1))
    if step.speculative and snapshot.prefill_role.any():
        first = snapshot.prefill_role & (columns["step_idx"][order, 0] == counts)
        groups.append(("draft", columns["draft_tokens"], first * (counts > 0) * columns["draft_num"][order, 0], 0))
    found: dict[int, str] = {}
    for what, ids, most, least in groups:
        given = ids[order].reshape(len(order), ids.shape[1], math.prod(ids.shape[2:]))
        wrong = ((given < least) | (given > highest)) & (np.arange(ids.shape[1]) < most[:, None])[..., None]
        for batch_id in np.flatnonzero(wrong.any((1, 2))).tolist():
            if batch_id not in bad:
                size = f"the vocabulary of {highest + 1}" if highest < (1 << 63) - 1 else "every vocabulary"
                text = f"the step gave {what} {int(given[batch_id][wrong[batch_id]][0])}, outside {size}"
                found.setdefault(int(order[batch_id]), text)
    return found


def _token_parts(
    columns: Columns, snapshot: OutputSnapshot, counts: np.ndarray[Any, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tokens of all slots in batch-id order, and their log-probabilities if the step made some."""
    order, width = snapshot.order, snapshot.max_accept
    source = columns["accept_tokens" if snapshot.step.speculative else "sampled_token_ids"]
    chosen = np.arange(source.shape[1]) < counts[:, None]
    parts = {"tokens": source[order][chosen]}
    if snapshot.step.logprobs is not None:
        columns_of = snapshot.step.logprobs + 1
        chosen = np.arange(width) < counts[:, None]
        for name, target in (("topk_token_ids", "logprob_token_ids"), ("topk_logprobs", "logprobs")):
            alternatives = columns[name].reshape(len(columns[name]), width, snapshot.max_logprobs + 1)
            parts[target] = np.ascontiguousarray(alternatives[order][chosen][:, :columns_of])
        parts["logprob_token_ids"] = narrowed(parts["logprob_token_ids"])  # half the bytes from here to the engine
        parts["ranks"] = columns["topk_ranks"][order][chosen]
    return parts


def _drafts(
    columns: Columns, snapshot: OutputSnapshot, first: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the drafts of a prefill node for the first token (G24): their number per slot, and the drafts."""
    counts = np.where(first, columns["draft_num"][snapshot.order, 0], 0).astype(np.int32)
    drafts = columns["draft_tokens"][snapshot.order]
    return counts, drafts[np.arange(drafts.shape[1]) < counts[:, None]]


def _arranged(
    snapshot: OutputSnapshot, held: np.ndarray[Any, Any], bad: dict[int, str]
) -> tuple[tuple[str, ...], tuple[int, ...], list[SlotStatus | None]]:
    """Return each row's name, its batch id, and how its request left the slot (None if it did not).

    Slots are in batch-id order. A request that left its slot has a row before that of the slot.
    """
    if not snapshot.preempted and not snapshot.aborted and held.all():
        return snapshot.names, tuple(range(len(snapshot.names))), []
    names: list[str] = []
    batch_ids: list[int] = []
    left: list[SlotStatus | None] = []
    for batch_id, slot in enumerate(snapshot.order.tolist()):
        for leaving, status in ((snapshot.preempted, SlotStatus.PREEMPTED), (snapshot.aborted, SlotStatus.ABORTED)):
            if slot in leaving:
                names.append(leaving[slot][1])
                batch_ids.append(batch_id)
                left.append(status)
        if held[batch_id] or batch_id in bad:
            names.append(snapshot.names[batch_id] or f"slot {slot}")
            batch_ids.append(batch_id)
            left.append(None)
    return tuple(names), tuple(batch_ids), left
