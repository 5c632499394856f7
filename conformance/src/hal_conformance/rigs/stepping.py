"""Drawn steps of a worker: the sampled tokens, the drafts, the order of slots, and the output."""

from __future__ import annotations

from typing import Any

import numpy as np
from hal_core.group import ALONE, Group
from hal_core.slots.fields import SplitRole, StateConfig
from hal_core.slots.step import Step
from hypothesis import strategies as st

from ..draw.requests import draw_array, orders, row, tokens, wide_tokens
from ..harness import backdoor
from ..kit import Draw
from .rig import Rig


def draw_step(draw: Draw, rig: Rig, *, speculative: bool | None = None, group: Group = ALONE) -> Step:
    """Return a step over every slot with a request or a departed one, and perhaps some empty slots."""
    named = {*rig.model.residents, *rig.model.leavers}
    empty = [s for s in range(rig.sizes.num_slots) if s not in named and not rig.model.get("request_serial", s)]
    if empty:
        named |= set(draw(st.lists(st.sampled_from(empty), unique=True), "empty slots in the batch"))
    order = draw(orders([*named]), "slots in batch-id order")
    if speculative is None:
        speculative = rig.drafted or (rig.sizes.max_draft_tokens > 0 and draw(st.booleans(), "speculative"))
    logprobs = draw(st.none() | st.integers(0, rig.sizes.max_logprobs), "log-probabilities")
    return rig.step(order, speculative=speculative, logprobs=logprobs, group=group)


def draw_sampling(draw: Draw, rig: Rig, step: Step) -> None:
    """Write the sampler's fields before the step advances, in every slot: idle slots hold garbage that must not be
    read."""
    n, size = rig.sizes.num_slots, rig.sizes
    fields: dict[str, Any] = {}
    if step.speculative:
        fields["accept_tokens"] = draw_array(draw, (n, size.max_accept), tokens, "int64", "accepted tokens")
        fields["accept_num"] = draw_array(draw, (n,), st.integers(0, size.max_accept), "int32", "accepted")
    else:
        fields["sampled_token_ids"] = draw_array(draw, (n,), wide_tokens, "int64", "sampled tokens")
    if step.logprobs is not None:
        fields |= alternatives(draw, size, fields)
    for field in rig.fields:
        if field.value is None:  # the step's own
            place = rig.state.layout.fields[field.name]
            bits = draw_array(draw, (n, place.stride), st.integers(0, 1), "uint8", f"bytes of {field.name}")
            fields[field.name] = bits.view(place.field.dtype.storage)
    rig.poke(fields)  # not waited for: the next work is on the same stream


def alternatives(draw: Draw, size: StateConfig, sampled: dict[str, Any]) -> dict[str, Any]:
    """Return log-probabilities of each token; column 0 is the sampled one."""
    shape = (size.num_slots, size.max_accept, size.max_logprobs + 1)
    count = int(np.prod(shape))
    first = draw(st.integers(0, 1000), "first alternative")
    ids = (np.arange(count, dtype=np.int64) + first).reshape(shape)
    chosen = next(iter(sampled[name] for name in ("accept_tokens", "sampled_token_ids") if name in sampled))
    chosen = chosen.reshape(size.num_slots, -1)
    ids[:, : chosen.shape[1], 0] = chosen
    return {
        "topk_token_ids": ids,
        "topk_logprobs": -(np.arange(count, dtype=np.float32) + 1).reshape(shape) / 8,
        "topk_ranks": np.arange(size.num_slots * size.max_accept, dtype=np.int32) + first,
    }


def draftable(rig: Rig) -> list[int]:
    """Return the slots that may get drafts now: they ran in the last step and have not changed since."""
    if rig.advanced is None or rig.sizes.max_draft_tokens == 0:
        return []
    order = rig.advanced.orders[rig.name].tolist()
    return [slot for slot in sorted(order) if _goes_on(rig, slot)]


def _goes_on(rig: Rig, slot: int) -> bool:
    """Return True for a slot that feeds only its next token, or whose first token goes to a decode node."""
    resident = rig.model.residents.get(slot)
    if resident is None or resident.admission_id != rig.ran.get(slot) or rig.model.get("seq_lens_encoder", slot):
        return False
    if resident.request.role is SplitRole.PREFILL and rig.model.get("stop_flags", slot):
        return bool(rig.model.get("accept_num", slot)) and not rig.model.get("stop_reason", slot)
    return bool(rig.model.get("seq_lens_this_time", slot) == 1)


def draw_proposal(draw: Draw, rig: Rig) -> None:
    """Set drafts, as a proposer may after the step has advanced, for slots that continue."""
    if rig.sizes.max_draft_tokens == 0 or not draw(st.booleans(), "a proposer ran"):
        return
    drafts = {slot: draw(row(0, rig.sizes.max_draft_tokens), f"drafts of slot {slot}") for slot in draftable(rig)}
    rig.propose(drafts)  # not waited for: the next work is on the same stream


def run_step(draw: Draw, rig: Rig, *, speculative: bool | None = None) -> Step:
    """Run one whole step up to its output: sample, update, compare, propose."""
    __tracebackhide__ = True
    step = draw_step(draw, rig, speculative=speculative)
    draw_sampling(draw, rig, step)
    rig.update_inputs(step).wait(backdoor.PATIENCE)
    rig.check(f"update_inputs of step {step.number}")
    draw_proposal(draw, rig)
    return step


def free_ended(rig: Rig) -> None:
    """Release the slots whose requests have ended."""
    rig.release([slot for slot in [*rig.model.residents] if rig.model.get("stop_flags", slot)])
