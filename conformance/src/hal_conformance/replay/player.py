"""``hal conform NAME --replay FILE``: a recording's calls on a device and on the reference model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import AdmittedRequest, Companion, SlotStatus, StateConfig, StateField, Step, Task, Ticket, View
from hal_core.frames.bodies import decode_body
from hal_core.memory.dtypes import BFLOAT16, bfloat16_to_float32, dtype_of

from ..fixtures.world import World
from ..harness import backdoor
from ..harness.sinks import KeepingSink
from ..kit import Effort, Kit
from ..oracle.output import Row, found_rows, row_difference
from ..oracle.slots import Model, difference
from .frames import CALLS, FieldRow, Frame, Recording

if TYPE_CHECKING:
    from ..harness.subject import Subject

COMPARED = 64
"""Steps between two comparisons of the state, where calls are not compared one by one."""
SOURCES = ("sampled_token_ids", "accept_tokens", "accept_num")
"""Fields in which a model leaves a step's tokens."""


def replay(subject: Subject, path: str | Path) -> tuple[bool, str]:
    """Replay a recording on a device. Return whether something differs, and a text that names the first such call.

    The calls overlap as they did for the worker. If something differs, they are made again on a new device, and the
    state is compared after each, which names the call.

    :raises InvalidValue: naming the field, for a file that cannot be replayed, before the device is opened.
    """
    recording, found = Recording(Path(path)), list[str]()
    records = {(one.state, one.given[0]): one.given[2] for one in recording.frames() if one.name == "record"}
    for each in (False, True):
        kit = Kit(subject, Effort())
        player = Player(kit, recording.origin, records, each=each)
        try:
            found.append(player.run(recording.frames()))
        finally:
            kit.renew()
        if not found[0]:
            left = f"; {player.skipped} with values of the device or of other ranks were left out"
            text = f"{player.calls} calls, {len(records)} records of {player.steps} steps: as the reference model"
            return False, f"{text}{left * bool(player.skipped)} (recorded on {recording.origin})"
    return True, found[1] or f"{found[0]}\ncall by call nothing differs: it depends on calls that overlap"


class Played(World):
    """A state, its reference model, and the steps whose records are not taken yet (``saved``): each with its call,
    ticket and sink, and the rows that its record must have.

    ``host``: a model whose bytes are not 0 where the host has written since the last update. ``late``: slot to message,
    of errors that only the device knew when the step was launched.
    """

    FOLLOWED = False

    def __init__(self, kit: Kit, name: str, sizes: StateConfig, fields: list[FieldRow], companions: list[Any]) -> None:
        own = [StateField(*row) for row in fields]
        others = [Companion(other, [StateField(*row) for row in rows], same) for other, rows, same in companions]
        super().__init__(kit, sizes, name=name, companions=others, fields=own)
        self.host = Model(self.state.layout)
        self.host.block[...] = 0
        self.saved: dict[int, tuple[int, Any, KeepingSink, list[Row]]] = {}
        self.late: dict[int, str] = {}

    def model_wrote(self, step: Step, body: bytes | None) -> None:
        """Write the recorded tokens where the model has written them: in slots whose tokens the host did not write."""
        model, cells, runs = self.model, self.model.cells, list[tuple[int, bytes]]()
        found = [] if body is None else found_rows(decode_body(memoryview(body)))
        rows = {row.request_id: row for row in found if row.status not in (SlotStatus.PREEMPTED, SlotStatus.ABORTED)}
        host = {slot for name in SOURCES for slot in np.flatnonzero(self.host.cells[name].any(axis=1)).tolist()}
        self.late = {}

        def put(name: str, slot: int, values: Any) -> None:  # noqa: ANN401 (a scalar or a row)
            model.set(name, slot, values)
            place = self.state.layout.fields[name]
            runs.append((place.offset + slot * place.stride, cells[name][slot].tobytes()))

        for slot in set(model.residents) - host:
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
                for name, values in (("topk_token_ids", row.alternatives), ("topk_logprobs", row.logprobs)):
                    held = cells[name][slot].reshape(self.sizes.max_accept, -1)
                    held[: len(values), : len(values[0])] = values
                    put(name, slot, held.reshape(-1))
                put("topk_ranks", slot, row.ranks)
        if runs:
            backdoor.put(self.device, self.state.memory, runs, self.stream)

    def set_value(self, view: View, value: bytes, *, fills: bool) -> Ticket:
        """Write a value of the host into a view of the state."""
        storage, shape = view.dtype.storage, view.shape
        bits: Any = np.frombuffer(value, storage).reshape(() if fills else shape)
        if 0 <= view.offset < self.state.layout.nbytes:  # else it is a companion's, which has no model
            for block, values in ((self.model.block, bits), (self.host.block, 1)):
                np.ndarray(shape, storage, block, view.offset, view.strides)[...] = values
        given = bfloat16_to_float32(bits) if view.dtype is BFLOAT16 else bits
        return self.bound.async_set_value(target=view, value=given[()], stream=self.stream)


class Player:
    """One replay on one opened device. ``each``: compare the state after every call; else every :data:`COMPARED` steps
    and at the end, so that calls overlap on the device as they did for the worker.

    :param records: state and step to the record, as a step's tokens are written before it is saved.
    """

    def __init__(self, kit: Kit, origin: str, records: Mapping[tuple[int, int], bytes], *, each: bool = False) -> None:
        self.kit, self.each, self._origin, self._records = kit, each, origin, records
        self.states: list[Played] = []
        self.requests: list[AdmittedRequest] = []
        self.calls = self.steps = self.skipped = 0

    def run(self, given: Iterable[Frame]) -> str:
        """Make the calls. Return how the first whose effect differs does so, or ""."""
        for frame in given:
            self.calls += frame.name in CALLS
            try:
                wrong = self._make(frame)
            except Exception as error:  # noqa: BLE001 (returned)
                wrong = f"{self._named(frame)} raised {type(error).__name__}: {error}"
            if self.each and frame.name in CALLS:
                wrong = wrong or self._compare(self._named(frame))
            elif frame.name == "save_output" and self.steps % COMPARED == 0:
                wrong = wrong or self._compare(f"the {self.calls} calls so far")
            if wrong:
                return wrong
        return self._compare(f"all {self.calls} calls")

    def _compare(self, after: str) -> str:
        found = [difference(played.model, played.bytes()) for played in self.states]
        return next((f"after {after}: {wrong}" for wrong in found if wrong), "")

    def _named(self, frame: Frame) -> str:
        text = f"call {self.calls}, {frame.name}"
        match frame.name, frame.given:
            case "update_inputs" | "save_output", ((number, *_),):
                return f"{text} of step {number}"
            case "insert_tasks", (tasks,):
                shown = [f"{kind.name.lower()} -> slot {slot}" for kind, slot, *_ in tasks[:8]]
                return f"{text} ({', '.join(shown)}{', …' * (len(tasks) > 8)})"
        return text

    def _make(self, frame: Frame) -> str:
        """Make a call, or do what changes a state without one. Return how a record differs, or ""."""
        if frame.name == "state":
            self.states.append(Played(self.kit, *frame.given))
        played = self.states[frame.state]
        match frame.name, frame.given:
            case "request", (request,):
                self.requests.append(admitted := played.state.admit(request))
                played.model.requests[admitted.admission_id] = request
            case "release", (slots,):
                played.release(slots)
            case "record", (number, taken, body):
                return self._take(played, number, taken, body)
            case "insert_tasks", (tasks,):
                played.insert([Task(kind, slot, self.requests[at], *rest) for kind, slot, at, *rest in tasks])
            case "async_set_value", (offset, shape, strides, dtype, fills, bytes() as value):
                view = View(played.state.memory, offset, shape, strides, dtype_of(dtype), played.state)
                played.set_value(view, value, fills=fills)
            case "async_set_value", _:
                self.skipped += 1
            case "broadcast_tokens", _:
                self.skipped += 1
                played.host.block[...] = 0  # the tokens are the first rank's, and in the record
            case "update_inputs", (row,):
                step = Step(*row)
                played.model_wrote(step, self._records.get((frame.state, step.number)))
                played.update_inputs(step)
                played.host.block[...] = 0
            case "set_drafts", (_, drafts):
                played.propose(drafts)
            case "save_output", (row,):
                self.steps += 1
                step, sink = Step(*row), KeepingSink()
                step = replace(step, errors={**played.late, **step.errors})
                rows = played.rows_of(step)
                played.saved[step.number] = self.calls, played.save(step, sink), sink, rows
            case "order_after_reads", _:
                played.bound.order_after_reads(memory=played.state.memory, stream=played.stream)
        return ""

    def _take(self, played: Played, number: int, taken: bool, body: bytes) -> str:
        """Compare a step's record, and the recorded one, with the reference model's."""
        call, ticket, sink, should = played.saved.pop(number)
        got = played.state.take(ticket) if taken else ticket.record()
        sink.resolve_all()
        name = f"call {call}, save_output of step {number}"
        if wrong := row_difference(found_rows(got), should):
            return f"{name}: {wrong}"
        if wrong := row_difference(found_rows(decode_body(memoryview(body))), should):
            why = f"the device that recorded it ({self._origin}) or its host was wrong there"
            return f"{name}, as recorded: {wrong}\n{why}; this device gives the right record"
        return ""
