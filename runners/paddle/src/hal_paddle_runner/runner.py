"""The Paddle model as a runner: it reads a step's inputs to the host, runs the model, and samples and drafts on the
host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import ALONE, ByteRange, Group, InvalidValue, Request, Step, Ticket
from hal_engine.sampling import SUPPORTED
from hal_engine.stepping import HostRunner, PlannedStep

from .drafting import Drafting, accepted_tokens, called, read_outputs, share_drafts
from .histories import Histories
from .inputs import Columns, StepInput, chunks_of, read_inputs
from .tokens import StepTokens, choose_tokens

if TYPE_CHECKING:
    from hal_core import BoundDevice, SlotState, Stream
    from hal_engine.proposers import Proposer

    from .blocks import PagedBlocks
    from .model import Model

Array = np.ndarray[Any, Any]


class ModelRunner(HostRunner):
    """A model whose logits come to the host, where tokens are sampled and drafted
    (:class:`hal_engine.stepping.Runner`).

    - ``blocks``: of the paged cache, which the model allocates.
    - ``group``: the tensor-parallel group.
    - ``noise``: mixed into this rank's seeds when every rank of a group samples for itself.
    - ``proposer``: drafts tokens, for a state with room for drafts, and with :func:`companions_of` it; ``close`` closes
      it. On such a state each step verifies drafts, even if there are none.
    - ``shares_drafts``: a proposer is on the group's first rank, whose drafts all ranks feed; other ranks may have one
      too.
    - ``rejection``: accept drafts by rejection (:mod:`hal_engine.sampling.rejection`), which keeps the distribution of
      tokens and not the draws of plain decoding; else by comparison, which keeps both.
    - ``on_drafts``: called with the number of drafts of each request, before the step's record is built.
    - ``histories``: by slot, the earlier tokens, for penalties.
    """

    needs_host = "its tokens are chosen on the host"
    supports = SUPPORTED

    def __init__(
        self,
        device: BoundDevice,
        state: SlotState,
        model: Model,
        blocks: int,
        *,
        group: Group = ALONE,
        noise: int = 0,
        proposer: Proposer | None = None,
        shares_drafts: bool = False,
        rejection: bool = False,
        on_drafts: Callable[[Mapping[str, int]], object] = lambda counts: None,
    ) -> None:
        self.device, self.state, self.model, self.group = device, state, model, group
        self.stream = device.default_stream
        self._noise, self._shares, self._rejection, self._on_drafts = noise, shares_drafts, rejection, on_drafts
        self.histories = Histories()
        self._drafting = None if proposer is None else Drafting(proposer, state, model.config.vocab_size)
        if proposer is not None and proposer.wants_hidden and not hasattr(model, "forward_with_hidden"):
            raise InvalidValue(
                f"{called(proposer)} runs on hidden states, which {type(model).__name__} does not give",
                cure="give a model with forward_with_hidden, or another proposer",
                argument="proposer",
            )
        self.handed_over: dict[int, bytes] = {}
        """For requests that ended here with the last step taken: slot to the proposer's state, for the worker that
        continues them."""
        self._states: Mapping[int, bytes] = {}
        self._inputs: StepInput | None = None  # of the step in progress; None if it raised
        self._hidden: object = None
        model.allocate_cache(blocks, state.sizes.block_size)

    @cached_property
    def cache(self) -> PagedBlocks:
        """The blocks of the model's cache, and of a proposer's layer, for requests that move to another worker."""
        from .blocks import PagedBlocks

        hands = None if self._drafting is None else self._drafting.hands
        return PagedBlocks(self.model, None if hands is None else hands.layer())

    def close(self) -> None:
        """Close the proposer."""
        if self._drafting is not None:
            self._drafting.proposer.close()

    @property
    def note(self) -> str:
        """Return how the model computes, for ``-v``."""
        return str(getattr(self.model, "note", ""))

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary: token ids go from 0 to this number less one."""
        return int(self.model.config.vocab_size)

    def check(self, request: Request) -> None:
        """Accept every request that fits the state."""

    def launch(self, state: SlotState, step: PlannedStep, stream: Stream) -> Step:
        """Read the inputs, run the model, sample the tokens and write them into the state."""
        self._inputs = None
        self.histories.follow(step.tasks)
        if self._drafting is not None:
            self._drafting.follow(step.tasks, self._states)
            self._states = {}
        inputs = read_inputs(self.device, state, chunks_of(step.tasks), stream)
        tokens, self._hidden = self._generate(inputs)
        self._write(tokens)
        self._inputs = inputs
        return self._describe(step, inputs, tokens)

    def agreed(self, step: Step, ticket: Ticket, stream: Stream) -> None:
        """If another rank sampled the tokens, wait for them, and stop the slots that it stopped."""
        if not self.group.is_first:
            ticket.wait()
            assert self._inputs is not None
            self._stop_where_first_did(self._inputs)

    def propose(self, state: SlotState, step: Step, stream: Stream) -> None:
        """Draft from the step's tokens, and write the drafts into the state. This comes before the output is saved: a
        request that continues on another worker takes its drafts along in its output."""
        inputs = self._inputs
        assert inputs is not None
        if not len(inputs.slots) or (self._drafting is None and not self._shares):
            return
        drafts: dict[int, list[int]] = {}
        if self._drafting is not None:
            outputs = read_outputs(self.device, state, stream)
            drafts = self._drafting.drafts(inputs, outputs, self._hidden)
            if drafts:
                self._on_drafts(self._drafting.by_request(drafts))
        if self._shares:
            share_drafts(self.device, state, step, drafts, stream)
        else:
            self.device.set_drafts(state=state, step=step, drafts=drafts, stream=stream)

    def took(self, step: PlannedStep, outputs: Columns, ended: Sequence[int]) -> None:
        """Record the accepted tokens, and forget the slots that ended."""
        if self.histories and self._inputs is not None:
            slots = self._inputs.slots.tolist()
            name = "accept_tokens" if self.state.speculative else "sampled_token_ids"
            self.histories.observe(slots, accepted_tokens(slots, outputs, name))
        if self._drafting is not None:
            if (hands := self._drafting.hands) is not None:
                self.handed_over = {slot: hands.hand_over(slot) for slot in ended}
            self._drafting.leave(ended, outputs)
        for slot in ended:
            self.histories.pop(slot, None)

    def take_over(self, states: Mapping[int, bytes]) -> None:
        """Accept the state of another worker's proposer for requests that enter with the next step, by slot."""
        self._states = states

    def covered(self, slot: int) -> int | None:
        """Return the number of tokens whose keys and values the proposer has, for the tokens that were run; None: it
        has none."""
        hands = None if self._drafting is None else self._drafting.hands
        return None if hands is None else hands.covered(slot)

    def _describe(self, planned: PlannedStep, inputs: StepInput, tokens: StepTokens) -> Step:
        """Return the step as it ran: its order has the slots that ran and those that were left, ascending."""
        planned_order = planned.step.order(self.state.name)
        left = planned_order[planned.counts == 0]
        order = np.union1d(inputs.slots, left).astype(np.int32) if len(left) else inputs.slots.astype(np.int32)
        errors: Mapping[int, str] = tokens.errors
        if not errors and tokens.logprobs == planned.step.logprobs and order.tobytes() == planned_order.tobytes():
            return planned.step  # most steps: a new one would be checked again
        orders = {self.state.name: order}
        return replace(planned.step, orders=orders, logprobs=tokens.logprobs, errors=errors)

    def _generate(self, inputs: StepInput) -> tuple[StepTokens, object]:
        """Run the model on all rows, and sample the tokens of each row that gives some. Also return the hidden states,
        for a proposer that uses them."""
        logits: Array | None = np.zeros((0, self.vocab_size), np.float32)
        hidden: object = None
        if inputs.batch is not None and self._drafting is not None and self._drafting.proposer.wants_hidden:
            logits, hidden = self.model.forward_with_hidden(inputs.batch)
        elif inputs.batch is not None:
            logits = self.model.forward(inputs.batch)
        if logits is None:
            return StepTokens({}, np.zeros(0, np.int64), np.zeros(0)), hidden  # the broadcast writes them
        if self._noise:
            inputs = replace(inputs, fields={**inputs.fields, "seed": inputs.fields["seed"] ^ np.int64(self._noise)})
        weights = {} if self._drafting is None else self._drafting.weights
        proposed = weights if self._rejection else None
        tokens = choose_tokens(logits, inputs, self.histories, self.state.sizes, proposed)
        return (tokens if self.group.is_first else tokens.unreported()), hidden

    def _write(self, tokens: StepTokens) -> None:
        """Write the sampled tokens into the state; a slot with unusable logits stops there."""
        for name, columns in tokens.fields.items():
            view = self.state.view(name)
            target = view if view.shape == columns.shape else view[:, : columns.shape[1]]
            self.device.async_set_value(target=target, value=columns, stream=self.stream)
        for slot in tokens.errors:
            self._set_slot("stop_flags", slot, value=True)

    def _stop_where_first_did(self, inputs: StepInput) -> None:
        """Stop the slots whose logits were unusable on the first rank: it gave them no token, where one was due. (For a
        state with room for drafts the broadcast has reported it.)"""
        if self.state.speculative:
            return
        place = self.state.layout.fields["sampled_token_ids"]
        part = ByteRange(place.offset, place.stride * self.state.sizes.num_slots)
        copied = self.device.copy_out(memory=self.state.memory, parts=(part,), stream=self.stream)
        copied.wait()
        sampled = copied.data[0].view(np.int64)
        for slot in inputs.slots[inputs.gives & (sampled[inputs.slots] < 0)].tolist():
            self._set_slot("stop_flags", slot, value=True)

    def _set_slot(self, name: str, slot: int, *, value: bool) -> None:
        self.device.async_set_value(target=self.state.view(name)[slot], value=value, stream=self.stream)
