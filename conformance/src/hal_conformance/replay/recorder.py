"""An observer that records every call of an opened device that changes a slot state."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from hal_core import HalError, InvalidValue, Request, SlotState, View, hookimpl
from hal_core.frames.bodies import encode_body
from hal_core.memory.dtypes import bfloat16_to_float32
from hal_core.slots.fields import STATE_TABLE

from . import frames

if TYPE_CHECKING:
    from hal_core import AdmittedRequest, BoundDevice, Group, OutputRecord, OutputTicket, Step, TaskBatch, Writes
    from hal_core.devices import Value

MOST_PENDING = 64
"""Steps whose records a worker has not taken; of more, those that are there are written."""
_OURS = {field.name for field in STATE_TABLE}
Watching = Generator[None, Any, object]


class _Kept:
    """A recorded state and its number. ``held``: not 0 in slots that a request held at the last look or has entered
    since; ``pending``: the steps whose records are not written."""

    def __init__(self, state: SlotState, number: int) -> None:
        self.state, self.number, self.mirror = state, number, state.mirror
        self.held = np.zeros(state.sizes.num_slots, np.int64)
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
        self._out = frames.Writer(Path(path), f"{bound.name} with hal {version('paddle-hal-core')}")
        self._states: dict[int, _Kept] = {}
        self._requests: dict[int, int] = {}  # admission id to number
        self._closed = False
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
        """Record the target and a value of the host, if the target is a state's memory."""
        ticket = yield
        self._keep(self._set, target, value)
        return ticket

    @hookimpl(wrapper=True)
    def broadcast_tokens(self, state: SlotState, group: Group) -> Watching:
        """Record the group; a group of one does not communicate, so no observer sees it."""
        ticket = yield
        self._keep(self._call, frames.Broadcast, state, group)
        return ticket

    @hookimpl(wrapper=True)
    def save_output(self, state: SlotState, step: Step) -> Watching:
        """Record the step, and keep its ticket for its record."""
        ticket = yield
        self._keep(self._save, state, step, ticket)
        return ticket

    def called(self, call: str, arguments: Mapping[str, Any]) -> None:
        """Record a call that is no hook, if it changes a state."""
        if (act := getattr(self, f"_after_{call}", None)) is not None:
            self._keep(act, **arguments)

    def close(self) -> None:
        """Write the records that are left, and close the file. Raises what kept a call from being recorded."""
        for kept in self._states.values():
            self._keep(self._sync, kept.state)
            self._keep(self._write_records, kept, max(kept.pending, default=0))
        self._closed = True
        self._out.close()

    # -- frames --------------------------------------------------------------------------------------------------------

    def _keep(self, act: Callable[..., object], *arguments: object, **named: object) -> None:
        """Run ``act``; after its first error, the recording ends there. Errors of an observer would only be logged."""
        if self._out.error is None and not self._closed:
            try:
                act(*arguments, **named)
            except Exception as error:  # noqa: BLE001 (raised by close)
                self._out.error = error

    def _call(self, make: Callable[..., frames.Call], state: SlotState, *given: object) -> None:
        self._out.put(make, self._sync(state).number, *given)

    def _insert(self, state: SlotState, tasks: TaskBatch) -> None:
        kept = self._sync(state)
        for request in tasks.requests:
            if request.admission_id not in self._requests:
                self._requests[request.admission_id] = len(self._requests)
                self._out.put(_admitted, kept.number, state, request)
        self._out.put(_insert, kept.number, tasks, [self._requests[one.admission_id] for one in tasks.requests])
        kept.held[tasks.slots] = -1

    def _set(self, target: View, value: Value) -> None:
        if (kept := self._of_memory(target)) is not None:
            places = target.offset, target.shape, target.strides, target.dtype.name
            data = None if isinstance(value, View) else value.tobytes()
            self._out.put(frames.SetValue, kept.number, *places, isinstance(value, np.generic), data)

    def _save(self, state: SlotState, step: Step, ticket: OutputTicket) -> None:
        self._call(_of_step, state, frames.Save, step)
        kept = self._states[id(state)]
        kept.pending[step.number] = ticket
        if len(kept.pending) > MOST_PENDING:
            self._write_records(kept, step.number)

    def _after_update_inputs(self, state: SlotState, step: Step, **_: object) -> None:
        self._call(_of_step, state, frames.Update, step)

    def _after_set_drafts(self, state: SlotState, step: Step, drafts: Mapping[int, Any], **_: object) -> None:
        given = msgspec.Raw(frames.encode(drafts))  # at once, as the caller's lists may change
        self._call(frames.Drafts, state, step.number, given)

    def _after_order_after_reads(self, memory: object, **_: object) -> None:
        for kept in self._states.values():
            if kept.state.memory is memory:
                self._out.put(frames.Reads, kept.number)

    def _after_write(self, writes: Writes, **_: object) -> None:
        if any(isinstance(owner, SlotState) for owner in writes.owners.values()):
            raise InvalidValue("a write into a state is not recorded", cure="use async_set_value", argument="writes")

    def _sync(self, state: SlotState) -> _Kept:
        """Write the records that the worker took and the slots that it released since the last such call; return the
        state's entry."""
        kept, held = self._entry(state), state.host_table.admission_ids
        if state.mirror is not kept.mirror:
            kept.mirror, column = state.mirror, state.mirror["step_idx"]
            for number in [at for at, one in kept.pending.items() if one.columns.get("step_idx") is column]:
                self._write_records(kept, number, taken=True)
        if held.tobytes() != kept.held.tobytes():
            if released := np.flatnonzero((held == 0) & (kept.held != 0)).tolist():
                self._out.put(frames.Release, kept.number, released)
            kept.held = held.copy()
        return kept

    def _write_records(self, kept: _Kept, last: int, *, taken: bool = False) -> None:
        """Write the records that are there, up to step ``last``, which the worker took."""
        for number in [at for at, ticket in kept.pending.items() if at <= last and ticket.ready()]:
            try:
                record = kept.pending.pop(number).record()
            except HalError:  # ranks disagreed: the step has no record
                continue
            self._out.put(_record, kept.number, number, taken and number == last, record)

    def _of_memory(self, target: View) -> _Kept | None:
        """Return the state whose memory a view shows, a companion's target for a companion."""
        shown = [kept for kept in self._states.values() if kept.state.memory is target.memory]
        return shown[0] if shown else self._entry(target.owner) if isinstance(target.owner, SlotState) else None

    def _entry(self, state: SlotState) -> _Kept:
        """Return a state's entry; write a new state."""
        if (kept := self._states.get(id(state))) is None:
            kept = self._states[id(state)] = _Kept(state, len(self._states))
            beside = [(one.name, _declared(one), one.same_slots) for one in state.companions]
            self._out.put(frames.State, state.name, state.sizes, _declared(state), beside)
        return kept


def _of_step(state: int, kind: type[frames.Update | frames.Save], step: Step) -> frames.Call:
    errors = step.errors, step.recovered
    return kind(state, (step.number, step.orders, step.speculative, step.group, step.logprobs, *errors))  # type: ignore[arg-type]


def _record(state: int, number: int, taken: bool, record: OutputRecord) -> frames.Record:
    return frames.Record(state, number, taken, b"".join(encode_body(record)))


def _insert(state: int, tasks: TaskBatch, requests: list[int]) -> frames.Insert:
    plain = tasks.plain
    columns = plain["kinds"], plain["slots"], requests, plain["num_computed_tokens"], plain["num_scheduled_tokens"]
    rows = zip(*columns, tasks.block_ids, plain["first_blocks"], plain["first_tokens"], tasks.drafts, strict=True)
    return frames.Insert(state, [*rows])


def _declared(state: SlotState) -> list[frames.FieldRow]:
    rows: list[frames.FieldRow] = []
    for place in state.layout.fields.values():
        if (own := place.field).name not in _OURS:
            of, value = (own.name, own.dtype.name, place.width, own.reset), own.source is not None
            rows.append((*of, " ".join(sorted(own.groups)), "extra" if value else None, own.kept))
    return rows


def _admitted(number: int, state: SlotState, request: AdmittedRequest) -> frames.Admitted:
    """Return the request with the values of its declared fields, which are only in its packed records."""
    extra: dict[str, list[float | int | bool]] = {}
    layouts = {one.layout.config_key: one.layout for one in (state, *state.companions)}
    for one in (request, *request.beside):
        record = np.frombuffer(one.packed, layouts[one.config_key].admission_dtype)["record"][0]
        for place in layouts[one.config_key].declared:
            bits, bfloat16 = np.atleast_1d(record[place.field.name]), place.field.dtype.name == "bfloat16"
            extra[place.field.name] = (bfloat16_to_float32(bits) if bfloat16 else bits).tolist()
    tokens = request.tokens.tolist()
    prompt, output = tokens[: request.prompt_len], tokens[request.prompt_len :]
    own = Request(request.request_id, prompt, request.params, output, request.role, extra)
    return frames.Admitted(number, own)
