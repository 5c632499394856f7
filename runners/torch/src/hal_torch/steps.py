"""The device's work of a step on the slot state: layers over packed prompts and decoding rows, then a token a slot.

A step is a few parts, one after the other. Each has fixed shapes and reads the state where it is, so each is a CUDA
graph where it is captured; what a step brings from the host and takes there goes by one of a few pinned places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, assert_never

import torch
from torch import Tensor

from .adjusting import FIELDS
from .attention import Kernels, Pair, Prompts, Rows, Tokens, lowest
from .plan import NOTHING, Piece, Plan, Size, packed
from .sampling import Want, choose, log_probabilities

if TYPE_CHECKING:
    from hal_core import SlotState

    from .model import Decoder

_COLUMNS = (
    *("next_tokens", "seq_lens_this_time", "seq_lens_encoder", "seq_lens_decoder", "stop_flags", "step_idx"),
    *("temperature", "top_k", "top_p", "min_p", "seed", "logprobs_num", "sampled_token_ids"),
)
_WIDE = ("token_ids", "block_tables", "bad_words", "eos_token_ids", "stop_seqs", "stop_seqs_len")
_TOPK = ("topk_token_ids", "topk_logprobs", "topk_ranks")


UNDER_WAY = 3
"""Steps whose outcome may not have been read yet: a record is made before the next step but one is launched."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Upload the plan of the step's pieces from the pinned place of this turn."""

    turn: int


@dataclass(frozen=True, slots=True)
class Layers:
    """Run the layers over packed prompts of this size and, if ``decodes``, one token of each slot that decodes."""

    size: Size
    decodes: bool


class Still(Enum):
    """What a step has in place of layers, and in place of sampling, where it needs neither."""

    NO_LAYERS = 0
    NO_TOKENS = 1


@dataclass(frozen=True, slots=True)
class Tell:
    """Copy what is wrong with each slot to the pinned place of this turn."""

    turn: int


Part = Feed | Layers | Still | Want | Tell


class Steps:
    """Launches of work on one state with one decoder; ``codes`` uint8 ``[slots]``: what is wrong with a slot's step
    (:data:`hal_torch.sampling.TROUBLES`), whose ``stop_flags`` are set then; ``told``: those of each turn, as bytes."""

    def __init__(self, state: SlotState, decoder: Decoder, kernels: Kernels) -> None:
        self._decoder, self._kernels, self._size = decoder, kernels, state.sizes.block_size
        self._slots, self._alternatives = state.sizes.num_slots, state.sizes.max_logprobs
        self._fields = {name: state.tensor(name, "torch") for name in {*_COLUMNS, *_WIDE, *FIELDS}}
        for name in self._fields.keys() - {*_WIDE}:
            self._fields[name] = self._fields[name][:, 0]
        self._topk = [state.tensor(name, "torch") for name in _TOPK]
        made, pinned = {"device": decoder.device}, {"pin_memory": decoder.device.type == "cuda"}
        self.codes = torch.zeros(self._slots, dtype=torch.uint8, **made)
        self._runs = torch.zeros(self._slots, dtype=torch.bool, **made)
        self._hidden = torch.zeros((self._slots, decoder.config.hidden_size), dtype=decoder.dtype, **made)
        empty = torch.tensor(packed((), self._slots), dtype=torch.int32)
        self._line = empty.to(decoder.device)
        self._lines = [torch.empty_like(empty, **pinned).copy_(empty) for _ in range(UNDER_WAY)]
        self._places = [memoryview(line.numpy()) for line in self._lines]
        self._known = [torch.zeros(self._slots, dtype=torch.uint8, **pinned) for _ in range(UNDER_WAY)]
        self.told = [memoryview(known.numpy()) for known in self._known]

    def plan(self, pieces: Sequence[Piece], turn: int) -> Feed:
        """Put the plan of some pieces where the part that is returned uploads it from."""
        self._places[turn][:] = packed(pieces, self._slots)
        return Feed(turn)

    def run(self, part: Part) -> None:
        """Put the work of a part on torch's current stream."""
        if isinstance(part, Layers):
            self._layers(part.size, decodes=part.decodes)
        elif isinstance(part, Want):
            self.sample(part)
        elif isinstance(part, Feed):
            self._line.copy_(self._lines[part.turn], non_blocking=True)
        elif isinstance(part, Tell):
            self._known[part.turn].copy_(self.codes, non_blocking=True)
        elif part is Still.NO_LAYERS:
            self.codes.zero_()
        elif part is Still.NO_TOKENS:
            self._fields["sampled_token_ids"].fill_(-1)
        else:
            assert_never(part)

    def _layers(self, size: Size, *, decodes: bool) -> None:
        """What is sampled of is kept for :meth:`sample`."""
        made, stopped = [], self._fields["stop_flags"] != 0
        prompts = rows = last = fed = runs = None
        if size != NOTHING:
            plan = Plan.of(self._line, self._slots)
            last, fed = plan.last.long(), self._spread(plan.token_ends, plan.starts, plan, size.tokens, size.pieces)
            made.append(self._prompt_tokens(*fed, stopped))
            prompts = self._seen(plan, size, fed[0], made[0][1])
        if decodes:
            runs = (self._fields["seq_lens_this_time"] > 0) & (self._fields["seq_lens_encoder"] == 0) & ~stopped
            made.append(self._row_tokens(runs))
            rows = Rows(self._fields["block_tables"], made[-1][1])
        ids, positions, places = (torch.cat(columns) for columns in zip(*made, strict=True))
        bad = torch.zeros(len(ids), dtype=torch.uint8, device=ids.device)
        tokens = Tokens(ids, positions, places, bad, size.tokens, prompts, rows)
        hidden = self._decoder.run(tokens, self._kernels)
        self._keep(hidden[size.tokens :], hidden, last, stopped, runs)
        self._mark(bad, positions, None if fed is None else fed[0], size.tokens, decodes=decodes)

    def sample(self, want: Want) -> None:
        """A token for each slot that was kept, as ``want`` says at most; -1 for the others."""
        logits = self._decoder.logits(self._hidden)
        chosen = choose(logits, want, self._fields)
        codes = torch.where(self._runs & (self.codes == 0), chosen.codes, self.codes)
        sound = self._runs & (codes == 0)
        self.codes.copy_(codes)
        tokens = torch.where(sound, chosen.tokens, -1)
        self._fields["sampled_token_ids"].copy_(tokens)
        self._fields["stop_flags"].logical_or_(codes != 0)  # update_inputs leaves it as it is
        if want.logprobs:
            found = log_probabilities(logits, tokens, self._fields["logprobs_num"], self._alternatives)
            for field, values in zip(self._topk, found, strict=True):
                field[:, : values[0].numel()] = values.view(self._slots, -1)

    def _spread(self, ends: Tensor, starts: Tensor | None, plan: Plan, count: int, pieces: int) -> Pair:
        """The slot and the position of each of ``count`` packed tokens, or keys; what pads them has slot 0 and
        position -1. A token's piece is the first that ends behind it."""
        ends = ends[: pieces + 1]
        at = torch.arange(count, dtype=torch.int32, device=ends.device)
        piece = torch.searchsorted(ends[1:], at, right=True).clamp(max=pieces - 1)
        positions = at - ends[piece]
        if starts is not None:
            positions = positions + starts[piece]
        there = at < ends[-1]
        return torch.where(there, plan.slots[piece], 0).long(), torch.where(there, positions, -1).long()

    def _prompt_tokens(self, slots: Tensor, positions: Tensor, stopped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.where(stopped[slots], -1, positions)
        ids = self._known_ids(self._fields["token_ids"][slots, positions.clamp(min=0)])
        return ids, positions, self._cache_places(slots, positions, self._decoder.nobody)

    def _row_tokens(self, runs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.where(runs, self._fields["seq_lens_decoder"], -1).long()
        ids = self._known_ids(torch.where(runs, self._fields["next_tokens"], 0))
        every = torch.arange(self._slots, device=runs.device)
        return ids, positions, self._cache_places(every, positions, self._decoder.nobody)

    def _seen(self, plan: Plan, size: Size, slots: Tensor, positions: Tensor) -> Prompts:
        """Which keys are gathered, and which of them each token sees: those of its own slot up to itself."""
        key_slots, key_positions = self._spread(plan.key_ends, None, plan, size.keys, size.pieces)
        places = self._cache_places(key_slots, key_positions, self._decoder.nobody + 1)
        bias = None
        if not self._kernels.packs:
            sees = (slots[:, None] == key_slots) & (key_positions <= positions[:, None])
            sees &= key_positions >= 0
            bias = torch.zeros(sees.shape, dtype=self._decoder.dtype, device=positions.device)
            bias.masked_fill_(~sees, lowest(bias.dtype))
        ends = plan.token_ends[: size.pieces + 1], plan.key_ends[: size.pieces + 1]
        return Prompts(places, ends, bias)

    def _cache_places(self, slots: Tensor, positions: Tensor, otherwise: int) -> Tensor:
        """Where the cache has these positions of these slots; below 0, or without a block, in block ``otherwise``."""
        at = positions.clamp(min=0)
        block = self._fields["block_tables"][slots, at // self._size].long()
        block = torch.where((positions < 0) | (block < 0), otherwise, block)
        return block * self._size + at % self._size

    def _known_ids(self, ids: Tensor) -> Tensor:
        """Token ids within the vocabulary: an empty slot has -1."""
        return ids.clamp(0, self._decoder.config.vocab_size - 1)

    def _keep(self, rows: Tensor, hidden: Tensor, last: Tensor | None, stopped: Tensor, runs: Tensor | None) -> None:
        """Keep the hidden state of each slot that is given a token: of ``rows`` those that decode."""
        found = rows
        if last is not None:
            gives = (last >= 0) & ~stopped
            prompted = hidden[last.clamp(min=0)]
            found = prompted if runs is None else torch.where(gives[:, None], prompted, rows)
            runs = gives if runs is None else gives | runs
        self._hidden.copy_(found)
        self._runs.copy_(runs)

    def _mark(self, bad: Tensor, positions: Tensor, slots: Tensor | None, tokens: int, *, decodes: bool) -> None:
        """Stop the slots that have a token whose keys or values are no use; ``slots``: of the packed tokens."""
        wrong = ((bad != 0) & (positions >= 0)).int()
        count = torch.zeros(self._slots, dtype=torch.int32, device=bad.device)
        if slots is not None:
            count.index_add_(0, slots, wrong[:tokens])
        if decodes:
            count += wrong[tokens:]
        self.codes.copy_(count > 0)
        self._fields["stop_flags"].logical_or_(count > 0)
