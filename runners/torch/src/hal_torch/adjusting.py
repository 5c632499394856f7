"""Penalties and masks on the device, as in ``hal_engine.sampling.adjust``, from the token fields of the state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

FIELDS = (
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "prompt_lens", "step_idx", "min_dec_len"),
    *("token_ids", "bad_words", "bad_words_num", "eos_token_ids", "eos_num"),
    *("stop_seqs", "stop_seqs_len", "stop_seqs_num"),
)
"""Fields of the state that are read."""


def adjust(logits: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    """A copy of float32 ``[n, vocab]`` with penalties and masks applied; masked tokens are -inf."""
    adjusted = _penalized(logits, fields)
    ids, chosen = _masked(fields)
    return torch.where(_counts(ids, chosen, logits.shape[1]) > 0, float("-inf"), adjusted)


def _penalized(logits: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    """Repetition over prompt and generated tokens, then frequency and presence over generated ones, in float64, rounded
    once."""
    repetition, frequency, presence = (
        fields[f"{name}_penalty"].double()[:, None] for name in ("repetition", "frequency", "presence")
    )
    ids, vocab = fields["token_ids"], logits.shape[1]
    at, begin = torch.arange(ids.shape[1], device=ids.device), fields["prompt_lens"][:, None]
    known = at < begin + fields["step_idx"][:, None]
    times = _counts(ids, known & (at >= begin), vocab)
    values = logits.double()
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - times * frequency - (times > 0) * presence
    limit = torch.finfo(torch.float32).max
    rows = (repetition != 1) | (frequency != 0) | (presence != 0)
    changed = rows & (_counts(ids, known, vocab) > 0) & (logits > float("-inf"))
    return torch.where(changed, values.clamp(-limit, limit).float(), logits)


def _masked(fields: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Ids ``[n, any]`` and which of them may not come: bad words; below the least length end tokens and stop sequences
    of one token."""
    early = (fields["step_idx"] < fields["min_dec_len"])[:, None]
    lengths = fields["stop_seqs_len"]
    single = fields["stop_seqs"][:, :: fields["stop_seqs"].shape[1] // lengths.shape[1]]
    words, ends = fields["bad_words"], fields["eos_token_ids"]
    chosen = [
        _counted(words, fields["bad_words_num"]),
        _counted(ends, fields["eos_num"]) & early,
        _counted(lengths, fields["stop_seqs_num"]) & (lengths == 1) & early,
    ]
    return torch.cat([words, ends, single], 1), torch.cat(chosen, 1)


def _counted(padded: Tensor, counts: Tensor) -> Tensor:
    """Return the entries of a padded list that count."""
    return torch.arange(padded.shape[1], device=padded.device) < counts[:, None]


def _counts(ids: Tensor, chosen: Tensor, vocab: int) -> Tensor:
    """int32 ``[n, vocab]``: how often each token is among the chosen ids; one outside the vocabulary does not count."""
    inside = chosen & (ids >= 0) & (ids < vocab)
    counts = torch.zeros((len(ids), vocab), dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(1, ids.clamp(0, vocab - 1), inside.int())
