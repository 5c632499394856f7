"""The device's work of a step on the slot state: layers over packed prompts and decoding rows, then a token a slot.

Both parts have fixed shapes and read the state where it is, so each is a CUDA graph where it is captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .adjusting import FIELDS
from .attention import Kernels, Prompts, Rows, Tokens, lowest
from .plan import Parts, Size
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


class Steps:
    """Launches of work on one state with one decoder; ``codes`` uint8 ``[slots]``: what is wrong with a slot's step
    (:data:`hal_torch.sampling.TROUBLES`), whose ``stop_flags`` are set then."""

    def __init__(self, state: SlotState, decoder: Decoder, kernels: Kernels) -> None:
        self._decoder, self._kernels, self._size = decoder, kernels, state.sizes.block_size
        self._slots, self._alternatives = state.sizes.num_slots, state.sizes.max_logprobs
        self._fields = {name: state.tensor(name, "torch") for name in {*_COLUMNS, *_WIDE, *FIELDS}}
        for name in self._fields.keys() - {*_WIDE}:
            self._fields[name] = self._fields[name][:, 0]
        self._topk = [state.tensor(name, "torch") for name in _TOPK]
        made = {"device": decoder.device}
        self.codes = torch.zeros(self._slots, dtype=torch.uint8, **made)
        self._runs = torch.zeros(self._slots, dtype=torch.bool, **made)
        self._hidden = torch.zeros((self._slots, decoder.config.hidden_size), dtype=decoder.dtype, **made)

    def layers(self, line: Tensor | None, size: Size, *, decodes: bool) -> None:
        """Run the layers over the packed prompts of a plan (:func:`hal_torch.plan.packed`) and, if ``decodes``, one
        token of each slot that decodes; what is sampled of is kept for :meth:`sample`."""
        plan = None if line is None else Parts.of(line, size, self._slots)
        made, stopped = [], self._fields["stop_flags"] != 0
        prompts = rows = None
        if plan is not None:
            made.append(self._prompt_tokens(plan, stopped))
            prompts = self._seen(plan, made[0][1])
        if decodes:
            runs = (self._fields["seq_lens_this_time"] > 0) & (self._fields["seq_lens_encoder"] == 0) & ~stopped
            made.append(self._row_tokens(runs))
            rows = Rows(self._fields["block_tables"], made[-1][1])
        ids, positions, places = (torch.cat(columns) for columns in zip(*made, strict=True))
        bad = torch.zeros(len(ids), dtype=torch.uint8, device=ids.device)
        tokens = Tokens(ids, positions, places, bad, size.tokens, prompts, rows)
        hidden = self._decoder.run(tokens, self._kernels)
        self._keep(hidden[size.tokens :], hidden, plan, stopped, runs if decodes else None)
        self._mark(bad, positions, plan, size.tokens, decodes=decodes)

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

    def nothing(self) -> None:
        """The tokens of a step that samples none."""
        self._fields["sampled_token_ids"].fill_(-1)

    def _prompt_tokens(self, plan: Parts, stopped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slots = plan.slots.long()
        positions = torch.where(stopped[slots], -1, plan.positions).long()
        ids = self._known(self._fields["token_ids"][slots, positions.clamp(min=0)])
        return ids, positions, self._places(slots, positions, self._decoder.nobody)

    def _row_tokens(self, runs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.where(runs, self._fields["seq_lens_decoder"], -1).long()
        ids = self._known(torch.where(runs, self._fields["next_tokens"], 0))
        every = torch.arange(self._slots, device=runs.device)
        return ids, positions, self._places(every, positions, self._decoder.nobody)

    def _seen(self, plan: Parts, positions: Tensor) -> Prompts:
        """Which keys are gathered, and which of them each token sees: those of its own slot up to itself."""
        places = self._places(plan.key_slots.long(), plan.key_positions.long(), self._decoder.nobody + 1)
        bias = None
        if not self._kernels.packs:
            sees = (plan.slots[:, None] == plan.key_slots) & (plan.key_positions <= positions[:, None])
            sees &= plan.key_positions >= 0
            bias = torch.zeros(sees.shape, dtype=self._decoder.dtype, device=positions.device)
            bias.masked_fill_(~sees, lowest(bias.dtype))
        return Prompts(places, (plan.token_ends, plan.key_ends), bias)

    def _places(self, slots: Tensor, positions: Tensor, otherwise: int) -> Tensor:
        """Where the cache has these positions of these slots; below 0, or without a block, in block ``otherwise``."""
        at = positions.clamp(min=0)
        block = self._fields["block_tables"][slots, at // self._size].long()
        block = torch.where((positions < 0) | (block < 0), otherwise, block)
        return block * self._size + at % self._size

    def _known(self, ids: Tensor) -> Tensor:
        """Token ids within the vocabulary: an empty slot has -1."""
        return ids.clamp(0, self._decoder.config.vocab_size - 1)

    def _keep(self, rows: Tensor, hidden: Tensor, plan: Parts | None, stopped: Tensor, runs: Tensor | None) -> None:
        """Keep the hidden state of each slot that is given a token: of ``rows`` those that decode."""
        found = rows
        if plan is not None:
            last = plan.last.long()
            gives = (last >= 0) & ~stopped
            prompted = hidden[last.clamp(min=0)]
            found = prompted if runs is None else torch.where(gives[:, None], prompted, rows)
            runs = gives if runs is None else gives | runs
        self._hidden.copy_(found)
        self._runs.copy_(runs)

    def _mark(self, bad: Tensor, positions: Tensor, plan: Parts | None, tokens: int, *, decodes: bool) -> None:
        """Stop the slots that have a token whose keys or values are no use."""
        wrong = ((bad != 0) & (positions >= 0)).int()
        count = torch.zeros(self._slots, dtype=torch.int32, device=bad.device)
        if plan is not None:
            count.index_add_(0, plan.slots.long(), wrong[:tokens])
        if decodes:
            count += wrong[tokens:]
        self.codes.copy_(count > 0)
        self._fields["stop_flags"].logical_or_(count > 0)
