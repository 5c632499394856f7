"""An observer that records every call of an opened device that changes a slot state."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.contract.markers import hookimpl
from hal_core.errors import HalError, InvalidValue
from hal_core.frames.bodies import encode_body
from hal_core.memory.dtypes import bfloat16_to_float32
from hal_core.memory.views import View
from hal_core.slots.fields import STATE_TABLE
from hal_core.slots.state import SlotState
from hal_core.slots.tasks import ENTERING, LEAVING, TaskBatch

from . import frames

if TYPE_CHECKING:
    from hal_core.group import Group
    from hal_core.memory.values import Value
    from hal_core.memory.writes import Writes
    from hal_core.output.records import OutputRecord
    from hal_core.output.ticket import OutputTicket
    from hal_core.runtime.bound import BoundDevice
    from hal_core.slots.admission import AdmittedRequest
    from hal_core.slots.step import Step

MOST_PENDING = 64
"""Steps whose records a worker has not taken; of more, those that are done are written."""
_MOVING = frozenset(ENTERING + LEAVING)
_OURS = {field.name for field in STATE_TABLE}
Watching = Generator[None, Any, object]


class _Kept:
    """A recorded state: its number, the admission ids in its slots as bytes, its last recorded step, and the steps
    whose records are not written."""

    def __init__(self, state: SlotState, number: int) -> None:
        self.state, self.number, self.mirror = state, number, state.mirror
        self.held = bytes(8 * state.sizes.num_slots)
        self.step: Step | None = None
        self.pending: dict[int, OutputTicket] = {}


class CallRecorder:
    """Records the calls of an opened device into a file, from now on until :meth:`close`.

    It is one of the device's observers (:mod:`hal_core.runtime.observers`): it changes no call and does not wait.
    States of which something was set before are recorded as if they were empty, so it is made before them.

    :param bound: the opened device; close the recorder first.
    :raises OSError: if the file cannot be written; a full disk later is raised by :meth:`close`.
    :raises InvalidValue: for a file that exists and is no recording. A recording is written over.
    """

    def __init__(self, path: str | Path, bound: BoundDevice) -> None:
        self._out = frames.Writer(Path(path))
        self._states: dict[int, _Kept] = {}
        self._requests: dict[int, int] = {}  # admission id to number
        self._broken: Exception | None = None
        self._closed = False
        self._calls: dict[str, Callable[..., None]] = {
            "update_inputs": self._update_inputs,
            "set_drafts": self._set_drafts,
            "order_after_reads": self._order_after_reads,
            "write": self._write,
        }
        self._keep(self._out.put, frames.Header, version("paddle-hal-core"), bound.name)
        bound.observe(self, name=f"the recorder of {path}")

    # -- observed calls -----------------------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def insert_tasks(self, state: SlotState, tasks: TaskBatch) -> Watching:
        """Record the tasks, and before them the requests that are new."""
        ticket = yield
        self._keep(self._insert, state, tasks)
        return ticket

    @hookimpl(wrapper=True)
    def async_set_value(self, target: View, value: Value) -> Watching:
        """Record the target and a value of the host."""
        ticket = yield
        self._keep(self._set, target, value)
        return ticket

    @hookimpl(wrapper=True)
    def broadcast_tokens(self, state: SlotState, group: Group) -> Watching:
        """Record the group; a group of one does not communicate, so no observer sees it."""
        ticket = yield
        self._keep(self._call, frames.Broadcast, state, group.ranks, group.rank)
        return ticket

    @hookimpl(wrapper=True)
    def save_output(self, state: SlotState, step: Step) -> Watching:
        """Record the step, and keep its ticket for its record."""
        ticket = yield
        self._keep(self._save, state, step, ticket)
        return ticket

    def called(self, call: str, arguments: Mapping[str, Any]) -> None:
        """Record a call that is no hook, if it changes a state."""
        if (act := self._calls.get(call)) is not None:
            self._keep(act, **arguments)

    def close(self) -> None:
        """Write the records that are left, and close the file. Raises what kept a call from being recorded."""
        for kept in self._states.values():
            self._keep(self._sync, kept.state)
            self._keep(self._write_records, kept, [*kept.pending], None)
        self._closed = True
        self._out.close(whole=self._broken is None)  # a full disk is raised here
        if self._broken is not None:
            raise self._broken

    # -- frames --------------------------------------------------------------------------------------------------------

    def _keep(self, act: Callable[..., object], *arguments: object, **named: object) -> None:
        """Run ``act``; after its first error, the recording ends there. Errors of an observer would only be logged."""
        if self._broken is None and not self._closed:
            try:
                act(*arguments, **named)
            except Exception as error:  # noqa: BLE001 (raised by close)
                self._broken = error

    def _call(self, kind: type[frames.Call], state: SlotState, *given: object) -> None:
        self._out.put(kind, self._sync(state).number, *given)

    def _insert(self, state: SlotState, tasks: TaskBatch) -> None:
        kept = self._sync(state)
        for request in tasks.requests:
            if request.admission_id not in self._requests:
                self._requests[request.admission_id] = number = len(self._requests)
                self._out.put(_admitted, state, request, number)
        numbers = [self._requests[request.admission_id] for request in tasks.requests]
        self._out.put(frames.Insert, kept.number, numbers, tasks.ints)
        if not _MOVING.isdisjoint(kinds := tasks.plain["kinds"]):
            held = np.frombuffer(bytearray(kept.held), np.int64)
            for kind, slot, request in zip(kinds, tasks.plain["slots"], tasks.requests, strict=True):
                if kind in _MOVING:
                    held[slot] = request.admission_id if kind in ENTERING else 0
            kept.held = held.tobytes()

    def _set(self, target: View, value: Value) -> None:
        kept, fills = self._of_memory(target), isinstance(value, np.generic)
        data = None if isinstance(value, View) or kept is None else value.tobytes()
        places = target.offset, target.shape, target.strides, target.dtype.name
        self._out.put(frames.SetValue, -1 if kept is None else kept.number, *places, fills, data)

    def _save(self, state: SlotState, step: Step, ticket: OutputTicket) -> None:
        kept = self._of_step(frames.Save, state, step)
        kept.pending[step.number] = ticket
        if len(kept.pending) > MOST_PENDING:
            self._write_records(kept, [number for number, one in kept.pending.items() if one.done()], None)

    def _update_inputs(self, state: SlotState, step: Step, **_: object) -> None:
        self._of_step(frames.Update, state, step)

    def _of_step(self, kind: type[frames.OfStep], state: SlotState, step: Step) -> _Kept:
        kept = self._sync(state)
        self._out.put(_of_step, kind, kept.number, None if step is kept.step else step)
        kept.step = step
        return kept

    def _set_drafts(self, state: SlotState, step: Step, drafts: Mapping[int, Any], **_: object) -> None:
        self._call(frames.Drafts, state, step.number, frames.encoded(dict(drafts)))

    def _order_after_reads(self, memory: object, **_: object) -> None:
        for kept in self._states.values():
            if kept.state.memory is memory:
                self._out.put(frames.Reads, kept.number)

    def _write(self, writes: Writes, **_: object) -> None:
        if any(isinstance(owner, SlotState) for owner in writes.owners.values()):
            raise InvalidValue("a write into a state is not recorded", cure="use async_set_value", argument="writes")

    def _sync(self, state: SlotState) -> _Kept:
        """Write the records that the worker took and the slots that it released since the last such call; return the
        state's entry."""
        kept = self._entry(state)
        if state.mirror is not kept.mirror:
            kept.mirror = state.mirror
            column = kept.mirror["step_idx"]
            found = [number for number, one in kept.pending.items() if one.columns.get("step_idx") is column]
            for taken in found:
                self._write_records(kept, [number for number in kept.pending if number <= taken], taken)
        held = state.host_table.admission_ids.tobytes()
        if held != kept.held:
            released = np.flatnonzero(np.frombuffer(held, np.int64) != np.frombuffer(kept.held, np.int64)).tolist()
            kept.held = held
            self._out.put(frames.Release, kept.number, released)
        return kept

    def _write_records(self, kept: _Kept, numbers: list[int], taken: int | None) -> None:
        for number in numbers:
            ticket = kept.pending.pop(number)
            if not ticket.ready():
                continue  # the worker has ended without it
            try:
                record = ticket.record()
            except HalError:  # ranks disagreed: the step has no record
                continue
            self._out.put(_of_record, kept.number, number, number == taken, record)

    def _of_memory(self, target: View) -> _Kept | None:
        """Return the state whose memory a view shows, a companion's target for a companion."""
        shown = [kept.state for kept in self._states.values() if kept.state.memory is target.memory]
        owner = shown[0] if shown else target.owner
        return self._entry(owner) if isinstance(owner, SlotState) else None

    def _entry(self, state: SlotState) -> _Kept:
        """Return a state's entry; write a new state."""
        if (kept := self._states.get(id(state))) is not None:
            return kept
        kept = self._states[id(state)] = _Kept(state, len(self._states))
        beside = [(one.name, _declared(one), one.same_slots) for one in state.companions]
        sizes = {name: getattr(state.sizes, name) for name in state.sizes.__slots__}
        self._out.put(frames.State, state.name, sizes, _declared(state), beside)
        return kept


def _of_step(kind: type[frames.OfStep], state: int, step: Step | None) -> frames.OfStep:
    if step is None:
        return kind(state, None)
    orders = {name: order.tobytes() for name, order in step.orders.items()}
    group = [*step.group.ranks], step.group.rank
    options = step.speculative, group, step.logprobs, dict(step.errors), dict(step.recovered)
    return kind(state, (step.number, orders, *options))


def _of_record(state: int, number: int, taken: bool, record: OutputRecord) -> frames.Record:
    return frames.Record(state, number, taken, b"".join(encode_body(record)))


def _declared(state: SlotState) -> list[frames.FieldRow]:
    rows: list[frames.FieldRow] = []
    for place in state.layout.fields.values():
        if (own := place.field).name not in _OURS:
            groups, valued = " ".join(sorted(own.groups)), own.source is not None
            rows.append(
                (own.name, own.dtype.name, place.width, own.reset, groups, "extra" if valued else None, own.kept)
            )
    return rows


def _admitted(state: SlotState, request: AdmittedRequest, number: int) -> frames.Admitted:
    extra: dict[str, list[float | int | bool]] = {}
    layouts = {one.layout.config_key: one.layout for one in (state, *state.companions)}
    for one in (request, *request.beside):
        record = np.frombuffer(one.packed, layouts[one.config_key].admission_dtype)["record"][0]
        for place in layouts[one.config_key].declared:
            bits, bfloat16 = np.atleast_1d(record[place.field.name]), place.field.dtype.name == "bfloat16"
            extra[place.field.name] = (bfloat16_to_float32(bits) if bfloat16 else bits).tolist()
    told = request.tokens.tobytes(), request.prompt_len, request.params, int(request.role), extra
    return frames.Admitted(number, request.request_id, *told)
