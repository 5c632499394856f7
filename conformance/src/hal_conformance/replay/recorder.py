"""An observer that records every call of an opened device that changes a slot state."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import HalError, InvalidValue, Request, SlotState, View, hookimpl
from hal_core.frames.bodies import encode_body
from hal_core.memory.dtypes import bfloat16_to_float32
from hal_core.slots.fields import STATE_TABLE
from msgspec import Raw

from .frames import FieldRow, Frame, Writer, encode

if TYPE_CHECKING:
    from hal_core import AdmittedRequest, BoundDevice, Group, OutputRecord, OutputTicket, Step, TaskBatch
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
    :raises OSError: if the file cannot be opened; an error of writing, as of a full disk, is raised by :meth:`close`.
    :raises InvalidValue: if the file is no recording, or another run writes it. The first call replaces a recording.
    """

    def __init__(self, path: str | Path, bound: BoundDevice) -> None:
        self._out = Writer(Path(path), f"{bound.name} with hal {version('paddle-hal-core')}")
        self._states: dict[int, _Kept] = {}  # by their memory, which companions share
        self._requests: dict[int, int] = {}  # admission id to number
        bound.observe(self, name=f"the recorder of {path}")

    @hookimpl(wrapper=True)
    def insert_tasks(self, state: SlotState, tasks: TaskBatch) -> Watching:
        """Record the tasks, and before them the requests that are new."""
        ticket = yield
        with self._out:
            kept = self._sync(state)
            for request in tasks.requests:
                if request.admission_id not in self._requests:
                    self._requests[request.admission_id] = len(self._requests)
                    self._out.put(_admitted, kept.number, state, request)
            self._out.put(_insert, kept.number, tasks, [self._requests[one.admission_id] for one in tasks.requests])
            kept.held[tasks.slots] = -1
        return ticket

    @hookimpl(wrapper=True)
    def async_set_value(self, target: View, value: Value) -> Watching:
        """Record the target and a value of the host, if the target is a state's memory."""
        ticket = yield
        with self._out:
            kept = self._states.get(id(target.memory))
            if kept is None and isinstance(target.owner, SlotState):
                kept = self._entry(target.owner)
            if kept is not None:
                fills, data = isinstance(value, np.generic), None if isinstance(value, View) else value.tobytes()
                places = target.offset, target.shape, target.strides, target.dtype.name
                self._out.put(Frame, "async_set_value", kept.number, (*places, fills, data))
        return ticket

    @hookimpl(wrapper=True)
    def broadcast_tokens(self, state: SlotState, group: Group) -> Watching:
        """Record the group; a group of one does not communicate, so no observer sees it."""
        ticket = yield
        with self._out:
            self._out.put(Frame, "broadcast_tokens", self._sync(state).number, (group,))
        return ticket

    @hookimpl(wrapper=True)
    def save_output(self, state: SlotState, step: Step) -> Watching:
        """Record the step, and keep its ticket for its record."""
        ticket = yield
        with self._out:
            kept = self._sync(state)
            self._out.put(_of_step, "save_output", kept.number, step)
            kept.pending[step.number] = ticket
            if len(kept.pending) > MOST_PENDING:
                self._write_records(kept, step.number)
        return ticket

    def called(self, call: str, arguments: Mapping[str, Any]) -> None:
        """Record a call that is no hook, if it changes a state."""
        with self._out:
            if call == "update_inputs":
                self._out.put(_of_step, call, self._sync(arguments["state"]).number, arguments["step"])
            elif call == "set_drafts":
                drafts = Raw(encode(arguments["drafts"]))  # at once, as the caller's lists may change
                self._out.put(Frame, call, self._sync(arguments["state"]).number, (arguments["step"].number, drafts))
            elif call == "order_after_reads" and (kept := self._states.get(id(arguments["memory"]))) is not None:
                self._out.put(Frame, call, kept.number, ())
            elif call == "write" and any(isinstance(one, SlotState) for one in arguments["writes"].owners.values()):
                raise InvalidValue("a write to a state is not recorded", cure="use async_set_value", argument="writes")

    def close(self) -> None:
        """Write the records that are left, and close the file. Raises what kept a call from being recorded."""
        with self._out:
            for kept in self._states.values():
                self._sync(kept.state)
                self._write_records(kept, max(kept.pending, default=0))
        self._out.close()

    def _sync(self, state: SlotState) -> _Kept:
        """Write the records taken and the slots released since the last such call; return the state's entry."""
        kept, held = self._entry(state), state.host_table.admission_ids
        if state.mirror is not kept.mirror:
            kept.mirror, column = state.mirror, state.mirror["step_idx"]
            for number in [at for at, one in kept.pending.items() if one.columns.get("step_idx") is column]:
                self._write_records(kept, number, taken=True)
        if held.tobytes() != kept.held.tobytes():
            if released := np.flatnonzero((held == 0) & (kept.held != 0)).tolist():
                self._out.put(Frame, "release", kept.number, (released,))
            kept.held = held.copy()
        return kept

    def _write_records(self, kept: _Kept, last: int, *, taken: bool = False) -> None:
        """Write the records that are there, up to step ``last``, which the worker took."""
        for number in [at for at, ticket in kept.pending.items() if at <= last and ticket.ready()]:
            with suppress(HalError):  # ranks disagreed: the step has no record
                record = kept.pending.pop(number).record()
                self._out.put(_record, kept.number, number, taken and number == last, record)

    def _entry(self, state: SlotState) -> _Kept:
        """Return a state's entry; write a new state."""
        if (kept := self._states.get(id(state.memory))) is None:
            kept = self._states[id(state.memory)] = _Kept(state, len(self._states))
            companions = [(one.name, _declared(one), one.same_slots) for one in state.companions]
            self._out.put(Frame, "state", kept.number, (state.name, state.sizes, _declared(state), companions))
        if kept.state is not state:
            raise InvalidValue("a companion's own call is not recorded", cure="call its target", argument="state")
        return kept


def _of_step(call: str, state: int, step: Step) -> Frame:
    errors = step.errors, step.recovered
    return Frame(call, state, [(step.number, step.orders, step.speculative, step.group, step.logprobs, *errors)])


def _record(state: int, number: int, taken: bool, record: OutputRecord) -> Frame:
    return Frame("record", state, (number, taken, b"".join(encode_body(record))))


def _insert(state: int, tasks: TaskBatch, requests: list[int]) -> Frame:
    plain = tasks.plain
    columns = plain["kinds"], plain["slots"], requests, plain["num_computed_tokens"], plain["num_scheduled_tokens"]
    rows = zip(*columns, tasks.block_ids, plain["first_blocks"], plain["first_tokens"], tasks.drafts, strict=True)
    return Frame("insert_tasks", state, [[*rows]])


def _declared(state: SlotState) -> list[FieldRow]:
    own = [(place.field, place.width) for place in state.layout.fields.values() if place.field.name not in _OURS]
    return [
        (one.name, one.dtype.name, width, one.reset, " ".join(sorted(one.groups)), one.source and "extra", one.kept)
        for one, width in own
    ]


def _admitted(number: int, state: SlotState, request: AdmittedRequest) -> Frame:
    """Return the request with the values of its declared fields, which are only in its packed records."""
    extra, layouts = {}, {one.layout.config_key: one.layout for one in (state, *state.companions)}
    for one in (request, *request.companions):
        layout = layouts[one.config_key]
        record = np.frombuffer(one.packed, layout.admission_dtype)["record"][0]
        for place in layout.declared:
            bits, bfloat16 = record[place.field.name], place.field.dtype.name == "bfloat16"
            extra[place.field.name] = (bfloat16_to_float32(bits) if bfloat16 else bits).tolist()
    tokens, cut = request.tokens.tolist(), request.prompt_len
    own = Request(request.request_id, tokens[:cut], request.params, tokens[cut:], request.role, extra)
    return Frame("request", number, [own])
