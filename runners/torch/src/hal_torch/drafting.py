"""Drafts on the device: looked up in each request's own tokens, and verified against the sampled tokens.

The rules are those of ``hal_engine.proposers.ngram`` and of ``--acceptance exact``: drafts change no token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hal_core import StateConfig
from torch import Tensor
from torch.nn import functional

FIELDS = (
    *("token_ids", "prompt_lens", "step_idx", "max_dec_len", "blocks_num", "seq_lens_this_time", "seq_lens_encoder"),
    *("stop_flags", "accept_num", "accept_tokens", "draft_num", "draft_tokens"),
)
"""Fields of the state that are read and written."""
LONGEST = 3
"""Most tokens that are looked up."""

Fields = Mapping[str, Tensor]


def accepted(tokens: Tensor, sound: Tensor, fed: Tensor, drafts: Tensor) -> Tensor:
    """Return the number of tokens for each slot, int64 ``[slots]``: those that confirm its drafts, and one more.

    ``tokens``, ``sound``, ``fed`` ``[slots, 1 + drafts]``: the sampled token of each row, whether it is valid, and
    whether the row was fed. ``drafts``: the tokens fed to the rows after the first.
    """
    right = sound[:, :-1] & fed[:, 1:] & (tokens[:, :-1] == drafts[:, : tokens.shape[1] - 1])
    confirmed = right.long().cumprod(1).sum(1)
    return confirmed + sound.gather(1, confirmed[:, None])[:, 0]


def with_drafts(fields: Fields) -> Tensor:
    """Return a copy of ``token_ids`` with the drafts after each slot's known tokens."""
    tokens, drafts = fields["token_ids"], fields["draft_tokens"]
    number = torch.arange(drafts.shape[1], device=tokens.device)
    at = ((fields["prompt_lens"] + fields["step_idx"])[:, None] + number).clamp(max=tokens.shape[1] - 1)
    there = number < fields["draft_num"][:, None]
    return tokens.scatter(1, at, torch.where(there, drafts, tokens.gather(1, at)))


def draft(fields: Fields, sizes: StateConfig) -> None:
    """Give each slot that continues to decode drafts for its next step: the tokens that followed its last
    :data:`LONGEST` tokens (else fewer) the last time. A copy that reaches the end continues with its own tokens."""
    room = _room(fields, sizes)
    going = room >= 0
    tokens, known = fields["token_ids"], fields["prompt_lens"] + fields["step_idx"]
    begin, matched = _look_up(tokens, known)
    count = torch.where(matched > 0, room, 0)
    number = torch.arange(sizes.max_draft_tokens, device=tokens.device)
    period = (known - begin).clamp(min=1)[:, None]
    copied = tokens.gather(1, (begin[:, None] + number % period).clamp(max=tokens.shape[1] - 1))
    copied = torch.where(number < count[:, None], copied, -1)
    for name, made in (("draft_tokens", copied), ("draft_num", count), ("seq_lens_this_time", 1 + count)):
        field = fields[name]
        chosen = going[:, None] if field.dim() == 2 else going
        field.copy_(torch.where(chosen, made.to(field.dtype), field))


def _room(fields: Fields, sizes: StateConfig) -> Tensor:
    """Return the most drafts that each slot has room for; -1 for one that does not continue to decode."""
    going = (fields["stop_flags"] == 0) & (fields["seq_lens_this_time"] == 1) & (fields["seq_lens_encoder"] == 0)
    going &= fields["accept_num"] > 0
    generated, known = fields["step_idx"], fields["prompt_lens"] + fields["step_idx"]
    left = torch.minimum(fields["max_dec_len"] - generated, sizes.max_model_len - known) - 1
    covered = fields["blocks_num"] * sizes.block_size - known
    return torch.where(going, torch.minimum(left, covered).clamp(0, sizes.max_draft_tokens), -1)


def _look_up(tokens: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position after the longest, then latest, earlier match of a slot's last tokens, and the length of the
    match; int64 ``[slots]`` each."""
    length = tokens.shape[1]
    place = torch.arange(length, device=tokens.device)
    runs, matched = torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.int32)
    for back in range(1, LONGEST + 1):
        tail = tokens.gather(1, (known - back).clamp(min=0)[:, None])
        same = functional.pad(tokens == tail, (back, 0))[:, :length]
        runs = runs & same
        matched += runs
    matched = torch.where(place < known[:, None], matched, 0)
    best = (matched.long() * length + place).amax(1)
    return best % length, best // length
