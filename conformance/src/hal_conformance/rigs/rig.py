"""A state with its oracle: each act is applied to both, and :meth:`Rig.check` compares every byte."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.group import ALONE
from hal_core.output.records import OutputRecord
from hal_core.output.sinks import MemorySink, Sink
from hal_core.slots.admission import AdmittedRequest, Request, admit
from hal_core.slots.declared import Companion, StateField
from hal_core.slots.fields import StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task

from ..harness import backdoor
from ..harness.groups import FOLLOWER
from ..oracle import output as oracle_output
from ..oracle import step as oracle_step
from ..oracle.slots import Model, difference

if TYPE_CHECKING:
    from hal_core.slots.state import SlotState
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket

    from ..kit import Kit


UNSTAGED = 8
"""One of so many requests is admitted without the state: a device that stages requests must accept both kinds."""


class Rig:
    """One slot state of the device under test, and the model of its expected contents.

    Its memory is poisoned first: bytes that no request has written hold :data:`backdoor.POISON`, so that reading or
    overwriting them is noticed.
    """

    def __init__(
        self,
        kit: Kit,
        sizes: StateConfig,
        *,
        name: str = "target",
        beside: Sequence[str | Companion] = (),
        fields: Sequence[StateField] = (),
    ) -> None:
        self.kit, self.bound, self.device = kit, kit.bound, kit.device
        self.state: SlotState = self.bound.state(sizes, name=name, beside=beside, fields=fields)
        self.sizes, self.name, self.fields = sizes, name, tuple(fields)
        self.extra = tuple([field for field in fields if field.value == "extra"])  # what each request must bring
        self.model = Model(self.state.layout, fields)
        self.stream: Stream = self.device.default_stream
        self.sink = MemorySink()
        self.steps = 0
        self.advanced: Step | None = None
        self.ran: dict[int, int] = {}  # slot to admission id, as of the last step
        self.proposed = self.drafted = False  # since the last step: by a call, and with drafts in it
        self._names = itertools.count()
        self._admitted = 0
        assert_fresh(self)
        backdoor.write(self.device, self.state.memory, 0, self.model.block, self.stream)

    def admit(self, request: Request) -> AdmittedRequest:
        """Admit a request, and give it to the model."""
        self._admitted += 1
        bare = self._admitted % UNSTAGED == 0 and not self.state.companions
        admitted = admit(request, self.state.layout) if bare else self.state.admit(request)
        self.model.requests[admitted.admission_id] = request
        return admitted

    def new_name(self) -> str:
        """Return an unused request id."""
        return f"request-{next(self._names)}"

    # -- hooks --------------------------------------------------------------------------------------------------------

    def insert(self, tasks: Sequence[Task]) -> Ticket:
        """Insert valid tasks into the state and the model."""
        ticket = self.bound.insert_tasks(state=self.state, tasks=list(tasks), stream=self.stream)
        self.model.insert(tasks)
        return ticket

    def step(self, order: Sequence[int], **arguments: Any) -> Step:  # noqa: ANN401 (the arguments of Step)
        """Return the next step over slots in batch-id order."""
        self.steps += 1
        return Step(self.steps, {self.name: np.array(order, np.int32)}, **arguments)

    def update_inputs(self, step: Step) -> Ticket:
        """Advance the state and the model by one step."""
        ticket = self.bound.update_inputs(state=self.state, step=step, stream=self.stream)
        self.advanced, self.proposed, self.drafted = step, False, False
        self.ran = {slot: resident.admission_id for slot, resident in self.model.residents.items()}
        oracle_step.update_inputs(self.model, step.orders[self.name].tolist(), speculative=step.speculative)
        return ticket

    def propose(self, drafts: Mapping[int, Sequence[int]]) -> Ticket:
        """Set the drafts after the last step, in the state and the model."""
        assert self.advanced is not None
        call = {"state": self.state, "step": self.advanced, "drafts": drafts, "stream": self.stream}
        ticket = self.bound.set_drafts(**call)  # type: ignore[arg-type]
        self.proposed, self.drafted = True, any(drafts.values())
        self.model.hand(drafts)
        return ticket

    def save(self, step: Step, sink: Sink | None = None) -> Ticket:
        """Save the step's output into ``sink``, and clean the model up as the hook must clean the state."""
        chosen = self.sink if sink is None else sink
        try:
            return self.bound.save_output(state=self.state, step=step, sink=chosen, stream=self.stream)
        finally:
            self.model.clean_up(step.orders[self.name].tolist())

    def output(self, step: Step, *, expect_error: bool = False) -> list[oracle_output.Row]:
        """Save a step of a first rank, compare its record with the model, and return the model's rows."""
        __tracebackhide__ = True
        should = self.rows_of(step)
        before = len(self.sink.records)
        ticket = self.save(step)
        if not expect_error:
            ticket.wait(backdoor.PATIENCE)
        records = self.sink.records[before:]
        assert len(records) == 1, f"the sink was given {len(records)} records of one step, but should be given 1"
        assert_rows(records[0], should)
        return should

    def rows_of(self, step: Step) -> list[oracle_output.Row]:
        """Return the rows that a step must report in the model's current state."""
        return oracle_output.expected_rows(
            self.model,
            step.orders[self.name].tolist(),
            speculative=step.speculative,
            logprobs=step.logprobs,
            errors=step.errors,
        )

    def release(self, slots: Sequence[int]) -> None:
        """Free the slots of ended requests."""
        self.state.release(slots)
        self.model.release(slots)

    # -- the worker's kernels -----------------------------------------------------------------------------------------

    def poke(self, values: Mapping[str, np.ndarray[Any, Any]]) -> Ticket:
        """Write whole fields, as a kernel of the worker would, in stream order."""
        runs = []
        for name, array in values.items():
            cells = self.model.cells[name]
            cells[...] = array.reshape(cells.shape)
            runs.append((self.state.layout.fields[name].offset, cells.tobytes()))
        return backdoor.put(self.device, self.state.memory, runs, self.stream)

    def poke_cell(self, name: str, slot: int, values: Any) -> None:  # noqa: ANN401 (scalar or row)
        """Write one slot's field, and wait."""
        changed = self.model.cells[name].copy()
        listed = np.atleast_1d(np.asarray(values, changed.dtype))
        changed[slot, : len(listed)] = listed
        self.poke({name: changed}).wait(backdoor.PATIENCE)

    # -- comparison ---------------------------------------------------------------------------------------------------

    def bytes(self) -> backdoor.Bytes:
        """Return every byte of the state after the work on the stream."""
        return backdoor.read(self.device, self.state.memory, self.stream)[: self.state.layout.nbytes]

    def check(self, after: str) -> None:
        """Compare every byte of the state with the model."""
        __tracebackhide__ = True
        wrong = difference(self.model, self.bytes())
        if wrong:
            raise AssertionError(f"after {after}: {wrong}")


def assert_fresh(rig: Rig) -> None:
    """Assert that a new state holds the reset value in every slot of every field."""
    __tracebackhide__ = True
    got = rig.bytes()
    for name, place in rig.state.layout.fields.items():
        cells = got[place.offset : place.offset + place.stride * rig.sizes.num_slots].view(place.field.dtype.storage)
        assert (cells == place.field.reset).all(), (
            f"a new state has {name} = {cells}, but should be {place.field.reset}"
        )


def assert_rows(record: OutputRecord, should: Sequence[oracle_output.Row]) -> None:
    """Assert that the record equals the rows."""
    __tracebackhide__ = True
    wrong = oracle_output.row_difference(oracle_output.found_rows(record), should)
    if wrong:
        raise AssertionError(f"record of step {record.step}: {wrong}")


"""A group without its other rank; enough for hooks that only need to know the first rank."""
__all__ = ["ALONE", "FOLLOWER", "Rig", "assert_fresh", "assert_rows"]
