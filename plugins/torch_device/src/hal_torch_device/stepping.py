"""``update_inputs`` (:mod:`hal_core.slots.update`) as torch operations on all slots at once, in stream order.

Every shape is known on the host and no value is read there, so a step can be held, or be captured into a graph. A loop
over the tokens that a step may accept, one without drafts, makes a fixed number of launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hal_core import FinishReason, SplitRole, StateConfig
from torch import Tensor


class SteppedSlots:
    """The fields of a step, each ``[slots, width]`` over the state's memory."""

    def __init__(self, fields: Mapping[str, Tensor], sizes: StateConfig) -> None:
        self.fields, self.sizes = fields, sizes
        self.column = {name: tensor[:, 0] for name, tensor in fields.items()}
        device = fields["token_ids"].device
        self.ends = torch.arange(fields["eos_token_ids"].shape[1], device=device)
        self.sequences = torch.arange(fields["stop_seqs_len"].shape[1], device=device)
        self.places = torch.arange(sizes.max_stop_length, device=device)

    def update(self, *, speculative: bool) -> None:
        """Advance every slot in place; what it computes stands at the reference in NumPy."""
        column = self.column
        runs = ~column["stop_flags"].bool() & (column["seq_lens_this_time"] > 0)
        encoder = torch.where(runs, column["seq_lens_encoder"], 0)
        known = (column["prompt_lens"] + column["step_idx"]).long()
        feeds = encoder > 0
        prefilled = column["seq_lens_decoder"] + encoder
        gives = runs & (~feeds | (prefilled >= known))
        column["seq_lens_decoder"].copy_(torch.where(feeds, prefilled, column["seq_lens_decoder"]))
        accepted = gives.long()
        if speculative:
            given = column["accept_num"]
            bad = gives & ((given < 0) | (given > self.sizes.max_accept))
            given.masked_fill_(~gives, 0)
            gives = gives & ~bad
            column["stop_flags"].masked_fill_(bad, True)
            column["stop_reason"].masked_fill_(bad, int(FinishReason.ERROR))
            accepted = torch.where(gives, given, 0).long()
        taken = self._append(accepted, known, speculative=speculative)
        if not speculative:
            column["accept_num"].copy_(taken)
        else:
            column["accept_num"].copy_(torch.where(gives, taken, column["accept_num"]))
        column["seq_lens_decoder"].add_(torch.where(gives & ~feeds, taken, 0))
        column["step_idx"].add_(taken)
        goes_on = gives & ~column["stop_flags"].bool()
        column["seq_lens_this_time"].masked_fill_(runs & ~goes_on, 0).masked_fill_(goes_on, 1)
        column["seq_lens_encoder"].masked_fill_(runs, 0)
        column["draft_num"].masked_fill_(runs, 0)

    def load_kernels(self) -> None:
        """Make the operations of a step once, on slots of nobody's; see ``TorchPrimitives``."""
        fields = {
            name: torch.empty_strided((2, *one.shape[1:]), one.stride(), dtype=one.dtype, device=one.device).zero_()
            for name, one in self.fields.items()
        }
        for speculative in (False, True):
            SteppedSlots(fields, self.sizes).update(speculative=speculative)

    def _append(self, accepted: Tensor, known: Tensor, *, speculative: bool) -> Tensor:
        """Append the accepted tokens up to the first with which a slot stops; return the number that each took."""
        column, taken = self.column, torch.zeros_like(accepted)
        tokens = self.fields["accept_tokens"] if speculative else self.fields["sampled_token_ids"]
        handed_over = column["split_role"] == int(SplitRole.PREFILL)
        most, before = self.sizes.max_model_len, column["step_idx"].long()
        alive = accepted > 0
        for number in range(self.sizes.max_accept if speculative else 1):
            here = alive & (accepted > number)
            token, generated, total = tokens[:, number], before + number + 1, known + number + 1
            self._write_token(here, total - 1, token)
            column["next_tokens"].copy_(torch.where(here, token, column["next_tokens"]))
            stops = here & self._ends(token, generated, total) & (generated >= column["min_dec_len"])
            full = here & ((generated >= column["max_dec_len"]) | (total >= most))
            reason = torch.where(stops, int(FinishReason.STOP), int(FinishReason.LENGTH)).to(
                column["stop_reason"].dtype
            )
            column["stop_reason"].copy_(torch.where(stops | full, reason, column["stop_reason"]))
            over = stops | full | (here & handed_over)
            column["stop_flags"].masked_fill_(over, True)
            taken += here
            alive = here & ~over
        return taken

    def _write_token(self, here: Tensor, place: Tensor, token: Tensor) -> None:
        """Write one token a slot, where ``here`` is true, to its row at ``place``."""
        rows = self.fields["token_ids"]
        at = place.clamp(0, rows.shape[1] - 1)[:, None]
        rows.scatter_(1, at, torch.where(here[:, None], token[:, None].to(rows.dtype), rows.gather(1, at)))

    def _ends(self, token: Tensor, generated: Tensor, total: Tensor) -> Tensor:
        """Whether a slot's last token is an end token of its request, or its tokens end with a stop sequence."""
        column, fields = self.column, self.fields
        among = self.ends < column["eos_num"][:, None]
        ends = ((fields["eos_token_ids"] == token[:, None]) & among).any(1)
        slots, count, longest = total.shape[0], len(self.sequences), len(self.places)
        if not count or not longest:
            return ends
        rows = fields["token_ids"]
        lengths = fields["stop_seqs_len"].long()
        at = (total[:, None] - lengths)[:, :, None] + self.places
        found = rows.gather(1, at.clamp(0, rows.shape[1] - 1).reshape(slots, -1)).reshape(slots, count, longest)
        same = (found == fields["stop_seqs"].reshape(slots, count, longest)) | (self.places >= lengths[:, :, None])
        usable = (lengths > 0) & (lengths <= generated[:, None]) & (self.sequences < column["stop_seqs_num"][:, None])
        ended: Tensor = ends | (same.all(2) & usable).any(1)
        return ended


def slots_of(state: Any, tensor_of: Any, names: tuple[str, ...]) -> SteppedSlots:  # noqa: ANN401 (a state; a function)
    """Return the fields of a state, made once for it."""
    return SteppedSlots({name: tensor_of(state.view(name)) for name in names}, state.sizes)
