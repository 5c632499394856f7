"""The oracle of output: the rows that one step must report, and the comparison of a record with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hal_core.output.records import OutputRecord, SlotStatus
from hal_core.slots.fields import FinishReason, SplitRole
from hal_core.slots.tasks import TaskKind

from .slots import Model


@dataclass
class Row:
    """One expected row; ``message`` None: any non-empty text."""

    request_id: str
    status: SlotStatus = SlotStatus.NONE
    finish: FinishReason = FinishReason.NONE
    position: int = 0
    tokens: list[int] = field(default_factory=list)
    first: bool = False
    drafts: list[int] = field(default_factory=list)
    alternatives: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    message: str | None = ""


def expected_rows(
    model: Model,
    order: Sequence[int],
    *,
    speculative: bool = False,
    logprobs: int | None = None,
    errors: Mapping[int, str] | None = None,
    recovered: Mapping[int, str] | None = None,
) -> list[Row]:
    """Return the rows of a step in batch-id order: for each slot first its departed requests, then its current one
    (G19, G20). ``errors`` and ``recovered`` are the step's. A request whose token was outside the vocabulary is noted
    in the model, and its later tokens are not reported (G21)."""
    rows, messages = [], {**(errors or {}), **(recovered or {})}
    for slot in order:
        left = sorted(model.leavers.get(slot, ()), key=lambda leaver: leaver.kind)  # preempted before aborted
        rows += [_left(leaver.request_id, leaver.kind) for leaver in left]
        if slot in model.residents:
            rows.append(_own(model, slot, speculative, logprobs, messages.get(slot)))
            if slot in (recovered or {}):
                rows[-1].status = SlotStatus.RECOVERED
    return rows


def _left(request_id: str, kind: TaskKind) -> Row:
    if kind is TaskKind.PREEMPTED:
        return Row(request_id, SlotStatus.PREEMPTED)
    return Row(request_id, SlotStatus.ABORTED, FinishReason.ABORT)


def _own(model: Model, slot: int, speculative: bool, logprobs: int | None, error: str | None) -> Row:
    request, admission_id = model.residents[slot].request, model.residents[slot].admission_id
    count, generated = model.get("accept_num", slot), model.get("step_idx", slot)
    if generated > model.failed.get(admission_id, generated):
        count = 0
    drafts = model.get("draft_num", slot)
    most = model.sizes.max_accept if speculative else 1
    sound = 0 <= count <= min(most, generated) and 0 <= drafts <= model.sizes.max_draft_tokens
    if error is not None or not sound:
        return Row(request.request_id, SlotStatus.ERROR, FinishReason.ERROR, max(0, generated), message=error)
    row = Row(request.request_id, position=generated - count)
    if count == 0:
        return row
    row.status, row.finish = SlotStatus.TOKEN, FinishReason(model.get("stop_reason", slot))
    row.tokens = model.cells["accept_tokens" if speculative else "sampled_token_ids"][slot, :count].tolist()
    row.first = request.role is SplitRole.PREFILL and row.position == 0
    if row.first and speculative:
        row.drafts = model.cells["draft_tokens"][slot, :drafts].tolist()
    if logprobs is not None:
        shape = (model.sizes.max_accept, model.sizes.max_logprobs + 1)
        row.alternatives = model.cells["topk_token_ids"][slot].reshape(shape)[:count, : logprobs + 1].tolist()
        row.logprobs = model.cells["topk_logprobs"][slot].reshape(shape)[:count, : logprobs + 1].tolist()
        row.ranks = model.cells["topk_ranks"][slot, :count].tolist()
    if not _in_vocabulary(row, model.sizes.vocab_size):
        model.failed[admission_id] = generated
        return Row(request.request_id, SlotStatus.ERROR, FinishReason.ERROR, generated, message=None)
    return row


def _in_vocabulary(row: Row, size: int) -> bool:
    """Return True if every token of the row is in the vocabulary; an alternative may be missing (-1). Size 0:
    unknown."""
    others = [token for alternatives in row.alternatives for token in alternatives[1:] if token != -1]
    return all(token >= 0 and (not size or token < size) for token in (*row.tokens, *row.drafts, *others))


def found_rows(record: OutputRecord) -> list[Row]:
    """Return the rows of a record, cut out of its arrays here rather than by the record's own methods."""
    rows, token, draft = [], 0, 0
    for i, name in enumerate(record.request_ids):
        count = int(record.counts[i])
        row = Row(name, SlotStatus(record.status[i]), FinishReason(record.finish[i]), int(record.positions[i]))
        row.tokens = record.tokens[token : token + count].tolist()
        row.first = bool(record.first_token[i])
        if record.draft_counts is not None and record.drafts is not None:
            row.drafts = record.drafts[draft : draft + int(record.draft_counts[i])].tolist()
            draft += len(row.drafts)
        if record.logprobs is not None and record.logprob_token_ids is not None and record.ranks is not None:
            row.alternatives = record.logprob_token_ids[token : token + count].tolist()
            row.logprobs = record.logprobs[token : token + count].tolist()
            row.ranks = record.ranks[token : token + count].tolist()
        row.message = record.messages.get(i, "")
        rows.append(row)
        token += count
    return rows


def row_difference(got: Sequence[Row], should: Sequence[Row]) -> str:
    """Return "" if the rows are equal, else the first difference."""
    names = [row.request_id for row in got], [row.request_id for row in should]
    if names[0] != names[1]:
        return f"the rows are of {names[0]}, but should be of {names[1]} (batch-id order)"
    for at, (have, want) in enumerate(zip(got, should, strict=True)):
        if want.message is None and have.message:
            have.message = None
        if have != want:
            return f"row {at} is\n    {have},\nbut should be\n    {want}"
    return ""
