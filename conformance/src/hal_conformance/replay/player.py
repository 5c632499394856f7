"""The replay of a recording: its calls on a device and on the reference models, and the first call that differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from hal_core import AdmittedRequest, Companion, SlotStatus, StateField, Step, Task, View
from hal_core.frames.bodies import decode_body
from hal_core.memory.dtypes import bfloat16_to_float32, dtype_of

from ..fixtures.state import StateFixture
from ..harness import backdoor
from ..harness.sinks import KeepingSink
from ..kit import Kit
from ..oracle.output import Row, expected_rows, found_rows, row_difference
from . import frames

COMPARED = 64
"""Steps between two comparisons of the state, where calls are not compared one by one."""
SOURCES = ("sampled_token_ids", "accept_tokens", "accept_num")
"""Fields in which a model leaves a step's tokens."""
_LEFT = (SlotStatus.PREEMPTED, SlotStatus.ABORTED)


class Differs(AssertionError):
    """The effect of a call differs from the reference model's: its number, and how."""


Saved = tuple[int, Any, KeepingSink, list[Row]]
"""A step whose output was saved: the call, its ticket, its sink, and the rows that its record must have."""


class Played(StateFixture):
    """A state, its reference model, and the steps whose records are not taken yet (``saved``).

    ``written``: not 0 in the state's bytes that the host has written since the last update. ``failed``: slot to
    admission id, of requests that got a token outside the vocabulary, and whose later tokens are not reported (G21).
    ``late``: slot to message, of errors that only the device knew when the step was launched.
    """

    def __init__(self, kit: Kit, frame: frames.State) -> None:
        fields = [StateField(*row) for row in frame.fields]
        beside = [Companion(name, [StateField(*row) for row in rows], same) for name, rows, same in frame.companions]
        super().__init__(kit, frame.sizes, name=frame.name, beside=beside, fields=fields)
        self.written = np.zeros_like(self.model.block)
        self.saved: dict[int, Saved] = {}
        self.late: dict[int, str] = {}
        self.failed: dict[int, int] = {}

    def model_wrote(self, step: Step, body: bytes | None) -> None:
        """Write the recorded tokens where the model has written them: in slots whose tokens the host did not write."""
        model, self.late = self.model, {}
        found = [] if body is None else found_rows(decode_body(memoryview(body)))
        rows = {row.request_id: row for row in found if row.status not in _LEFT}
        cells: list[tuple[str, int]] = []

        def put(name: str, slot: int, values: Any) -> None:  # noqa: ANN401 (a scalar or a row)
            model.set(name, slot, values)
            cells.append((name, slot))

        for slot in sorted(set(model.residents) - self._host_wrote()):
            row = rows.get(model.residents[slot].request.request_id)
            if row is None or (not row.tokens and row.status is not SlotStatus.ERROR):
                continue
            tokens = row.tokens
            if row.status is SlotStatus.ERROR and slot not in step.errors:
                if row.position == model.get("step_idx", slot):  # known late: the request has stopped before
                    self.late[slot] = row.message or ""
                    put("stop_flags", slot, [True])
                    continue
                tokens = [-1]  # outside the vocabulary; which token it was is not recorded
            put("accept_tokens" if step.speculative else "sampled_token_ids", slot, tokens)
            if step.speculative:
                put("accept_num", slot, [len(tokens)])
            if row.logprobs:
                shape = self.sizes.max_accept, self.sizes.max_logprobs + 1
                for name, values in (("topk_token_ids", row.alternatives), ("topk_logprobs", row.logprobs)):
                    held = model.cells[name][slot].reshape(shape).copy()
                    held[: len(values), : len(values[0])] = values
                    put(name, slot, held.reshape(-1))
                put("topk_ranks", slot, row.ranks)
        places = self.state.layout.fields
        runs = [(places[at].offset + slot * places[at].stride, model.cells[at][slot].tobytes()) for at, slot in cells]
        if runs:
            backdoor.put(self.device, self.state.memory, runs, self.stream)

    def _host_wrote(self) -> set[int]:
        """Return the slots in which the host has written a step's tokens."""
        slots = set[int]()
        for place in (self.state.layout.fields[name] for name in SOURCES):
            end = place.offset + place.stride * self.sizes.num_slots
            rows = self.written[place.offset : end].reshape(-1, place.stride)
            slots.update(np.flatnonzero(rows.any(axis=1)).tolist())
        return slots

    def rows_of(self, step: Step) -> list[Row]:
        """Return the rows of a step by the model, slot by slot."""
        model, rows, errors = self.model, list[Row](), {**step.errors, **step.recovered}
        for slot in step.orders[self.name].tolist():
            rows += expected_rows(model, [slot], speculative=step.speculative, logprobs=step.logprobs, errors=errors)
            if (resident := model.residents.get(slot)) is not None:
                if self.failed.get(slot) == resident.admission_id:
                    rows[-1] = Row(resident.request.request_id, position=model.get("step_idx", slot))
                elif rows[-1].message is None:
                    self.failed[slot] = resident.admission_id
                if slot in step.recovered:
                    rows[-1].status = SlotStatus.RECOVERED
        return rows


class Player:
    """One replay on one opened device. ``each``: compare the state after every call; else every :data:`COMPARED` steps
    and at the end, so that calls overlap on the device as they did for the worker.

    :param origin: where it was recorded.
    :param records: state and step to the recorded record, as a step's tokens are written before it is saved.
    """

    def __init__(self, kit: Kit, origin: str, records: Mapping[tuple[int, int], bytes], *, each: bool = False) -> None:
        self.kit, self.each, self._origin, self._records = kit, each, origin, records
        self.states: list[Played] = []
        self.requests: list[AdmittedRequest] = []
        self.calls = self.steps = self.skipped = 0

    def run(self, given: Iterable[frames.AnyFrame]) -> None:
        """Make the calls. Raises :class:`Differs` for the first whose effect differs."""
        for frame in given:
            self.calls += isinstance(frame, frames.Call)
            played = () if isinstance(frame, frames.State) else (self.states[frame.state],)
            try:
                getattr(self, f"_{type(frame).__name__.lower()}")(frame, *played)
            except Differs:
                raise
            except Exception as error:
                raise Differs(self.calls, f"{self._named(frame)} raised {type(error).__name__}: {error}") from error
            if self.each and isinstance(frame, frames.Call):
                self._compare(self._named(frame))
            elif isinstance(frame, frames.Save) and self.steps % COMPARED == 0:
                self._compare(f"the {self.calls} calls so far")
        self._compare(f"all {self.calls} calls")

    def _compare(self, after: str) -> None:
        for played in self.states:
            try:
                played.check(after)
            except AssertionError as wrong:
                raise Differs(self.calls, str(wrong)) from wrong

    def _named(self, frame: frames.AnyFrame) -> str:
        told = f"call {self.calls}, {frames.tag_of(frame)}"
        if isinstance(frame, frames.Update | frames.Save):
            return f"{told} of step {frame.step[0]}"
        if isinstance(frame, frames.Insert):
            tasks = [f"{kind.name.lower()} -> slot {slot}" for kind, slot, *_ in frame.tasks[:8]]
            return f"{told} ({', '.join(tasks)}{', …' * (len(frame.tasks) > 8)})"
        return told

    # -- what is no call ----------------------------------------------------------------------------------------------

    def _state(self, frame: frames.State) -> None:
        self.states.append(Played(self.kit, frame))

    def _admitted(self, frame: frames.Admitted, played: Played) -> None:
        extra = {name: row[0] if len(row) == 1 else row for name, row in frame.request.extra.items()}
        request = replace(frame.request, extra=extra)
        self.requests.append(admitted := played.state.admit(request))
        played.model.requests[admitted.admission_id] = request

    def _release(self, frame: frames.Release, played: Played) -> None:
        played.release(frame.slots)

    def _record(self, frame: frames.Record, played: Played) -> None:
        call, ticket, sink, should = played.saved.pop(frame.number)
        got = played.state.take(ticket) if frame.taken else ticket.record()
        sink.resolve_all()
        name = f"call {call}, save_output of step {frame.number}"
        if wrong := row_difference(found_rows(got), should):
            raise Differs(call, f"{name}: {wrong}")
        if wrong := row_difference(found_rows(decode_body(memoryview(frame.body))), should):
            why = f"the device that recorded it ({self._origin}) or its host was wrong there"
            raise Differs(call, f"{name}, as recorded: {wrong}\n{why}; this device gives the right record")

    # -- calls --------------------------------------------------------------------------------------------------------

    def _insert(self, frame: frames.Insert, played: Played) -> None:
        tasks = [
            Task(kind, slot, self.requests[number], computed, scheduled, blocks, first_block, token, drafts)
            for kind, slot, number, computed, scheduled, blocks, first_block, token, drafts in frame.tasks
        ]
        played.insert(tasks)

    def _setvalue(self, frame: frames.SetValue, played: Played) -> None:
        if frame.value is None:
            self.skipped += 1
            return
        dtype, shape, strides = dtype_of(frame.dtype), tuple(frame.shape), tuple(frame.strides)
        bits = np.frombuffer(frame.value, dtype.storage)
        value: Any = bits[0] if frame.fills else bits.reshape(shape)
        if 0 <= frame.offset < played.state.layout.nbytes:  # else it is a companion's, which has no model
            for block, values in ((played.model.block, value), (played.written, 1)):
                np.ndarray(shape, dtype.storage, block, frame.offset, strides)[...] = values
        given = bfloat16_to_float32(np.asarray(value)) if dtype.name == "bfloat16" else value
        target = View(played.state.memory, frame.offset, shape, strides, dtype, played.state)
        played.bound.async_set_value(target=target, value=given, stream=played.stream)

    def _broadcast(self, _: frames.Broadcast, played: Played) -> None:
        self.skipped += 1
        played.written[...] = 0  # the tokens are the first rank's, and in the record

    def _update(self, frame: frames.Update, played: Played) -> None:
        step = _step(frame.step)
        played.model_wrote(step, self._records.get((frame.state, step.number)))
        played.update_inputs(step)
        played.written[...] = 0

    def _drafts(self, frame: frames.Drafts, played: Played) -> None:
        played.propose(frame.drafts)

    def _save(self, frame: frames.Save, played: Played) -> None:
        self.steps += 1
        step, sink = _step(frame.step, played.late), KeepingSink()
        rows = played.rows_of(step)
        played.saved[step.number] = self.calls, played.save(step, sink), sink, rows

    def _reads(self, _: frames.Reads, played: Played) -> None:
        played.bound.order_after_reads(memory=played.state.memory, stream=played.stream)


def _step(row: frames.StepRow, late: Mapping[int, str] = MappingProxyType({})) -> Step:
    number, orders, speculative, group, logprobs, errors, recovered = row
    slots = {name: np.array(order, np.int32) for name, order in orders.items()}
    return Step(number, slots, speculative, group, logprobs, {**late, **errors}, recovered)
