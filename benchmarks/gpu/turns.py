"""hal's turns of the decode gap: all hooks in their order, and when the next step's requests are taken care of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
from hal_core.group import ALONE
from hal_core.output.sinks import MemorySink
from hal_core.slots.step import Step
from hal_core.slots.tasks import TaskBatch

from .rig import SLOTS, Rig, blocks_of

Turn = tuple[int, int]
"""Which of how many: one inserts at every step whose number leaves that when divided by the second."""
Parts = dict[str, list[float]]
OURS = "hal"


@dataclass(frozen=True)
class Manner:
    """When the next step's requests are handled, and which parts are left out, to find their cost.

    - ``made_ahead``: their batch is made while the device runs the step before.
    - ``inserted_ahead``: it is inserted then, too, before the tokens of the step before are read: for slots that were
      free before it.
    - ``without``: hooks that are left out; "thread": the sink drops outputs, and has no thread.
    """

    made_ahead: bool = False
    inserted_ahead: bool = False
    without: frozenset[str] = frozenset()


def _without(*names: str) -> Manner:
    return Manner(made_ahead=True, without=frozenset(names))


MANNERS = {
    OURS: Manner(),
    "hal, batch made ahead": Manner(made_ahead=True),
    "hal, inserted ahead": Manner(made_ahead=True, inserted_ahead=True),
    "hal, batch made ahead, without the sink's thread": _without("thread"),
    "hal, batch made ahead, without async_set_value": _without("async_set_value"),
    "hal, batch made ahead, without insert_tasks": _without("insert_tasks"),
    "hal, without either": _without("insert_tasks", "async_set_value"),
    "hal, without update_inputs too": _without("insert_tasks", "async_set_value", "update_inputs"),
}


class _Dropped:
    """A sink that drops outputs without reading them."""

    session = 1

    def put(self, pending: Any) -> None:  # noqa: ANN401
        pending.complete(None)

    def close(self, timeout: float) -> None:
        """Return at once."""


class Turns:
    """Steps of 128 running slots, into which ``count`` requests enter at each turn of ours."""

    def __init__(
        self,
        rig: Rig,
        decode: Callable[[int, int], None],
        manner: Manner,
        count: int,
        tokens: int,
        steps: int,
        turn: Turn = (0, 1),
    ) -> None:
        """``decode(number, tokens)`` launches the step's stand-in, which writes tokens to that address."""
        self.rig, self.decode, self.manner, self.count, self.turn = rig, decode, manner, count, turn
        self.blocks, self.lengths = blocks_of(count, tokens), [tokens] * count
        every, state = list(range(SLOTS)), rig.state
        first = TaskBatch.prefill(every, rig.admit(SLOTS, tokens), [tokens] * SLOTS, blocks_of(SLOTS, tokens))
        rig.device.insert_tasks(state=state, tasks=first, stream=rig.stream)
        self.admitted = [rig.admit(count, tokens) for _ in range(-(-steps // turn[1]))]
        self.sampled = state.memory.address + state.layout.fields["sampled_token_ids"].offset
        self.temperature, self.order = state.view("temperature")[0], np.arange(SLOTS)
        self.sink: Any = _Dropped() if "thread" in manner.without else MemorySink(threaded=True)
        self.parts: Parts = {}
        self._made: dict[int, TaskBatch] = {}
        self._inserted = -1
        self._at = 0

    def note(self, name: str) -> None:
        """The time since the last note, in us."""
        now = perf_counter_ns()
        self.parts.setdefault(name, []).append((now - self._at) / 1e3)
        self._at = perf_counter_ns()

    def launch(self, number: int) -> Any:  # noqa: ANN401 (an output's ticket)
        """Insert the remaining requests, and launch the step. Return the ticket of its output."""
        rig, device, state, stream = self.rig, self.rig.device, self.rig.state, self.rig.stream
        self._at, left_out = perf_counter_ns(), self.manner.without
        self._insert(number)
        if "async_set_value" not in left_out:
            device.async_set_value(target=self.temperature, value=0.5, stream=stream)
            self.note("async_set_value")
        self.decode(number, self.sampled)
        self.note("decode kernel")
        device.broadcast_tokens(state=state, group=ALONE, stream=stream)
        step = Step(number, {"target": self.order})
        if "update_inputs" not in left_out:
            device.update_inputs(state=state, step=step, stream=stream)
        self.note("update_inputs")
        ticket = device.save_output(state=state, step=step, sink=self.sink, stream=rig.stream)
        self.note("save_output")
        return ticket

    def prepare(self, number: int) -> None:
        """Do the work that this variant does for step ``number`` while the device runs the step before."""
        self._at = perf_counter_ns()
        if self.manner.inserted_ahead:
            self._insert(number)
        elif self.manner.made_ahead and number % self.turn[1] == self.turn[0]:
            self._made[number] = self._batch(number)

    def take(self, ticket: Any) -> None:  # noqa: ANN401
        """Wait for a step's output."""
        self._at = perf_counter_ns()
        self.rig.state.take(ticket)
        self.note("take")

    def close(self, under_way: Iterable[Any]) -> None:
        """Wait for the rest, and free all slots."""
        for ticket in under_way:
            ticket.wait()
        self.sink.close(10.0)
        self.rig.state.release(range(SLOTS))

    def _insert(self, number: int) -> None:
        if number % self.turn[1] != self.turn[0] or number <= self._inserted or "insert_tasks" in self.manner.without:
            return
        if number // self.turn[1] >= len(self.admitted):
            return
        self._inserted = number
        state = self.rig.state
        state.release(slots_of(number // self.turn[1], self.count))
        self.note("release")
        batch = self._batch(number)
        self.note("batch")
        self.rig.device.insert_tasks(state=state, tasks=batch, stream=self.rig.stream)
        self.note("insert_tasks")

    def _batch(self, number: int) -> TaskBatch:
        at = number // self.turn[1]
        found = self._made.pop(number, None)
        if found is None:
            requests = self.admitted[min(at, len(self.admitted) - 1)]
            found = TaskBatch.prefill(slots_of(at, self.count), requests, self.lengths, self.blocks)
        return found


def slots_of(step: int, count: int) -> list[int]:
    """The slots that step number ``step`` fills; they go round."""
    return [(step * count + i) % SLOTS for i in range(count)]
