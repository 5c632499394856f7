"""Sampling: it turns logits into the columns that a step writes into the state, by each request's parameters.

A step that verifies drafts samples at each of them as plain decoding would: with the tokens before it as history, at
its position, with its noise. Drafts are kept while they equal the sampled tokens, so no draft changes any token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_engine.sampling import STATE_FIELDS, Sampled, SamplingRows, Weights, sample, sample_by_rejection

from .histories import Histories, Int64s
from .inputs import Columns, StepInput, rows_of

if TYPE_CHECKING:
    from hal_core import StateConfig

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The results of a step, in columns of all slots.

    - ``fields``: the values to write into the state, field to ``[slots, columns]``. A plain step:
      ``sampled_token_ids``, -1 for a slot without a token. A step that verifies drafts: ``accept_tokens`` and
      ``accept_num``. With log-probabilities also ``topk_token_ids``, ``topk_logprobs`` (natural logarithms; unused -1
      and -inf) and ``topk_ranks``.
    - ``slots`` int64 ``[n]``, ``margins`` float64 ``[n]``: each token's slot, and how far the choice was from another
      token.
    - ``logprobs``: the number of alternatives reported besides the sampled token, None for no log-probabilities.
    - ``errors``: slot to message, where no token could be sampled.
    """

    fields: Mapping[str, Array]
    slots: Array
    margins: Array
    logprobs: int | None = None
    errors: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def none(cls, sizes: StateConfig) -> StepTokens:
        """Return the result of a step that gives no token."""
        return cls(_empty(sizes), np.zeros(0, np.int64), np.zeros(0))

    def unreported(self) -> StepTokens:
        """Return the same without alternatives, for a rank whose tokens are replaced by another rank's."""
        kept = {name: column for name, column in self.fields.items() if not name.startswith("topk_")}
        return replace(self, fields=kept, logprobs=None)


def _empty(sizes: StateConfig) -> dict[str, Array]:
    """Return the fields of a step that gives no token: of one that verifies drafts, or a plain one."""
    if not sizes.max_draft_tokens:
        return {"sampled_token_ids": np.full((sizes.num_slots, 1), -1, np.int64)}
    tokens = np.full((sizes.num_slots, sizes.max_accept), -1, np.int64)
    return {"accept_tokens": tokens, "accept_num": np.zeros((sizes.num_slots, 1), np.int32)}


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of logits of a step: for each slot that gives a token, one for its next token and one for each of its
    drafts.

    - ``slots``, ``begins``, ``counts`` int64 ``[n]``: the rows' slot, their first index, and their number.
    - ``slot``, ``offset`` int64 ``[rows]``: the row's slot, and the number of drafts before it.
    - ``drafts`` int64 ``[rows]``: the next draft, which the row is to confirm; -1 in a slot's last row.
    """

    slots: Array
    begins: Array
    counts: Array
    slot: Array
    offset: Array
    drafts: Array

    @classmethod
    def of(cls, inputs: StepInput) -> Rows:
        """Return the rows of a step, in the order of the model's logits."""
        slots, counts = inputs.slots[inputs.gives], 1 + inputs.drafts[inputs.gives]
        begins = np.cumsum(counts) - counts
        slot, offset = np.repeat(slots, counts), np.arange(counts.sum()) - np.repeat(begins, counts)
        table = inputs.fields["draft_tokens"]
        drafts = table[slot, np.minimum(offset, table.shape[1] - 1)]
        drafts[begins + counts - 1] = -1
        return cls(slots, begins, counts, slot, offset, drafts)


Proposed = Mapping[int, Sequence[Int64s]]
"""Slot to the weights from which each of its drafts was drawn, where they are known: int64 ``[vocab]``."""


def choose_tokens(
    logits: Array, inputs: StepInput, histories: Histories, sizes: StateConfig, rejection: Proposed | None = None
) -> StepTokens:
    """Sample the tokens of a step from ``logits`` float32 ``[rows, vocab]``, and keep the drafts that they confirm.

    ``rejection``: accept drafts by rejection; its values are the weights from which they were drawn. None: accept by
    comparison.
    """
    slots = inputs.slots[inputs.gives]
    if not len(slots):
        return StepTokens.none(sizes)
    wanted = inputs.fields["logprobs_num"][slots, 0]
    most = int(wanted.max())
    logprobs = most if most >= 0 else None
    if sizes.max_draft_tokens and (rejection is not None or inputs.drafts.any()):
        return _verified(logits, inputs, histories, sizes, logprobs, rejection)
    result = sample(logits, sampling_rows(slots, inputs.fields, histories), logprobs=logprobs)
    errors = {int(slots[row]): message for row, message in result.errors.items()}
    found = _empty(sizes)
    if sizes.max_draft_tokens:  # no draft is to be verified
        found["accept_tokens"][slots, 0] = result.tokens
        found["accept_num"][slots, 0] = result.tokens >= 0
    else:
        found["sampled_token_ids"][slots, 0] = result.tokens
    if logprobs is not None:
        found |= _alternatives(sizes, slots, np.zeros(len(slots), np.int64), wanted, result)
    return StepTokens(found, slots, result.margins, logprobs, errors)


def _verified(
    logits: Array,
    inputs: StepInput,
    histories: Histories,
    sizes: StateConfig,
    logprobs: int | None,
    proposed: Proposed | None,
) -> StepTokens:
    """Return the tokens of a step that verifies drafts: of each slot, the confirmed ones and the first one sampled
    after them."""
    found = _empty(sizes)
    rows = Rows.of(inputs)
    sampling = verified_rows(rows, inputs.fields, histories)
    if proposed is None:
        result = sample(logits, sampling, logprobs=logprobs)
    else:
        weights = _weights(rows, proposed)
        result = sample_by_rejection(logits, sampling, rows.drafts, weights, logprobs=logprobs)
    differs = result.tokens != rows.drafts  # the last row of a slot always does
    count = 1 + np.minimum.reduceat(np.where(differs, rows.offset, sizes.max_accept), rows.begins)
    errors = {}
    for row, message in result.errors.items():  # an error behind a refused draft does not count
        at = int(np.searchsorted(rows.begins, row, side="right")) - 1
        if rows.offset[row] == count[at] - 1:
            count[at] -= 1  # the next step starts there, and meets the error first
            if not count[at]:
                errors[int(rows.slots[at])] = message
    kept = np.flatnonzero(rows.offset < np.repeat(count, rows.counts))
    slot, offset = rows.slot[kept], rows.offset[kept]
    found["accept_tokens"][slot, offset] = result.tokens[kept]
    found["accept_num"][rows.slots, 0] = count
    if logprobs is not None:
        wanted = inputs.fields["logprobs_num"][slot, 0]
        found |= _alternatives(sizes, slot, offset, wanted, result, kept)
    return StepTokens(found, slot, result.margins[kept], logprobs, errors)


def _weights(rows: Rows, proposed: Proposed) -> list[Weights]:
    """Return the weights from which the draft of each row was drawn."""
    found: list[Weights] = []
    for slot, offset, draft in zip(rows.slot.tolist(), rows.offset.tolist(), rows.drafts.tolist(), strict=True):
        known = proposed.get(slot, ()) if draft >= 0 else ()
        found.append(known[offset] if offset < len(known) else None)
    return found


def sampling_rows(slots: Array, fields: Columns, histories: Histories) -> SamplingRows:
    """Return how each of ``slots`` is sampled: its fields of the state, and its history if it has penalties."""
    at = rows_of(slots, len(fields["seed"]))
    columns = {name: fields[name][at] for name in STATE_FIELDS.values()}
    if not histories:
        return SamplingRows.from_state(columns, prompt=None, output=None)
    kept = [histories.get(slot) for slot in slots.tolist()]
    prompt = [None if history is None else history.prompt for history in kept]
    output = [None if history is None else history.output for history in kept]
    return SamplingRows.from_state(columns, prompt=prompt, output=output)


def verified_rows(rows: Rows, fields: Columns, histories: Histories) -> SamplingRows:
    """Return the same for rows that verify drafts: each is at its own position, after the drafts before it."""
    columns = {name: fields[name][rows.slot] for name in STATE_FIELDS.values()}
    columns["step_idx"] = columns["step_idx"] + rows.offset[:, None]
    if not histories:
        return SamplingRows.from_state(columns, prompt=None, output=None)
    prompt: list[Int64s | None] = []
    output: list[Int64s | None] = []
    for slot, begin, count in zip(rows.slots.tolist(), rows.begins.tolist(), rows.counts.tolist(), strict=True):
        history = histories.get(slot)
        prompt += [None if history is None else history.prompt] * count
        drafts = rows.drafts[begin : begin + count - 1]
        output += [None] * count if history is None else history.with_drafts(drafts)
    return SamplingRows.from_state(columns, prompt=prompt, output=output)


def _alternatives(
    sizes: StateConfig, slots: Array, places: Array, wanted: Array, result: Sampled, chosen: Array | None = None
) -> dict[str, Array]:
    """Return the log-probabilities of the ``chosen`` rows of ``result``, at those places of those slots. Each row is
    cut to the number that its request asked for; column 0 is the sampled token's."""
    ids, values, ranks = result.token_ids, result.logprobs, result.ranks
    assert ids is not None
    assert values is not None
    assert ranks is not None
    if chosen is not None:
        ids, values, ranks = ids[chosen], values[chosen], ranks[chosen]
    columns = np.arange(ids.shape[1])
    used = (columns <= wanted[:, None]) & (ids >= 0)
    # A plain step writes only the first columns; with more tokens, each gets as many columns as the state has room for.
    shape = (sizes.num_slots, sizes.max_accept, len(columns) if sizes.max_accept == 1 else sizes.max_logprobs + 1)
    all_ids = np.full(shape, -1, np.int64)
    all_values = np.full(shape, -np.inf, np.float32)
    all_ranks = np.zeros(shape[:2], np.int32)
    at = (slots, places, slice(len(columns)))
    all_ids[at] = np.where(used | (columns == 0), ids, -1)
    all_values[at] = np.where(used, values, -np.inf)
    all_ranks[slots, places] = ranks
    flat = (sizes.num_slots, -1)
    return {
        "topk_token_ids": all_ids.reshape(flat),
        "topk_logprobs": all_values.reshape(flat),
        "topk_ranks": all_ranks,
    }
