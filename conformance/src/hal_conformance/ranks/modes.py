"""Work of ranks for the test of the modes of decoding: each rank draws its own tokens, as FastDeploy's ranks did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.output.sinks import MemorySink
from hal_core.slots.fields import StateConfig
from hal_core.slots.step import Step

from ..harness import backdoor
from .processes import Rank
from .work import Groups, Met, content, contract_error, filled, group_of, opened

if TYPE_CHECKING:
    from hal_core.runtime.bound import BoundDevice
    from hal_core.slots.state import SlotState

    from ..harness.subject import Recipe

OWN = ("request_serial", "topk_token_ids", "topk_logprobs", "topk_ranks")
"""Fields in which ranks may differ: admission ids are counted per process, log-probabilities are not broadcast."""


@dataclass
class Stepped:
    """A rank's data after each step: every shared field as bytes, and its record."""

    fields: list[dict[str, bytes]] = field(default_factory=list)
    known: list[list[int]] = field(default_factory=list)
    error: Met | None = None


def step_apart(
    rank: Rank, recipe: Recipe, groups: Groups, sizes: StateConfig, kinds: Sequence[bool], proposes: bool
) -> Stepped:
    """Run a step for each of ``kinds`` (True: it verifies drafts); every rank samples its own tokens.

    With ``proposes`` a slot's drafts are its last token again: the ranks agree on them as far as they agree on that
    token.
    """
    group, sink, stepped = group_of(rank, groups), MemorySink(), Stepped()
    order = np.arange(sizes.num_slots, dtype=np.int32)
    with opened(recipe) as bound:
        stream = bound.default_stream
        state = filled(bound, sizes)

        def one_step(number: int, speculative: bool) -> None:
            draw(bound, state, number, rank.rank, speculative)
            bound.broadcast_tokens(state=state, group=group, stream=stream).wait(backdoor.PATIENCE)
            step = Step(number, {"target": order}, speculative=speculative, group=group)
            bound.update_inputs(state=state, step=step, stream=stream).wait(backdoor.PATIENCE)
            ticket: Any = bound.save_output(state=state, step=step, sink=sink, stream=stream)
            stepped.known.append(state.take(ticket).tokens.tolist())
            if proposes:
                propose(bound, state, step)
            stepped.fields.append(shared(bound, state))

        def every_step() -> None:
            for number, speculative in enumerate(kinds):
                one_step(number, speculative)

        stepped.error = contract_error(every_step)
    return stepped


def draw(bound: BoundDevice, state: SlotState, number: int, rank: int, speculative: bool) -> None:
    """Write each rank's sampled tokens, only in the fields of the step's kind: the tokens identify step and rank."""
    stream, n = bound.default_stream, state.sizes.num_slots
    tokens = 1000 * (number + 1) + 100 * rank + np.arange(n)
    if not speculative:
        bound.async_set_value(target=state.view("sampled_token_ids"), value=tokens, stream=stream)
        return
    rows = tokens[:, None] + 10 * np.arange(state.sizes.max_accept)
    counts = 1 + (np.arange(n) + number + rank) % state.sizes.max_accept
    bound.async_set_value(target=state.view("accept_tokens"), value=rows, stream=stream)
    bound.async_set_value(target=state.view("accept_num"), value=counts, stream=stream)


def propose(bound: BoundDevice, state: SlotState, step: Step) -> None:
    """Set drafts of every slot that continues, from the rank's own tokens."""
    known = state.mirror["accept_tokens"]
    drafts = {
        slot: [int(known[slot, 0])] * state.sizes.max_draft_tokens
        for slot in range(state.sizes.num_slots)
        if not state.mirror["stop_flags"][slot, 0]
    }
    bound.set_drafts(state=state, step=step, drafts=drafts, stream=bound.default_stream).wait(backdoor.PATIENCE)


def shared(bound: BoundDevice, state: SlotState) -> dict[str, bytes]:
    """Return every field that all ranks must share after a step."""
    data, slots = content(bound, state), state.sizes.num_slots
    return {
        name: data[place.offset : place.offset + place.stride * slots]
        for name, place in state.layout.fields.items()
        if name not in OWN
    }
