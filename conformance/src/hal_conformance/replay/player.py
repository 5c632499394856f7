"""The replay of a recording: its calls on a device and on the reference models, and the first call that differs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from hal_core.errors import FrameError
from hal_core.frames.bodies import decode_body
from hal_core.group import Group
from hal_core.memory.dtypes import bfloat16_to_float32, dtype_of
from hal_core.memory.views import View
from hal_core.output.records import OutputRecord, SlotStatus
from hal_core.output.sinks import PendingOutput
from hal_core.slots.admission import AdmittedRequest, Request
from hal_core.slots.declared import Companion, StateField
from hal_core.slots.fields import SplitRole, StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind

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


class Differs(AssertionError):
    """The effect of a call differs from the reference model's: its number, and how."""


Saved = tuple[int, Any, list[PendingOutput], list[Row]]
"""A step whose output was saved: the call, its ticket, what its sink got, and the rows that its record must have."""


@dataclass
class Played:
    """A state, its reference model, and the steps whose records are not taken yet.

    ``written``: slots in which the host has written the tokens of the step since the last update. ``failed``: slot to
    admission id, of requests that got a token outside the vocabulary, and whose later tokens are not reported (G21).
    ``late``: slot to message, of errors that only the device knew when the step was launched.
    """

    fixture: StateFixture
    saved: dict[int, Saved] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    late: dict[int, str] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)


class Player:
    """One replay on one opened device. ``each``: compare the state after every call; else every :data:`COMPARED` steps
    and at the end, so that calls overlap on the device as they did for the worker."""

    def __init__(self, kit: Kit, path: Path, *, calls: int | None = None, each: bool = False) -> None:
        self.kit, self.path, self.each = kit, path, each
        self._left, self._ahead = frames.frames_of(path, calls), deque[frames.AnyFrame]()
        self.states: list[Played] = []
        self.requests: dict[int, Request | AdmittedRequest] = {}
        self.calls = self.steps = self.records = self.skipped = 0
        self.recorded_on = ""

    def run(self) -> None:
        """Make the calls. Raises :class:`Differs` for the first whose effect differs, and :class:`InvalidValue` for a
        file that cannot be replayed."""
        while (frame := self._ahead.popleft() if self._ahead else next(self._left, None)) is not None:
            self.calls += isinstance(frame, frames.Call)
            self._do(frame)
            if self.each and isinstance(frame, frames.Call):
                self._compare(self._named(frame))
            elif isinstance(frame, frames.Save) and self.steps % COMPARED == 0:
                self._compare(f"the {self.calls} calls so far")
        self._compare(f"all {self.calls} calls")

    def _do(self, frame: frames.AnyFrame) -> None:
        state = getattr(frame, "state", -1)
        if state >= len(self.states):
            raise self._refused(frame, "state", f"is {state}, and {len(self.states)} states come before it")
        try:
            getattr(self, f"_{type(frame).__name__.lower()}")(frame)
        except (frames.InvalidRecording, Differs):
            raise
        except Exception as error:
            raise Differs(self.calls, f"{self._named(frame)} raised {type(error).__name__}: {error}") from error

    def _refused(self, frame: frames.AnyFrame, field: str, what: str) -> frames.InvalidRecording:
        return frames.refused(self.path, f"{frames.tag_of(frame)}.{field}", what, "record it again")

    def _compare(self, after: str) -> None:
        for played in self.states:
            try:
                played.fixture.check(after)
            except AssertionError as wrong:
                raise Differs(self.calls, str(wrong)) from wrong

    def _named(self, frame: frames.AnyFrame) -> str:
        told = f"call {self.calls}, {frames.tag_of(frame)}"
        if isinstance(frame, frames.OfStep) and frame.step is not None:
            return f"{told} of step {frame.step[0]}"
        if isinstance(frame, frames.Insert):
            tasks = [f"{TaskKind(row[0]).name.lower()} -> slot {row[1]}" for row in frames.task_rows(frame)[:8]]
            return f"{told} ({', '.join(tasks)}{', …' * (len(frame.requests) > 8)})"
        return told

    # -- what is no call ----------------------------------------------------------------------------------------------

    def _header(self, frame: frames.Header) -> None:
        self.recorded_on = f"{frame.device} with hal {frame.release}"

    def _state(self, frame: frames.State) -> None:
        fields = [StateField(*row) for row in frame.fields]
        beside = [Companion(name, [StateField(*row) for row in rows], same) for name, rows, same in frame.companions]
        fixture = StateFixture(self.kit, StateConfig(**frame.sizes), name=frame.name, beside=beside, fields=fields)
        self.states.append(Played(fixture))

    def _admitted(self, frame: frames.Admitted) -> None:
        tokens = np.frombuffer(frame.tokens, np.int64).tolist()
        prompt, output, role = tokens[: frame.prompt], tokens[frame.prompt :], SplitRole(frame.role)
        extra = {name: row if len(row) > 1 else row[0] for name, row in frame.extra.items()}
        self.requests[frame.number] = Request(frame.request_id, prompt, frame.params, output, role, extra)

    def _release(self, frame: frames.Release) -> None:
        self.states[frame.state].fixture.release(frame.slots)

    def _record(self, frame: frames.Record) -> None:
        played = self.states[frame.state]
        if frame.number not in played.saved:
            raise self._refused(frame, "number", f"is {frame.number}, and no save_output of that step comes before it")
        call, ticket, given, should = played.saved.pop(frame.number)
        got = played.fixture.state.take(ticket) if frame.taken else ticket.record()
        for pending in given:
            pending.complete(None)
        self.records += 1
        recorded = self._decoded(frame)
        name = f"call {call}, save_output of step {frame.number}"
        if wrong := row_difference(found_rows(got), should):
            raise Differs(call, f"{name}: {wrong}")
        if wrong := row_difference(found_rows(recorded), should):
            why = f"the device that recorded it ({self.recorded_on}) or its host was wrong there"
            raise Differs(call, f"{name}, as recorded: {wrong}\n{why}; this device gives the right record")

    # -- calls --------------------------------------------------------------------------------------------------------

    def _insert(self, frame: frames.Insert) -> None:
        fixture = self.states[frame.state].fixture
        if unknown := {*frame.requests} - {*self.requests}:
            raise self._refused(frame, "requests", f"names {min(unknown)}, and no such request comes before it")
        pairs = zip(frames.task_rows(frame), frame.requests, strict=True)
        fixture.insert(
            [Task(TaskKind(row[0]), row[1], self._request(fixture, number), *row[2:]) for row, number in pairs]
        )

    def _setvalue(self, frame: frames.SetValue) -> None:
        if frame.value is None or frame.state < 0:
            self.skipped += 1
            return
        played, dtype = self.states[frame.state], dtype_of(frame.dtype)
        fixture, shape, strides = played.fixture, tuple(frame.shape), tuple(frame.strides)
        bits = np.frombuffer(frame.value, dtype.storage)
        value: Any = bits[0] if frame.fills else bits.reshape(shape)
        if 0 <= frame.offset < fixture.state.layout.nbytes:  # else it is a companion's, which has no model
            np.ndarray(shape, dtype.storage, fixture.model.block, frame.offset, strides)[...] = value
            played.written |= _source_slots(fixture, frame.offset, shape, strides)
        given = bfloat16_to_float32(np.asarray(value)) if dtype.name == "bfloat16" else value
        target = View(fixture.state.memory, frame.offset, shape, strides, dtype, fixture.state)
        fixture.bound.async_set_value(target=target, value=given, stream=fixture.stream)

    def _broadcast(self, frame: frames.Broadcast) -> None:
        self.skipped += 1
        self.states[frame.state].written.clear()  # the tokens are the first rank's, and in the record

    def _update(self, frame: frames.Update) -> None:
        played, step = self.states[frame.state], _step(frame.step)
        self._model_wrote(frame.state, played, step)
        played.fixture.update_inputs(step)
        played.written.clear()

    def _drafts(self, frame: frames.Drafts) -> None:
        self.states[frame.state].fixture.propose(frame.drafts)

    def _save(self, frame: frames.Save) -> None:
        played, self.steps = self.states[frame.state], self.steps + 1
        step = _step(frame.step, played.late)
        rows, sink = _rows(played, step), KeepingSink()
        played.saved[step.number] = self.calls, played.fixture.save(step, sink), sink.pending, rows

    def _reads(self, frame: frames.Reads) -> None:
        fixture = self.states[frame.state].fixture
        fixture.bound.order_after_reads(memory=fixture.state.memory, stream=fixture.stream)

    # -- the parts of a step ------------------------------------------------------------------------------------------

    def _request(self, fixture: StateFixture, number: int) -> AdmittedRequest:
        """Return a request, admitted when it is first inserted."""
        found = self.requests[number]
        if isinstance(found, AdmittedRequest):
            return found
        admitted = self.requests[number] = fixture.state.admit(found)
        fixture.model.requests[admitted.admission_id] = found
        return admitted

    def _model_wrote(self, state: int, played: Played, step: Step) -> None:
        """Write the recorded tokens where the model has written them: in slots whose tokens the host did not write."""
        fixture, played.late = played.fixture, {}
        own = set(fixture.model.residents) - played.written
        record = self._record_of(state, step.number) if own else None
        if record is None:
            return
        rows = {row.request_id: row for row in found_rows(record) if row.status not in _LEFT}
        runs: list[tuple[int, bytes]] = []

        def put(name: str, slot: int, values: Any) -> None:  # noqa: ANN401 (a scalar or a row)
            fixture.model.set(name, slot, values)
            place = fixture.state.layout.fields[name]
            runs.append((place.offset + slot * place.stride, fixture.model.cells[name][slot].tobytes()))

        for slot in sorted(own):
            resident = fixture.model.residents[slot]
            row = rows.get(resident.request.request_id)
            if row is None or (not row.tokens and row.status is not SlotStatus.ERROR):
                continue
            tokens = row.tokens
            if row.status is SlotStatus.ERROR and slot not in step.errors:
                if row.position == fixture.model.get("step_idx", slot):  # known late: the request has stopped before
                    played.late[slot] = row.message or ""
                    put("stop_flags", slot, [True])
                    continue
                tokens = [-1]  # outside the vocabulary; which token it was is not recorded
            if step.speculative:
                put("accept_tokens", slot, tokens)
                put("accept_num", slot, [len(tokens)])
            else:
                put("sampled_token_ids", slot, tokens)
            if row.logprobs:
                _put_alternatives(fixture, slot, row, put)
        if runs:
            backdoor.put(fixture.device, fixture.state.memory, runs, fixture.stream)

    def _record_of(self, state: int, number: int) -> OutputRecord | None:
        """Return the record of a step, which comes later in the file; None if it has none."""
        for frame in chain([*self._ahead], self._pulled()):
            if isinstance(frame, frames.Record) and (frame.state, frame.number) == (state, number):
                return self._decoded(frame)
        return None

    def _decoded(self, frame: frames.Record) -> OutputRecord:
        try:
            return decode_body(memoryview(frame.body))
        except FrameError as error:
            raise self._refused(frame, "body", f"is not valid: {error}") from None

    def _pulled(self) -> Iterator[frames.AnyFrame]:
        for frame in self._left:
            self._ahead.append(frame)
            yield frame


_LEFT = (SlotStatus.PREEMPTED, SlotStatus.ABORTED)


def _step(row: frames.StepRow | None, late: Mapping[int, str] | None = None) -> Step:
    assert row is not None, "the reader of the file fills it in"
    number, orders, speculative, (ranks, rank), logprobs, errors, recovered = row
    slots = {name: np.frombuffer(order, np.int32) for name, order in orders.items()}
    return Step(number, slots, speculative, Group(tuple(ranks), rank), logprobs, {**(late or {}), **errors}, recovered)


def _rows(played: Played, step: Step) -> list[Row]:
    """Return the rows of a step by the model, slot by slot."""
    model, rows = played.fixture.model, list[Row]()
    options = {"speculative": step.speculative, "logprobs": step.logprobs, "errors": {**step.errors, **step.recovered}}
    for slot in step.orders[played.fixture.name].tolist():
        found = expected_rows(model, [slot], **options)  # type: ignore[arg-type]
        if (resident := model.residents.get(slot)) is not None:
            if played.failed.get(slot) == resident.admission_id:
                found[-1] = Row(resident.request.request_id, position=model.get("step_idx", slot))
            elif found[-1].message is None:
                played.failed[slot] = resident.admission_id
            if slot in step.recovered:
                found[-1].status = SlotStatus.RECOVERED
        rows += found
    return rows


def _source_slots(fixture: StateFixture, offset: int, shape: Sequence[int], strides: Sequence[int]) -> set[int]:
    """Return the slots whose tokens of the step a view shows."""
    at = np.array(offset)
    for count, stride in zip(shape, strides, strict=True):
        at = np.add.outer(at, np.arange(count) * stride)
    slots = set[int]()
    for place in (fixture.state.layout.fields[name] for name in SOURCES):
        inside = at[(at >= place.offset) & (at < place.offset + place.stride * fixture.sizes.num_slots)]
        slots.update(((inside - place.offset) // place.stride).tolist())
    return slots


def _put_alternatives(fixture: StateFixture, slot: int, row: Row, put: Callable[[str, int, Any], None]) -> None:
    """Write the log-probabilities of a row."""
    shape = (fixture.sizes.max_accept, fixture.sizes.max_logprobs + 1)
    for name, values in (("topk_token_ids", row.alternatives), ("topk_logprobs", row.logprobs)):
        cells = fixture.model.cells[name][slot].reshape(shape).copy()
        cells[: len(values), : len(values[0])] = values
        put(name, slot, cells.reshape(-1))
    put("topk_ranks", slot, row.ranks)
