"""The sampler's input for each row of logits, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hal_core import InvalidValue

SUPPORTED = frozenset(
    {
        *("temperature", "top_k", "top_p", "min_p", "seed", "logprobs"),
        *("repetition_penalty", "frequency_penalty", "presence_penalty"),
        *("min_tokens", "max_tokens", "stop_sequences", "bad_words", "eos_token_ids"),
    }
)
"""Parameters that the sampler of this package knows, and the torch runner's, which is compared with it."""
Float32s = np.ndarray[Any, np.dtype[np.float32]]
Float64s = np.ndarray[Any, np.dtype[np.float64]]
Int64s = np.ndarray[Any, np.dtype[np.int64]]
Int32s = np.ndarray[Any, np.dtype[np.int32]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Tokens = np.ndarray[Any, np.dtype[Any]]
"""Token ids of one request; any integer type."""
History = Sequence[Tokens | None] | None


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """Sampling parameters of ``n`` rows of logits; the values were checked when the request was admitted.

    Columns are the slot state's fields of the same name, but for ``position`` (``step_idx``: index of the token to draw
    within the request's generated tokens) and ``min_tokens`` (``min_dec_len``). Lists are padded rows with their count,
    as in the state. A token id outside the vocabulary cannot be drawn, so it is skipped.

    - ``temperature``, ``top_p``, ``min_p`` float32 ``[n]``; ``top_k`` int32 ``[n]``.
    - ``seed`` int64 ``[n]``: already mixed with the request's name (``hal_core.slots.admission.draw_seed``).
    - ``repetition_penalty``, ``frequency_penalty``, ``presence_penalty`` float32 ``[n]``.
    - ``eos_token_ids`` int64 ``[n, E]`` with ``eos_num``; ``bad_words`` int64 ``[n, B]`` with ``bad_words_num``;
      ``stop_seqs`` int64 ``[n, S * L]`` with ``stop_seqs_len`` int32 ``[n, S]`` and ``stop_seqs_num``.
    - ``prompt``, ``output``: token ids of prompt and of generated tokens, one entry a row. Rows without penalties
      (``needs_history``) may have None; a single None means n times None.
    """

    temperature: Float32s
    top_k: Int32s
    top_p: Float32s
    min_p: Float32s
    seed: Int64s
    position: Int64s
    repetition_penalty: Float32s
    frequency_penalty: Float32s
    presence_penalty: Float32s
    min_tokens: Int64s
    eos_token_ids: Int64s
    eos_num: Int32s
    stop_seqs: Int64s
    stop_seqs_len: Int32s
    stop_seqs_num: Int32s
    bad_words: Int64s
    bad_words_num: Int32s
    prompt: History
    output: History

    def __post_init__(self) -> None:
        count = len(self.temperature)
        for name in self.__slots__:
            column = getattr(self, name)
            if column is None:
                continue
            lists = name in LISTS
            dimensions = 1 if name in ("prompt", "output") else column.ndim
            if len(column) != count or dimensions != (2 if lists else 1):
                shape = getattr(column, "shape", (len(column),))
                raise InvalidValue(
                    f"shape {tuple(shape)} where there are {count} rows",
                    cure=f"give [{count}, width]" if lists else f"give [{count}]",
                    argument=f"rows.{name}",
                )

    @classmethod
    def from_state(
        cls,
        fields: Mapping[str, np.ndarray[Any, np.dtype[Any]]],
        *,
        prompt: History,
        output: History,
    ) -> SamplingRows:
        """Return the rows of a slot state's fields, each ``[n, width]`` under its name in the table, without a copy."""
        columns: dict[str, Any] = {}
        for name, field in STATE_FIELDS.items():
            column = fields[field]
            columns[name] = column if name in LISTS else column.reshape(len(column))
        return cls(**columns, prompt=prompt, output=output)


_RENAMED = {"position": "step_idx", "min_tokens": "min_dec_len"}
LISTS = ("eos_token_ids", "stop_seqs", "stop_seqs_len", "bad_words")
"""The rows' columns with more than one number a row."""
STATE_FIELDS = {n: _RENAMED.get(n, n) for n in SamplingRows.__slots__ if n not in ("prompt", "output")}
"""The rows' columns, each with its field in the state: the fields of a slot that a step reads to sample for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """One token a row.

    - ``tokens`` int64 ``[n]``; -1 in a row of ``errors``.
    - ``token_ids`` int64 and ``logprobs`` float32 ``[n, K + 1]``: column 0 the sampled token, then the K best in
      descending order, equal ones by id. They are of the raw logits: before penalties, masks, temperature and
      truncation. Columns past the vocabulary, and rows of ``errors``, are -1 and 0.0 (as in an empty slot).
    - ``ranks`` int32 ``[n]``: place of the sampled token in that descending order, from 1; 0 in a row of ``errors``.
      These three are None if no log-probabilities were requested.
    - ``margins`` float64 ``[n]``, the distance of the choice from another one. Greedy (temperature 0 or top_k 1): the
      gap of the two best final logits, infinite for a lone token. Drawn: the distance of u to the nearest edge of the
      token's interval in the cumulative distribution; it does not cover the distance to the border of the truncation.
      0 in a row of ``errors``.
    - ``errors``: row to error text (NaN or +inf in its logits, every token masked). Only that row fails.
    """

    tokens: Int64s
    token_ids: Int64s | None
    logprobs: Float32s | None
    ranks: Int32s | None
    margins: Float64s
    errors: Mapping[int, str]
