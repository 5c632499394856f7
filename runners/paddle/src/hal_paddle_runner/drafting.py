"""A proposer beside a worker: it follows the requests in the slots, and the room for their drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import (
    ENTERING,
    LEAVING,
    ByteRange,
    FinishReason,
    InvalidValue,
    PluginError,
    SplitRole,
    TaskBatch,
    TaskKind,
)
from hal_engine.proposers import Drawn, Fed, draft_room

from .inputs import Columns, StepInput, rows_of
from .mtp import mtp_in

if TYPE_CHECKING:
    from hal_core import BoundDevice, SlotState, Step, Stream
    from hal_engine.proposers import Proposer

Array = np.ndarray[Any, Any]
Int64s = np.ndarray[Any, np.dtype[np.int64]]


class Drafting:
    """One proposer and the slots of one state. ``weights`` maps a slot to the weights from which its drafts were drawn,
    where the proposer reports them (:class:`hal_engine.proposers.Drawn`)."""

    def __init__(self, proposer: Proposer, state: SlotState, vocab_size: int) -> None:
        sizes = state.sizes
        if not sizes.max_draft_tokens:
            raise InvalidValue(
                "a proposer for a state without room for drafts",
                cure="give StateConfig(max_draft_tokens=…), or no proposer",
                argument="proposer",
            )
        self.proposer, self._sizes, self._vocab_size = proposer, sizes, vocab_size
        self._own = state.companions[0] if state.companions else None
        self._table = state.host_table
        self.hands = mtp_in(proposer)
        self.weights: dict[int, Sequence[Int64s]] = {}
        self._names: dict[int, str] = {}

    def by_request(self, drafts: Mapping[int, Sequence[int]]) -> dict[str, int]:
        """Return the number of drafts of each request, by its name."""
        return {self._names[slot]: len(tokens) for slot, tokens in drafts.items()}

    def follow(self, tasks: TaskBatch, states: Mapping[int, bytes]) -> None:
        """Tell the proposer which requests leave and enter with an inserted batch. ``states`` maps a slot to the state
        that came with a request from another worker's proposer."""
        columns = (tasks.plain["kinds"], tasks.plain["slots"], tasks.requests, tasks.plain["first_tokens"])
        for kind, slot, request, first_token in zip(*columns, strict=True):
            if kind != TaskKind.MORE_BLOCKS:
                self.weights.pop(slot, None)
            if kind in LEAVING:
                self.proposer.leave(slot, finished=False)
            elif kind in ENTERING:
                self._names[slot] = request.request_id
                first = [first_token] * (first_token >= 0)
                self.proposer.enter(slot, request, np.concatenate([request.tokens, np.array(first, np.int64)]))
                if self.hands is not None and states.get(slot):
                    self.hands.take_over(slot, states[slot])

    def leave(self, slots: Sequence[int], outputs: Columns) -> None:
        """Tell the proposer which slots' requests have ended, with ``stop_reason`` after their last step."""
        for slot in slots:
            ended = outputs["stop_reason"][slot, 0] in (FinishReason.STOP, FinishReason.LENGTH)
            self.proposer.leave(slot, finished=bool(ended))

    def drafts(self, inputs: StepInput, outputs: Columns, hidden: Any) -> dict[int, list[int]]:  # noqa: ANN401 (the model's)
        """Return the drafts of the next step. ``outputs``: the output fields after this step's ``update_inputs``;
        ``hidden``: the model's hidden states for a proposer that uses them, else None."""
        slots = inputs.slots.tolist()
        accepted = accepted_tokens(slots, outputs, "accept_tokens")
        if inputs.batch is None or hidden is None or self._own is None:
            self.proposer.observe(Fed(slots, accepted, drafted=inputs.drafts.tolist()))
        else:
            rows = np.concatenate([[0], np.cumsum(inputs.batch.row_lengths, dtype=np.int64)])
            batch = inputs.batch
            live, own = self._own.host_table.live, inputs.companions[0]
            places = [live[admission_id] for admission_id in self._table.admission_ids[slots].tolist()]
            drafted = inputs.drafts.tolist()
            fed = Fed(slots, accepted, rows, batch.token_ids, batch.positions, hidden, own, places, drafted)
            self.proposer.observe(fed)
        room = self.room(inputs, outputs)
        drafts = self.proposer.propose(room)
        self._check(drafts, room)
        self.weights = {slot: tokens.weights for slot, tokens in drafts.items() if isinstance(tokens, Drawn)}
        return drafts

    def room(self, inputs: StepInput, outputs: Columns) -> dict[int, int]:
        """Return the most drafts that the next step of each decoding slot may feed.

        A worker of the prefill role feeds none of them, so they need no place in a block.
        """
        fields, sizes = inputs.fields, self._sizes
        slots = inputs.slots[inputs.gives & (outputs["accept_num"][inputs.slots, 0] > 0)]
        at = rows_of(slots, sizes.num_slots)
        generated, going_on = outputs["step_idx"][at, 0], ~outputs["stop_flags"][at, 0]
        known = (fields["prompt_lens"][at, 0] + generated).astype(np.int64)
        covered = fields["blocks_num"][at, 0].astype(np.int64) * sizes.block_size
        handed_over = fields["split_role"][at, 0] == SplitRole.PREFILL
        if handed_over.any():
            going_on |= handed_over & (outputs["stop_reason"][at, 0] == 0)
            covered = np.where(handed_over, known + sizes.max_draft_tokens, covered)
        room = draft_room(
            sizes.max_draft_tokens,
            generated=generated,
            max_tokens=fields["max_dec_len"][at, 0],
            known=known,
            max_model_len=sizes.max_model_len,
            covered=covered,
            decoding=going_on,
        )
        return {slot: most for slot, most in zip(slots.tolist(), room.tolist(), strict=True) if most}

    def _check(self, drafts: dict[int, list[int]], room: dict[int, int]) -> None:
        """Refuse a draft that would end the step for all requests: an invalid token, or one without a place."""
        for slot, tokens in drafts.items():
            most = room.get(slot, 0)
            if len(tokens) > most or any(not 0 <= token < self._vocab_size for token in tokens):
                raise PluginError(
                    f"proposer {called(self.proposer)} drafted {list(tokens)} for slot {slot}",
                    cure=f"there is room for {most} drafts; token ids go from 0 to {self._vocab_size - 1}",
                    argument="propose",
                )


def companions_of(proposer: Proposer | None) -> tuple[str, ...]:
    """Return the companions of a state with a proposer: one that runs on hidden states reads a state of its own."""
    return ("proposer",) if proposer is not None and proposer.wants_hidden else ()


def called(proposer: Proposer) -> str:
    """Return the name of a proposer, or of its class if it has none."""
    return str(getattr(proposer, "name", type(proposer).__name__))


def share_drafts(
    device: BoundDevice, state: SlotState, step: Step, drafts: Mapping[int, Sequence[int]], stream: Stream
) -> None:
    """Write the drafts of the group's first rank into the state of every rank: one collective over the fields that hold
    them. All ranks of ``step.group`` call this; the ``drafts`` of the other ranks are ignored.

    :raises GroupLost: when a rank is lost.
    """
    group = step.group
    number, tokens = state.layout.fields["draft_num"], state.layout.fields["draft_tokens"]
    part = ByteRange(number.offset, tokens.offset + tokens.stride * state.sizes.num_slots - number.offset)
    if group.is_first:
        device.set_drafts(state=state, step=step, drafts=drafts, stream=stream)
    device.communicator(group=group).broadcast(state.memory, part, stream).wait()
    if group.is_first:
        return
    copied = device.copy_out(memory=state.memory, parts=(part,), stream=stream)
    copied.wait()
    fields, ran = state.copied_fields(copied.data[0], part), step.order(state.name)
    counts, rows = fields["draft_num"][:, 0], fields["draft_tokens"]
    shared = {slot: rows[slot, : counts[slot]].tolist() for slot in ran.tolist() if counts[slot]}
    device.set_drafts(state=state, step=step, drafts=shared, stream=stream)


def accepted_tokens(slots: Sequence[int], outputs: Columns, name: str) -> list[Int64s]:
    """Return the tokens that a step gave to each of ``slots``; ``name``: the field with the tokens of such a step."""
    tokens, number = outputs[name], outputs["accept_num"][:, 0]
    return [tokens[slot, : number[slot]] for slot in slots]


def read_outputs(device: BoundDevice, state: SlotState, stream: Stream) -> Columns:
    """Return the output fields, ``[slots, width]`` each, after the work that is on ``stream`` now."""
    part = state.layout.groups["output"]
    copied = device.copy_out(memory=state.memory, parts=[part], stream=stream)
    copied.wait()
    return state.copied_fields(copied.data[0], part)
