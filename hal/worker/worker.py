"""The worker's step: insert, read, run the model, sample, broadcast, update, save. Nothing else touches the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

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
from hal.worker.histories import Histories
from hal.worker.inputs import StepInput, chunks_of, read_inputs
from hal.worker.tokens import StepTokens, choose_tokens

if TYPE_CHECKING:
    from hal_core import BoundDevice, OutputRecord, Sink, StateConfig, StateLayout, Ticket

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
        """Run the rows of a step; float32 ``[rows, vocab]``, the logits after each row's last token.

        None on a rank that is not given them: it learns from the first rank which tokens came of it.
        """


class Worker:
    """One rank: a slot state on a device, a model, and the four hooks called in order at each step.

    The state is device memory that the worker neither computes on nor looks into: it changes by the hooks and
    ``update_inputs`` alone, and is read with one ``copy_out`` a step. One thread calls a worker.

    - ``sizes``, ``blocks``: of the state, and of the paged cache that the model is made to allocate.
    - ``sink``: where each step's record goes; the caller closes it, and the device.
    - ``group``: the tensor-parallel group that the worker is in.
    """

    def __init__(
        self, device: BoundDevice, model: Model, sizes: StateConfig, blocks: int, sink: Sink, *, group: Group = ALONE
    ) -> None:
        self.device, self.model, self.sink, self.group, self.blocks = device, model, sink, group, blocks
        self.state = device.state(sizes)
        self.stream = device.default_stream
        self.steps = 0
        self.last: OutputRecord | None = None
        self._histories = Histories()
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
        what the hooks raise: :class:`hal_core.errors.InvalidBatch` before anything changed, and for drafts
        :class:`hal_core.errors.InvalidValue`, as these steps verify none. On
        :class:`hal_core.errors.SinkFull` (the record is kept, and sent when there is room) and
        :class:`hal_core.errors.SinkClosed` (nobody will be sent it) the step is done and its record is in ``last``.
        """
        batch = tasks if isinstance(tasks, TaskBatch) else TaskBatch.of(tasks)
        if any(batch.drafts):
            raise InvalidValue(
                "the worker's steps are plain: drafts would be fed, and nobody would verify them",
                cure="hand the request over without its drafts; the tokens are the same",
                device=self.device.name,
                hook="insert_tasks",
                argument="tasks",
            )
        self.device.insert_tasks(state=self.state, tasks=batch, stream=self.stream)
        self._histories.follow(batch)
        inputs = read_inputs(self.device.device, self.state, chunks_of(batch), self.stream)
        tokens = self._generate(inputs)
        self._write(tokens)
        agreed = self.device.broadcast_tokens(state=self.state, group=self.group, stream=self.stream)
        if not self.group.is_first:
            agreed.wait()
            self._stop_where_first_did(inputs)
        step = self._describe(batch, inputs, tokens)
        self.device.update_inputs(state=self.state, step=step, stream=self.stream)
        try:
            ticket = self.device.save_output(state=self.state, step=step, sink=self.sink, stream=self.stream)
        except (SinkFull, SinkClosed) as error:
            self._take(error.ticket, inputs.slots)
            raise
        return self._take(ticket, inputs.slots)

    def _generate(self, inputs: StepInput) -> StepTokens:
        """Run the model on all rows, and choose a token for each that gives one."""
        if inputs.batch is None:
            return StepTokens.none(self.state.sizes.num_slots)
        logits = self.model.forward(inputs.batch)
        if logits is None:
            return StepTokens.none(self.state.sizes.num_slots)
        if not inputs.gives.all():
            logits = logits[inputs.gives]
        return choose_tokens(logits, inputs.slots[inputs.gives], inputs.fields, self._histories)

    def _write(self, tokens: StepTokens) -> None:
        """Write what was sampled into the state; a slot whose logits were no use stops there."""
        self._set("sampled_token_ids", tokens.sampled)
        for name, columns in tokens.alternatives.items():
            self._set(name, columns)
        for slot in tokens.errors:
            self._set_slot("stop_flags", slot, value=True)

    def _stop_where_first_did(self, inputs: StepInput) -> None:
        """Stop the slots whose logits were no use on the first rank: it gave them no token, where one was due."""
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
        return Step(self.steps - 1, {self.state.name: order}, group=self.group, logprobs=tokens.logprobs, errors=errors)

    def _take(self, ticket: Ticket | object, ran: Array) -> OutputRecord:
        """Take over the step's output: the record, the mirror, and the slots that ended."""
        assert isinstance(ticket, OutputTicket)
        record = self.last = self.state.take(ticket)
        ended = ran[self.state.mirror["stop_flags"][ran, 0]].tolist()
        if ended:
            self.state.release(ended)
            for slot in ended:
                self._histories.pop(slot, None)
        return record
