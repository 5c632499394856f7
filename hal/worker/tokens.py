"""From logits to the columns that a step writes into the state: sampling, with what each request asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hal.sampling import STATE_FIELDS, Sampled, SamplingRows, sample
from hal.worker.histories import Histories
from hal.worker.inputs import Columns

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a step found, in columns of all slots.

    - ``sampled`` int64 ``[slots, 1]``: the token of each slot that was given one, -1 for the others.
    - ``slots`` int64 ``[n]``: those that were; ``margins`` float64 ``[n]``: how far each choice was from another one.
    - ``logprobs``: how many alternatives are reported besides the sampled token, None for no log-probabilities.
    - ``alternatives``: with log-probabilities, state field to ``[slots, columns]``: ``topk_token_ids``,
      ``topk_logprobs`` (natural logarithms; unused -1 and -inf) and ``topk_ranks``.
    - ``errors``: slot to message, where no token could be chosen.
    """

    sampled: Array
    slots: Array
    margins: Array
    logprobs: int | None = None
    alternatives: Mapping[str, Array] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def none(cls, slots: int) -> StepTokens:
        """A step that gives no token, of a state of so many slots."""
        return cls(np.full((slots, 1), -1, np.int64), np.zeros(0, np.int64), np.zeros(0))


def choose_tokens(logits: Array, slots: Array, fields: Columns, histories: Histories) -> StepTokens:
    """Sample a token for each of ``slots`` int64 ``[n]`` from ``logits`` float32 ``[n, vocab]``."""
    total = len(fields["stop_flags"])
    if not len(slots):
        return StepTokens.none(total)
    wanted = fields["logprobs_num"][slots, 0]
    most = int(wanted.max())
    result = sample(logits, sampling_rows(slots, fields, histories), logprobs=most if most >= 0 else None)
    errors = {int(slots[row]): message for row, message in result.errors.items()}
    for slot in histories.keys() - errors.keys():
        if len(row := np.flatnonzero(slots == slot)):
            histories[slot].append(int(result.tokens[row[0]]))
    sampled = np.full((total, 1), -1, np.int64)
    sampled[slots, 0] = result.tokens
    if most < 0:
        return StepTokens(sampled, slots, result.margins, errors=errors)
    return StepTokens(sampled, slots, result.margins, most, _alternatives(total, slots, wanted, result), errors)


def sampling_rows(slots: Array, fields: Columns, histories: Histories) -> SamplingRows:
    """How each of ``slots`` is sampled: its fields of the state, and its history where it has penalties."""
    columns = {name: fields[name][slots] for name in STATE_FIELDS.values()}
    if not histories:
        return SamplingRows.from_state(columns, prompt=None, output=None)
    kept = [histories.get(slot) for slot in slots.tolist()]
    prompt = [None if history is None else history.prompt for history in kept]
    output = [None if history is None else history.output for history in kept]
    return SamplingRows.from_state(columns, prompt=prompt, output=output)


def _alternatives(total: int, slots: Array, wanted: Array, result: Sampled) -> dict[str, Array]:
    """Columns of all slots, each row cut to what its request asked for; column 0 is the sampled token's."""
    ids, values, ranks = result.token_ids, result.logprobs, result.ranks
    assert ids is not None
    assert values is not None
    assert ranks is not None
    columns = np.arange(ids.shape[1])
    used = (columns <= wanted[:, None]) & (ids >= 0)
    all_ids = np.full((total, len(columns)), -1, np.int64)
    all_values = np.full((total, len(columns)), -np.inf, np.float32)
    all_ranks = np.zeros((total, 1), np.int32)
    all_ids[slots] = np.where(used | (columns == 0), ids, -1)
    all_values[slots] = np.where(used, values, -np.inf)
    all_ranks[slots, 0] = ranks
    return {"topk_token_ids": all_ids, "topk_logprobs": all_values, "topk_ranks": all_ranks}
