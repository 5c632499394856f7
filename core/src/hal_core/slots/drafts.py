"""Handing drafts to a state, for its next step to verify: when that may be done, for whom, and what is written.

``update_inputs`` drops what a slot had drafted, so drafts that were written before it are lost without a sound. They
come by one call instead, ``BoundDevice.set_drafts``, which names the step whose tokens they were made from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidValue
from ..memory.plan import PlanBuilder, WritePlan
from .draft_book import has_ended
from .fields import SplitRole

if TYPE_CHECKING:
    from .state import SlotState
    from .step import Step

Drafts = dict[int, list[int]]
"""Slot to its drafts, in the order in which they would follow the slot's next token."""


def check_drafts(state: SlotState, step: Step, drafts: object) -> Drafts:
    """The drafts of slots that have some; raises :class:`InvalidValue` when they come out of order, or do not fit."""
    _check_order(state, step)
    if not isinstance(drafts, Mapping):
        raise InvalidValue(f"{type(drafts).__name__} is no mapping", cure="give {slot: [token, …]}", argument="drafts")
    found: Drafts = {}
    wrong: list[str] = []
    ran = set(step.order(state.name).tolist())
    for slot, given in drafts.items():
        tokens = _tokens(given)
        if isinstance(slot, bool) or not isinstance(slot, int | np.integer) or not 0 <= slot < state.sizes.num_slots:
            text = f"slots go from 0 to {state.sizes.num_slots - 1}"
        elif tokens is None:
            text = "drafts must be one list of token ids"
        elif len(tokens) > state.sizes.max_draft_tokens:
            text = f"{len(tokens)} drafts, but {state.sizes.max_draft_tokens} fit"
        else:
            text = _unfit(state, step, int(slot), ran) if tokens else ""
            if tokens:
                found[int(slot)] = tokens
        if text:
            wrong.append(f"slot {slot}: {text}")
    if wrong:
        raise InvalidValue(
            f"nothing was handed over: {'; '.join(wrong)}",
            cure="hand drafts to slots that decoded in this step, no more than StateConfig(max_draft_tokens=…)",
            argument="drafts",
        )
    return found


def _check_order(state: SlotState, step: Step) -> None:
    """The call's place in a step: once, after its ``update_inputs``, before that of the next."""
    book = state.drafts
    if not state.speculative:
        raise InvalidValue(
            "the state has no room for drafts", cure="give StateConfig(max_draft_tokens=…)", argument="state"
        )
    if book.step is None or step.number > book.step:
        raise InvalidValue(
            f"drafts after step {step.number} come before its update_inputs, which would drop them",
            cure="call update_inputs with that step first, then set_drafts",
            argument="step",
        )
    if step.number < book.step:
        raise InvalidValue(
            f"drafts after step {step.number} come too late: step {book.step} has advanced the state without them",
            cure="hand them over between the update_inputs of their step and that of the next",
            argument="step",
        )
    if book.handed == book.step:
        raise InvalidValue(
            f"the drafts after step {step.number} were handed over already",
            cure="hand over those of all slots in one call",
            argument="step",
        )


def _unfit(state: SlotState, step: Step, slot: int, ran: set[int]) -> str:
    """Why a slot has nothing to draft from this step, or ""."""
    host_table, request = state.host_table, state.host_table.requests[slot]
    if request is None:
        return "it holds no request"
    if slot in state.drafts.changed:
        return f"what it holds, {request.request_id!r}, was changed after the step"
    if slot not in ran:
        return f"the order of step {step.number} does not name it"
    if host_table.prefilled[slot] < request.total:
        return f"{request.request_id!r} is still being prefilled"
    if has_ended(state.mirror, slot, request.admission_id):
        return f"{request.request_id!r} has ended"
    if request.role is SplitRole.PREFILL and state.drafts.saved == step.number:
        return f"the output that takes the drafts of {request.request_id!r} to its decode node was saved before"
    return ""


def _tokens(given: Any) -> list[int] | None:  # noqa: ANN401 (the caller's)
    """Drafts as Python integers; None for what is no list of token ids."""
    try:
        tokens = given.tolist() if isinstance(given, np.ndarray) else list(given)
    except TypeError:
        return None
    if not isinstance(tokens, list):
        return None
    plain = [int(token) if isinstance(token, np.integer) else token for token in tokens]
    return plain if all(type(token) is int and 0 <= token < 2**63 for token in plain) else None


def plan_drafts(state: SlotState, drafts: Drafts) -> WritePlan:
    """One plan: each slot's row of drafts, reset behind them, their number, and what the next step feeds.

    That is the next token and the drafts; a slot that plays the prefill part of a split feeds nothing more.
    """
    tokens, number, fed = (state.layout.fields[name] for name in ("draft_tokens", "draft_num", "seq_lens_this_time"))
    reset, requests = [int(tokens.field.reset)] * tokens.width, state.host_table.requests
    rows: list[int] = []
    counts: list[int] = []
    lengths: list[int] = []
    for slot, given in drafts.items():
        rows += given
        rows += reset[len(given) :]
        counts.append(len(given))
        request = requests[slot]
        hands_over = request is not None and request.role is SplitRole.PREFILL
        lengths.append(0 if hands_over else 1 + len(given))
    places = [place.offset + slot * place.stride for place in (tokens, number, fed) for slot in drafts]
    sizes = [tokens.stride] * len(drafts) + [number.stride] * len(drafts) + [fed.stride] * len(drafts)
    builder = PlanBuilder(state.memory)
    pieces = [np.array(rows, np.int64).tobytes(), np.array(counts + lengths, np.int32).tobytes()]
    builder.runs(np.array(places, np.int64), np.array(sizes, np.int64), pieces)
    return builder.build(disjoint=True)
