"""Setting a state's drafts for its next step to verify: the order of calls, the allowed slots, and the writes.

``update_inputs`` drops a slot's drafts, so drafts written before it would be lost silently. They are therefore set by
one call, ``BoundDevice.set_drafts``, which names the step whose tokens they were made from.
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
    """Return the drafts of slots that have some. Raises :class:`InvalidValue` if they come out of order, or do not
    fit."""
    _check_order(state, step)
    if not isinstance(drafts, Mapping):
        raise InvalidValue(
            f"{type(drafts).__name__} is not a mapping", cure="give {slot: [token, …]}", argument="drafts"
        )
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
            f"no draft was set: {'; '.join(wrong)}",
            cure="set drafts of slots that decoded in this step, no more than StateConfig(max_draft_tokens=…)",
            argument="drafts",
        )
    return found


def _check_order(state: SlotState, step: Step) -> None:
    """Check that the call comes once, after the step's ``update_inputs`` and before that of the next."""
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
            cure="set them between the update_inputs of their step and that of the next",
            argument="step",
        )
    if book.handed == book.step:
        raise InvalidValue(
            f"the drafts after step {step.number} were already set",
            cure="set those of all slots in one call",
            argument="step",
        )


def _unfit(state: SlotState, step: Step, slot: int, ran: set[int]) -> str:
    """Return why a slot cannot have drafts after this step, or ""."""
    host_table, request = state.host_table, state.host_table.requests[slot]
    if request is None:
        return "it holds no request"
    if slot in state.drafts.changed:
        return f"its request {request.request_id!r} was changed after the step"
    if slot not in ran:
        return f"the order of step {step.number} does not name it"
    if host_table.prefilled[slot] < request.total:
        return f"{request.request_id!r} is still being prefilled"
    if has_ended(state.mirror, slot, request.admission_id):
        return f"{request.request_id!r} has ended"
    if request.role is SplitRole.PREFILL and state.drafts.saved == step.number:
        return f"the output with the drafts of {request.request_id!r} for its decode node was already saved"
    return ""


def _tokens(given: Any) -> list[int] | None:  # noqa: ANN401 (the caller's)
    """Return drafts as Python integers; None for anything but a list of token ids."""
    try:
        tokens = given.tolist() if isinstance(given, np.ndarray) else list(given)
    except TypeError:
        return None
    if not isinstance(tokens, list):
        return None
    plain = [int(token) if isinstance(token, np.integer) else token for token in tokens]
    return plain if all(type(token) is int and 0 <= token < 2**63 for token in plain) else None


def plan_drafts(state: SlotState, drafts: Drafts) -> WritePlan:
    """Return one plan: each slot's row of drafts, the reset of its rest, their number, and the next step's inputs.

    The inputs are the next token and the drafts; a slot with the prefill role of a split has no further inputs.
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
