"""The device's work of a step on the slot state: layers over packed prompts and decoding rows, then tokens, drafts.

A step is a few parts, one after the other. Each has fixed shapes and reads the state in place, so each can be captured
as a CUDA graph. Transfers between host and device use one of a few pinned buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, assert_never

import torch
from torch import Tensor

from . import drafting
from .adjusting import FIELDS
from .attention import Kernels, Pair, Prompts, Tokens, lowest
from .plan import NOTHING, Piece, Plan, Size, packed
from .sampling import Want, choose, log_probabilities

if TYPE_CHECKING:
    from hal_core import SlotState

    from .model import Decoder

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "step_idx", "logprobs_num")
_COLUMNS = (
    *("next_tokens", "seq_lens_this_time", "seq_lens_encoder", "seq_lens_decoder", "stop_flags", "sampled_token_ids"),
    *_SAMPLING,
)
_WIDE = (
    *("token_ids", "block_tables", "bad_words", "eos_token_ids", "stop_seqs", "stop_seqs_len", "accept_tokens"),
    "draft_tokens",
)
_TOPK = ("topk_token_ids", "topk_logprobs", "topk_ranks")


UNDER_WAY = 3
"""Steps whose results may not have been read yet: a record is made before the next step but one is launched."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Upload the plan of the step's pieces from the pinned place of this turn."""

    turn: int


@dataclass(frozen=True, slots=True)
class Layers:
    """Run the layers over packed prompts of this size and, if ``decodes``, the next token and the drafts of each slot
    that decodes."""

    size: Size
    decodes: bool


class Still(Enum):
    """Placeholders for layers, and for sampling, in a step that needs neither."""

    NO_LAYERS = 0
    NO_TOKENS = 1


@dataclass(frozen=True, slots=True)
class Tell:
    """Copy each slot's error code to the pinned buffer of this turn."""

    turn: int


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft after the step's tokens, after ``update_inputs``."""


Part = Feed | Layers | Still | Want | Tell | Draft


class Steps:
    """Launches of work on one state with one decoder. ``codes`` uint8 ``[slots]``: error code of a slot's step
    (:data:`hal_torch.sampling.TROUBLES`), whose ``stop_flags`` are set then. ``codes_of_turn``: the codes of each turn,
    as bytes.

    A slot has ``each`` rows that decode: its next token and as many drafts as the state has room for, fed or not.
    """

    def __init__(self, state: SlotState, decoder: Decoder, kernels: Kernels) -> None:
        self._decoder, self._kernels, self._size = decoder, kernels, state.sizes.block_size
        self._slots, self._alternatives = state.sizes.num_slots, state.sizes.max_logprobs
        self.sizes, self.each = state.sizes, state.sizes.max_accept
        self._fields = {name: state.tensor(name, "torch") for name in {*_COLUMNS, *_WIDE, *FIELDS, *drafting.FIELDS}}
        for name in self._fields.keys() - {*_WIDE}:
            self._fields[name] = self._fields[name][:, 0]
        self._topk = [state.tensor(name, "torch") for name in _TOPK]
        made, pinned = {"device": decoder.device}, {"pin_memory": decoder.device.type == "cuda"}
        self.codes = torch.zeros(self._slots, dtype=torch.uint8, **made)
        self._bad, self._runs = (torch.zeros((self._slots, self.each), dtype=torch.bool, **made) for _ in range(2))
        self._hidden = torch.zeros((self._slots, self.each, decoder.config.hidden_size), dtype=decoder.dtype, **made)
        empty = torch.tensor(packed((), self._slots), dtype=torch.int32)
        self._line = empty.to(decoder.device)
        self._lines = [torch.empty_like(empty, **pinned).copy_(empty) for _ in range(UNDER_WAY)]
        self._places = [memoryview(line.numpy()) for line in self._lines]
        self._known = [torch.zeros(self._slots, dtype=torch.uint8, **pinned) for _ in range(UNDER_WAY)]
        self.codes_of_turn = [memoryview(known.numpy()) for known in self._known]

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
            self._give(torch.full_like(self._fields["accept_tokens"], -1), torch.zeros_like(self._fields["step_idx"]))
        elif isinstance(part, Draft):
            drafting.draft(self._fields, self.sizes)
        else:
            assert_never(part)

    def _layers(self, size: Size, *, decodes: bool) -> None:
        """Keep the hidden states that :meth:`sample` samples from."""
        made, stopped = [], self._fields["stop_flags"] != 0
        prompts = rows = last = fed = runs = None
        if size != NOTHING:
            plan = Plan.of(self._line, self._slots)
            last, fed = plan.last.long(), self._spread(plan.token_ends, plan.starts, plan, size.tokens, size.pieces)
            made.append(self._prompt_tokens(*fed, stopped))
            prompts = self._seen(plan, size, fed[0], made[0][1])
        if decodes:
            runs = self._decoding(stopped)
            made.append(self._row_tokens(runs))
            rows = self._kernels.rows(self._fields["block_tables"], made[-1][1], self._decoder.keys[0])
        ids, positions, places = (torch.cat(columns) for columns in zip(*made, strict=True))
        bad = torch.zeros(len(ids), dtype=torch.uint8, device=ids.device)
        tokens = Tokens(ids, positions, places, bad, size.tokens, prompts, rows)
        hidden = self._decoder.run(tokens, self._kernels)
        self._keep(hidden[size.tokens :], hidden, last, stopped, runs)
        self._mark(bad, positions, None if fed is None else fed[0], size.tokens, decodes=decodes)

    def sample(self, want: Want) -> None:
        """Sample tokens for each kept slot, with ``want`` as the most that is needed: one, and those before it that
        confirm drafts; -1 otherwise."""
        logits, fields = self._decoder.logits(self._hidden.flatten(0, 1)), self._row_fields(want)
        chosen = choose(logits, want, fields)
        tokens, found = chosen.tokens.view(-1, self.each), chosen.codes.view(-1, self.each)
        sound = self._runs & ~self._bad & (found == 0)
        counts = drafting.accepted(tokens, sound, self._runs, self._fields["draft_tokens"])
        # An invalid row after valid ones ends the run of tokens; the next step begins with it as its first.
        useless = self._runs[:, 0] & (self.codes == 0) & (counts == 0)
        self.codes.copy_(torch.where(useless, found[:, 0], self.codes))
        counts = torch.where(self.codes == 0, counts, 0)
        tokens = torch.where(torch.arange(self.each, device=tokens.device) < counts[:, None], tokens, -1)
        self._give(tokens, counts)
        self._fields["stop_flags"].logical_or_(self.codes != 0)  # update_inputs does not change it
        if want.logprobs:
            alternatives = log_probabilities(logits, tokens.flatten(), fields["logprobs_num"], self._alternatives)
            for field, values in zip(self._topk, alternatives, strict=True):
                field.copy_(values.view(self._slots, -1))

    def _give(self, tokens: Tensor, counts: Tensor) -> None:
        """Write each slot's tokens: ``tokens`` ``[slots, each]``, -1 behind the first ``counts``."""
        if self.each == 1:
            self._fields["sampled_token_ids"].copy_(tokens[:, 0])
        else:
            self._fields["accept_tokens"].copy_(tokens)
            self._fields["accept_num"].copy_(counts)

    def _row_fields(self, want: Want) -> Mapping[str, Tensor]:
        """Return the sampling fields, by row: each draft advances a slot's position, and counts among its tokens."""
        if self.each == 1:
            return self._fields
        names = {*_SAMPLING, *(FIELDS if want.adjusts else ())}
        rows = {name: self._fields[name].repeat_interleave(self.each, 0) for name in names - {"token_ids"}}
        rows["step_idx"] = rows["step_idx"] + torch.arange(self.each, device=rows["seed"].device).repeat(self._slots)
        if want.adjusts:
            rows["token_ids"] = drafting.with_drafts(self._fields).repeat_interleave(self.each, 0)
        return rows

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

    def _decoding(self, stopped: Tensor) -> Tensor:
        """Which rows are fed, bool ``[slots, each]``."""
        decodes = (self._fields["seq_lens_encoder"] == 0) & ~stopped
        number = torch.arange(self.each, device=stopped.device)
        return decodes[:, None] & (number < self._fields["seq_lens_this_time"][:, None])

    def _row_tokens(self, runs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        number = torch.arange(self.each, device=runs.device)
        positions = torch.where(runs, self._fields["seq_lens_decoder"][:, None] + number, -1).long()
        behind = self._fields["draft_tokens"][:, : self.each - 1]
        ids = torch.where(runs, torch.cat([self._fields["next_tokens"][:, None], behind], 1), 0)
        every = torch.arange(self._slots, device=runs.device)[:, None].expand(-1, self.each)
        places = self._cache_places(every, positions, self._decoder.nobody)
        return self._known_ids(ids).flatten(), positions.flatten(), places.flatten()

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
        """Keep the hidden state of each row that gives a token: of ``rows`` those that decode, and the last of a
        prompt as its slot's first."""
        if runs is None:
            self._runs.zero_()
        else:
            self._runs.copy_(runs)
            self._hidden.copy_(rows.view_as(self._hidden))
        if last is not None:
            gives = (last >= 0) & ~stopped
            first = self._hidden[:, 0]
            first.copy_(torch.where(gives[:, None], hidden[last.clamp(min=0)], first))
            self._runs[:, 0].logical_or_(gives)

    def _mark(self, bad: Tensor, positions: Tensor, slots: Tensor | None, tokens: int, *, decodes: bool) -> None:
        """Stop the slots that have a token with invalid keys or values, except drafts, which may be refused. ``slots``:
        of the packed tokens."""
        wrong = ((bad != 0) & (positions >= 0)).int()
        count = torch.zeros((self._slots, self.each), dtype=torch.int32, device=bad.device)
        if slots is not None:
            count[:, 0].index_add_(0, slots, wrong[:tokens])
        if decodes:
            count += wrong[tokens:].view_as(count)
        self._bad.copy_(count > 0)
        self.codes.copy_(self._bad[:, 0])
        self._fields["stop_flags"].logical_or_(self._bad[:, 0])
