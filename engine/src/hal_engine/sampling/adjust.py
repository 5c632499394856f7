"""Penalties and masks, applied to the model's logits before sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
from hal_core import InvalidValue

from .rows import Bools, Float32s, History, Int64s, SamplingRows, Tokens

_LARGEST = float(np.finfo(np.float32).max)


def needs_history(repetition: Float32s, frequency: Float32s, presence: Float32s) -> Bools:
    """Return which rows have a penalty, and so need their prompt's and generated tokens; bool ``[n]``."""
    needed: Bools = (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)
    return needed


def adjust(logits: Float32s, rows: SamplingRows) -> Float32s:
    """Return a copy of ``logits`` with penalties and masks applied; masked tokens are -inf. Without any for these rows,
    return ``logits`` itself."""
    penalized = np.flatnonzero(needs_history(rows.repetition_penalty, rows.frequency_penalty, rows.presence_penalty))
    early = rows.position < rows.min_tokens
    if not len(penalized) and not rows.bad_words_num.any() and not early.any():
        return logits
    adjusted = logits.copy()
    for row in penalized.tolist():
        _penalize(adjusted, rows, row)
    _mask(adjusted, rows.bad_words, _counted(rows.bad_words_num, rows.bad_words.shape[1]))
    if early.any():
        _mask(adjusted, rows.eos_token_ids, _counted(rows.eos_num, rows.eos_token_ids.shape[1]) & early[:, None])
        sequences = rows.stop_seqs_len.shape[1]
        single = _counted(rows.stop_seqs_num, sequences) & (rows.stop_seqs_len == 1) & early[:, None]
        length = rows.stop_seqs.shape[1] // max(1, sequences)
        _mask(adjusted, rows.stop_seqs[:, :: max(1, length)][:, :sequences], single)
    return adjusted


def _counted(counts: np.ndarray[Any, np.dtype[np.int32]], width: int) -> Bools:
    """Return the valid entries of a padded list, bool ``[n, width]``."""
    return np.arange(width) < counts[:, None]


def _mask(logits: Float32s, ids: Int64s, chosen: Bools) -> None:
    if not chosen.any():
        return
    rows, columns = np.nonzero(chosen & (ids >= 0) & (ids < logits.shape[1]))
    logits[rows, ids[rows, columns]] = -np.inf


def _penalize(logits: Float32s, rows: SamplingRows, row: int) -> None:
    """Apply repetition, then frequency and presence penalties, in float64, rounded once.

    Repetition (Keskar et al. 2019, "CTRL", section 4.1; divides positive logits and multiplies other ones, as
    transformers' ``RepetitionPenaltyLogitsProcessor`` does) counts prompt and generated tokens, each once. Frequency
    and presence count only generated tokens: ``logit - count * frequency - (count > 0) * presence`` (OpenAI API
    reference, "frequency and presence penalties").
    """
    vocab = logits.shape[1]
    counts = np.bincount(_history(rows.output, "output", row, vocab), minlength=vocab)
    seen = counts > 0
    seen[_history(rows.prompt, "prompt", row, vocab)] = True
    seen &= logits[row] > -np.inf
    ids = np.flatnonzero(seen)
    values, times = logits[row, ids].astype(np.float64), counts[ids]
    repetition = float(rows.repetition_penalty[row])
    values = np.where(values > 0.0, values / repetition, values * repetition)
    values -= times * float(rows.frequency_penalty[row])
    values -= (times > 0) * float(rows.presence_penalty[row])
    logits[row, ids] = np.clip(values, -_LARGEST, _LARGEST)


def _history(history: History, name: str, row: int, vocab: int) -> Tokens:
    """Return the row's tokens of the prompt or the output that are in the vocabulary."""
    tokens = None if history is None else history[row]
    if tokens is None:
        raise InvalidValue(
            f"row {row} has a penalty but no tokens to apply it to",
            cure="give its token ids (an empty array if there are none)",
            argument=f"rows.{name}",
        )
    inside = (tokens >= 0) & (tokens < vocab)
    known: Tokens = tokens if inside.all() else tokens[inside]
    return known
