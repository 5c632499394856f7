"""The worker's step: insert, read, run the model, sample, broadcast, update, draft, save. Only the state changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from hal_core import (
    ALONE,
    LEAVING,
    AdmittedRequest,
    ByteRange,
    Group,
    InvalidValue,
    OutputTicket,
    Request,
    SinkClosed,
    SinkFull,
    Step,
    Task,
    TaskBatch,
)

from hal.model.batch import ModelBatch
from hal.worker.drafting import Acceptance, Drafting, accepted_tokens, called, read_outputs, share_drafts
from hal.worker.histories import Histories
from hal.worker.inputs import StepInput, chunks_of, read_inputs
from hal.worker.tokens import StepTokens, choose_tokens

if TYPE_CHECKING:
    from hal_core import BoundDevice, OutputRecord, Sink, StateConfig, StateLayout, Ticket

    from hal.proposers import Proposer

Array = np.ndarray[Any, Any]


class ModelConfig(Protocol):
    """The model's constants that a worker needs."""

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to this number less one."""


class Model(Protocol):
    """What a worker asks of a model; :class:`hal.model.llama.LlamaModel` is one."""

    @property
    def config(self) -> ModelConfig: ...

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        """Make room for the keys and values of ``blocks`` blocks of ``block_size`` tokens."""

    def forward(self, batch: ModelBatch) -> Array | None:
        """Run the rows of a step; float32 ``[n, vocab]``, the logits after each of ``batch.outputs``.

        None on a rank that is not given them: it learns from the first rank which tokens came of it.
        """


@runtime_checkable
class HiddenModel(Model, Protocol):
    """A model that gives its hidden states too, for a proposer that wants them."""

    def forward_with_hidden(self, batch: ModelBatch) -> tuple[Array | None, object]:
        """As ``forward``, and what the last layer gave for each token ``[tokens, width]``, in the model's own kind."""


class Worker:
    """One rank: a slot state on a device, a model, and the four hooks called in order at each step.

    The state is device memory that the worker neither computes on nor looks into: it changes by the hooks and
    ``update_inputs`` alone, and is read with one ``copy_out`` a step. One thread calls a worker.

    - ``sizes``, ``blocks``: of the state, and of the paged cache that the model is made to allocate.
    - ``sink``: where each step's record goes; the caller closes it, and the device.
    - ``group``: the tensor-parallel group that the worker is in.
    - ``noise``: mixed into the seeds that this rank draws with, where every rank of a group samples for itself.
    - ``proposer``: what drafts tokens, for ``sizes`` with room for drafts; the caller closes it. On such a state each
      step verifies drafts, though there be none. ``acceptance`` counts what became of them.
    - ``shares_drafts``: a proposer is on the group's first rank, whose drafts all ranks feed; it may be on others too.
    - ``rejection``: accept drafts by rejection (:mod:`hal.sampling.rejection`), which keeps the distribution of tokens
      and not the draws of plain decoding; else by comparing, which keeps both.
    """

    def __init__(
        self,
        device: BoundDevice,
        model: Model,
        sizes: StateConfig,
        blocks: int,
        sink: Sink,
        *,
        group: Group = ALONE,
        noise: int = 0,
        proposer: Proposer | None = None,
        shares_drafts: bool = False,
        rejection: bool = False,
    ) -> None:
        self.device, self.model, self.sink, self.group, self.blocks = device, model, sink, group, blocks
        own = ("proposer",) if proposer is not None and proposer.wants_hidden else ()
        self.state = device.state(sizes, beside=own)
        self.stream = device.default_stream
        self.steps, self._noise, self._shares = 0, noise, shares_drafts
        self.last: OutputRecord | None = None
        self._rejection = rejection
        self.acceptance = Acceptance()
        self._histories = Histories()
        self._drafting = None if proposer is None else Drafting(proposer, self.state, model.config.vocab_size)
        if proposer is not None and proposer.wants_hidden and not isinstance(model, HiddenModel):
            raise InvalidValue(
                f"{called(proposer)} runs on hidden states, which {type(model).__name__} does not give",
                cure="give a model with forward_with_hidden, or another proposer",
                argument="proposer",
            )
        model.allocate_cache(blocks, sizes.block_size)

    @property
    def layout(self) -> StateLayout:
        """The layout of the state that requests are admitted to."""
        return self.state.layout

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to this number less one."""
        return self.model.config.vocab_size

    def admit(self, request: Request) -> AdmittedRequest:
        """Check a request and pack it for the state. Raises :class:`hal_core.errors.InvalidValue`. From any thread."""
        return self.state.admit(request, vocab_size=self.vocab_size)

    def step(self, tasks: TaskBatch | Sequence[Task]) -> OutputRecord:
        """Put ``tasks`` into their slots, run every slot that has something to feed, and hand out what came of it.

        Returns the step's record and keeps it in ``last``; slots whose requests have ended are free afterwards. Raises
        what the hooks raise: :class:`hal_core.errors.InvalidBatch` before anything changed, and
        :class:`hal_core.errors.InvalidValue` for drafts that a task brings and the step cannot feed. On
        :class:`hal_core.errors.SinkFull` (the record is kept, and sent when there is room) and
        :class:`hal_core.errors.SinkClosed` (nobody will be sent it) the step is done and its record is in ``last``.
        """
        batch = tasks if isinstance(tasks, TaskBatch) else TaskBatch.of(tasks)
        self._check_drafts(batch)
        self.device.insert_tasks(state=self.state, tasks=batch, stream=self.stream)
        self._histories.follow(batch)
        if self._drafting is not None:
            self._drafting.follow(batch)
        inputs = read_inputs(self.device.device, self.state, chunks_of(batch), self.stream)
        tokens, hidden = self._generate(inputs)
        self._write(tokens)
        agreed = self.device.broadcast_tokens(state=self.state, group=self.group, stream=self.stream)
        if not self.group.is_first:
            agreed.wait()
            self._stop_where_first_did(inputs)
        step = self._describe(batch, inputs, tokens)
        self.device.update_inputs(state=self.state, step=step, stream=self.stream)
        if (self._drafting is not None or self._shares) and len(inputs.slots):
            self._draft(step, inputs, hidden)
        try:
            ticket = self.device.save_output(state=self.state, step=step, sink=self.sink, stream=self.stream)
        except (SinkFull, SinkClosed) as error:
            self._take(error.ticket, inputs)
            raise
        return self._take(ticket, inputs)

    def _check_drafts(self, batch: TaskBatch) -> None:
        """Refuse drafts of another worker that would be fed and could not be: of all else the hooks take care."""
        if not any(batch.drafts):
            return
        size, why = self.state.sizes.block_size, ""
        for request, drafts, count in zip(batch.requests, batch.drafts, batch.plain["block_counts"], strict=True):
            if not self.state.speculative:
                why = "the worker's steps are plain: drafts would be fed, and nobody would verify them"
            elif any(token >= self.vocab_size for token in drafts):
                why = f"drafts {list(drafts)} of {request.request_id!r} are not all below {self.vocab_size}"
            elif drafts and request.total + 1 + len(drafts) > count * size:
                why = f"{len(drafts)} drafts of {request.request_id!r} do not fit into its {count} blocks"
        if why:
            cure = "hand the request over without its drafts; the tokens are the same"
            raise InvalidValue(why, cure=cure, device=self.device.name, hook="insert_tasks", argument="tasks")

    def _generate(self, inputs: StepInput) -> tuple[StepTokens, object]:
        """Run the model on all rows, and choose the tokens of each that gives some; with them the hidden states, for a
        proposer that wants them."""
        logits: Array | None = np.zeros((0, self.vocab_size), np.float32)
        hidden: object = None
        if inputs.batch is not None and self._drafting is not None and self._drafting.proposer.wants_hidden:
            assert isinstance(self.model, HiddenModel)
            logits, hidden = self.model.forward_with_hidden(inputs.batch)
        elif inputs.batch is not None:
            logits = self.model.forward(inputs.batch)
        if logits is None:
            return StepTokens.none(self.state.sizes), hidden
        if self._noise:
            inputs = replace(inputs, fields={**inputs.fields, "seed": inputs.fields["seed"] ^ np.int64(self._noise)})
        told = {} if self._drafting is None else self._drafting.weights
        proposed = told if self._rejection else None
        tokens = choose_tokens(logits, inputs, self._histories, self.state.sizes, proposed)
        return (tokens if self.group.is_first else tokens.unreported()), hidden

    def _write(self, tokens: StepTokens) -> None:
        """Write what was sampled into the state; a slot whose logits were no use stops there."""
        for name, columns in tokens.fields.items():
            self._set(name, columns)
        for slot in tokens.errors:
            self._set_slot("stop_flags", slot, value=True)

    def _stop_where_first_did(self, inputs: StepInput) -> None:
        """Stop the slots whose logits were no use on the first rank: it gave them no token, where one was due. (Of a
        state with room for drafts the broadcast has said so.)"""
        if self.state.speculative:
            return
        place = self.layout.fields["sampled_token_ids"]
        part = ByteRange(place.offset, place.stride * self.state.sizes.num_slots)
        copied = self.device.copy_out(memory=self.state.memory, parts=(part,), stream=self.stream)
        copied.wait()
        sampled = copied.data[0].view(np.int64)
        for slot in inputs.slots[inputs.gives & (sampled[inputs.slots] < 0)].tolist():
            self._set_slot("stop_flags", slot, value=True)

    def _set_slot(self, name: str, slot: int, *, value: bool) -> None:
        self.device.async_set_value(target=self.state.view(name)[slot], value=value, stream=self.stream)

    def _set(self, name: str, value: Array) -> None:
        view = self.state.view(name)
        target = view if view.shape == value.shape else view[:, : value.shape[1]]
        self.device.async_set_value(target=target, value=value, stream=self.stream)

    def _describe(self, batch: TaskBatch, inputs: StepInput, tokens: StepTokens) -> Step:
        """The step's number, and its order: the slots that ran and those that were left, ascending."""
        left = [slot for kind, slot in zip(batch.kinds.tolist(), batch.slots.tolist(), strict=True) if kind in LEAVING]
        order = np.union1d(inputs.slots, left).astype(np.int32) if left else inputs.slots.astype(np.int32)
        self.steps += 1
        errors: Mapping[int, str] = tokens.errors
        return Step(
            self.steps - 1,
            {self.state.name: order},
            speculative=self.state.speculative,
            group=self.group,
            logprobs=tokens.logprobs,
            errors=errors,
        )

    def _draft(self, step: Step, inputs: StepInput, hidden: object) -> None:
        """Have drafts made of what the step gave, and hand them to the state; before its output is saved, as a request
        that goes on elsewhere takes its drafts along in that."""
        drafts: dict[int, list[int]] = {}
        if self._drafting is not None:
            outputs = read_outputs(self.device.device, self.state, self.stream)
            drafts = self._drafting.drafts(inputs, outputs, hidden)
        if self._shares:
            share_drafts(self.device, self.state, step, drafts, self.stream)
        else:
            self.device.set_drafts(state=self.state, step=step, drafts=drafts, stream=self.stream)

    def _take(self, ticket: Ticket | object, inputs: StepInput) -> OutputRecord:
        """Take over the step's output: the record, the mirror, what was said, and the slots that ended."""
        assert isinstance(ticket, OutputTicket)
        record = self.last = self.state.take(ticket)
        mirror, ran = self.state.mirror, inputs.slots
        if self.state.speculative:
            self.acceptance.count(inputs, mirror)
        if self._histories:
            slots, name = ran.tolist(), "accept_tokens" if self.state.speculative else "sampled_token_ids"
            self._histories.observe(slots, accepted_tokens(slots, mirror, name))
        ended = ran[mirror["stop_flags"][ran, 0]].tolist()
        if ended:
            self.state.release(ended)
            if self._drafting is not None:
                self._drafting.leave(ended, mirror)
            for slot in ended:
                self._histories.pop(slot, None)
        return record
