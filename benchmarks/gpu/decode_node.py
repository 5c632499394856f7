"""A decode node: hal's engine, whose requests come with their keys and values in place, and three methods of insertion.

Everything but the insertion is the same in all ways: the engine, its schedule, the runner, ``update_inputs``,
``save_output``. The peers' ways write the same fields of the same state through torch; the host's table is updated as
by hal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from hal_core import (
    DONE,
    AdmittedRequest,
    BoundDevice,
    Request,
    SlotState,
    StateLayout,
    Stream,
    Task,
    TaskBatch,
    TaskKind,
    Ticket,
    admit,
)

from hal.engine.scheduler import Scheduler
from hal.stepping import Stepper

from .peers import Inputs, Tensors, fused, per_field, pinned, writer_of

FIRST_TOKEN = 7
"""The token that every prefill node sampled: with random weights any token is as good."""
HAL, PER_FIELD, FUSED = "hal", "FastDeploy's: per field", "vLLM's: staged, fused"
WAYS = (HAL, PER_FIELD, FUSED)


class DecodeScheduler(Scheduler):
    """The engine's schedule, but a request that enters is not prefilled: its first token, keys and values are given."""

    def _enter(self, tasks: list[Task], left: int) -> int:
        while self.waiting and self._slots:
            generation = self.waiting[0]
            known = generation.known
            needed = self._blocks_for(min(known + 2, generation.limit))
            if needed > self.pool.free:
                break
            self.waiting.popleft()
            generation.enter(self._slots.pop(), self.pool.allocate(needed), known)
            generation.generated.append(FIRST_TOKEN)
            self._run(generation)
            kind, slot, blocks = TaskKind.REMOTE_PREFILL, generation.slot, generation.blocks
            tasks.append(
                Task(
                    kind,
                    slot,
                    generation.admitted,
                    num_computed_tokens=known,
                    blocks=tuple(blocks),
                    first_token=FIRST_TOKEN,
                )
            )
        return left


def inputs_of(layout: StateLayout, request: AdmittedRequest) -> Inputs:
    """A peer's values for a request that was handed over, without its blocks; made before the timing."""
    made = Inputs.of(layout, request, 1, np.zeros(0, np.int32))
    total = request.total
    made.scalars.update(
        seq_lens_this_time=1, seq_lens_encoder=0, seq_lens_decoder=total, next_tokens=FIRST_TOKEN, step_idx=1
    )
    made.rows["token_ids"] = np.append(made.rows["token_ids"], FIRST_TOKEN)
    made.lists["token_ids"] = made.rows["token_ids"].tolist()
    return made


class Inserting:
    """A device whose ``insert_tasks`` uses the chosen method; all else is the device's own.

    - ``way``: one of :data:`WAYS`; it may change while no step is in flight.
    - ``prepared``: by request, the peer's values.
    - ``times``: for each insertion by the chosen method, requests that entered, that grew, and host us.
    """

    def __init__(self, device: BoundDevice, state: SlotState) -> None:
        self._device, self.way = device, HAL
        self.prepared: Mapping[str, Inputs] = {}
        self.times: list[tuple[int, int, float]] = []
        self._tensors: Tensors = {name: state.tensor(name, "torch") for name in state.layout.fields}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (whatever the device has)
        return getattr(self._device, name)

    def insert_tasks(self, *, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """By hal, or by torch on its current stream, which is ``stream``."""
        began = perf_counter_ns()
        kinds = tasks.plain["kinds"]
        if self.way == HAL or any(kind not in (TaskKind.REMOTE_PREFILL, TaskKind.MORE_BLOCKS) for kind in kinds):
            ticket = self._device.insert_tasks(state=state, tasks=tasks, stream=stream)
        else:
            ticket = DONE
            state.wait_for_readers_of_batch(tasks, stream)
            self._write(state, tasks, kinds)
            state.host_table.commit(tasks)
        if kinds:
            entered = sum(kind == TaskKind.REMOTE_PREFILL for kind in kinds)
            self.times.append((entered, len(kinds) - entered, (perf_counter_ns() - began) / 1e3))
        return ticket

    def _write(self, state: SlotState, tasks: TaskBatch, kinds: Sequence[int]) -> None:
        slots, entering, inputs = tasks.plain["slots"], [], []
        grown: list[tuple[int, int, np.ndarray[Any, Any], int]] = []
        for at, kind in enumerate(kinds):
            slot, blocks = slots[at], tasks.block_ids[at]
            if kind == TaskKind.REMOTE_PREFILL:
                entering.append(slot)
                inputs.append(self._inputs(tasks.requests[at], blocks))
            else:
                first = int(state.host_table.blocks[slot])
                grown.append((slot, first, blocks, first + len(blocks)))
        if self.way == PER_FIELD:
            per_field(self._tensors, entering, inputs)
            self._grow_per_field(grown)
            return
        writer = writer_of(self._tensors)
        for slot, first, blocks, _ in grown:
            writer.row("block_tables", slot, blocks, first)
        writer.scalars("blocks_num", [one[0] for one in grown], [one[3] for one in grown])
        if inputs:
            fused(self._tensors, entering, inputs)  # the same launch
        else:
            writer.apply()

    def _inputs(self, request: AdmittedRequest, blocks: np.ndarray[Any, Any]) -> Inputs:
        made = self.prepared[request.request_id]
        made.scalars["request_serial"], made.scalars["blocks_num"] = request.admission_id, len(blocks)
        made.rows["block_tables"] = blocks
        return made

    def _grow_per_field(self, grown: Sequence[tuple[int, int, np.ndarray[Any, Any], int]]) -> None:
        table, count = self._tensors["block_tables"], self._tensors["blocks_num"]
        for slot, first, blocks, total in grown:
            table[slot, first : first + len(blocks)].copy_(pinned(blocks), non_blocking=True)
            count[slot].copy_(torch.full_like(count[slot], total), non_blocking=True)


class DecodeStepper(Stepper):
    """Admits for the peers without what only hal's insertion makes use of."""

    device: Inserting  # type: ignore[assignment]

    def admit(self, request: Request) -> AdmittedRequest:
        if self.device.way == HAL:
            return super().admit(request)
        return admit(request, self.state.layout, vocab_size=self.vocab_size)
