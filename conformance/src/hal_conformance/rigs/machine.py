"""The state machine: all four hooks and ``update_inputs``, on two states, in any order allowed to a worker.

Each rule acts on the device and on the oracle. Bytes are compared by some rules and at the end, not after each rule: on
an asynchronous device every comparison waits, and would hide errors of overlap.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hal_core.group import Group
from hal_core.slots.step import Step
from hal_core.slots.tasks import TaskKind
from hal_core.tickets import Ticket
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ..draw.requests import sizes, tokens
from ..harness.asserts import assert_no_error
from ..harness.backdoor import PATIENCE
from ..harness.sinks import KeepingSink
from ..kit import Draw, Kit
from ..oracle.output import Row
from .batches import ALL, draw_batch, told
from .rig import Rig, assert_rows
from .stepping import draftable, draw_proposal, draw_sampling, draw_step, free_ended

STAYING = (TaskKind.PREFILL_CHUNK, TaskKind.MORE_BLOCKS)
SETTABLE = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "min_p")
"""Fields that a worker may set in a slot without changing the step's own results."""


class WorkerMachine(RuleBasedStateMachine):
    """A worker with a target and a proposer state, each with its own slots, order and stream."""

    kit: ClassVar[Kit]

    def __init__(self) -> None:
        super().__init__()
        self.rigs: list[Rig] = []
        self.unsaved: dict[str, Step] = {}
        self.kept: dict[str, KeepingSink] = {}
        self.rows: dict[str, list[list[Row]]] = {}
        self.tickets: list[Ticket] = []

    @initialize(data=st.data())
    def open_states(self, data: st.DataObject) -> None:
        """Create both states, poisoned."""
        draw = labelled(data)
        for name in ("target", "proposer"):
            self.rigs.append(Rig(self.kit, draw(sizes(most_slots=4), f"sizes of {name}"), name=name))
            self.kept[name], self.rows[name] = KeepingSink(), []

    def pick(self, draw: Draw) -> Rig:
        """Return one of the two states."""
        return self.rigs[draw(st.integers(0, 1), "state")]

    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        """Insert a batch; while a step's output is not saved, no request enters or leaves."""
        draw = labelled(data)
        rig = self.pick(draw)
        self.tickets.append(rig.insert(draw_batch(draw, rig, STAYING if rig.name in self.unsaved else ALL)))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Sample, agree in a group of one, update, propose drafts."""
        draw = labelled(data)
        rig = self.pick(draw)
        if rig.name in self.unsaved:
            return
        step = draw_step(draw, rig)
        draw_sampling(draw, rig, step)
        self.tickets.append(rig.bound.broadcast_tokens(state=rig.state, group=Group(), stream=rig.stream))
        self.tickets.append(rig.update_inputs(step))
        draw_proposal(draw, rig)
        self.unsaved[rig.name] = step

    @rule(data=st.data())
    def propose(self, data: st.DataObject) -> None:
        """Set drafts later: after the output was saved, or after requests have entered or left."""
        draw = labelled(data)
        rig = self.pick(draw)
        if rig.proposed or not (slots := [slot for slot in draftable(rig) if not rig.model.get("stop_flags", slot)]):
            return
        given = st.lists(tokens, max_size=rig.sizes.max_draft_tokens)
        self.tickets.append(rig.propose({slot: draw(given, f"drafts of slot {slot}") for slot in slots}))

    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        """Save the step's output into a sink that resolves it later."""
        rig = self.pick(labelled(data))
        step = self.unsaved.pop(rig.name, None)
        if step is not None:
            self.rows[rig.name].append(rig.rows_of(step))
            rig.save(step, self.kept[rig.name])

    @rule(data=st.data())
    def read_output(self, data: st.DataObject) -> None:
        """Resolve the saved outputs, in order, and compare."""
        rig = self.pick(labelled(data))
        self.compare_output(rig)
        if rig.name not in self.unsaved:
            free_ended(rig)

    def compare_output(self, rig: Rig) -> None:
        """Compare every record kept for a state with the rows of its step."""
        sink, should = self.kept[rig.name], self.rows[rig.name]
        sink.resolve_all()
        assert len(sink.records) == len(should), f"{len(should)} steps were saved, {len(sink.records)} records came"
        for record, rows in zip(sink.records, should, strict=True):
            assert_rows(record, rows)
        sink.records.clear()
        should.clear()

    @rule(data=st.data())
    def set_value(self, data: st.DataObject) -> None:
        """Write into a field of one slot."""
        draw = labelled(data)
        rig = self.pick(draw)
        name = draw(st.sampled_from(SETTABLE), "field")
        slot, value = draw(st.integers(0, rig.sizes.num_slots - 1), "slot"), draw(st.integers(0, 9), "value")
        target = rig.state.view(name)[slot]
        self.tickets.append(rig.bound.async_set_value(target=target, value=value, stream=rig.stream))
        rig.model.set(name, slot, value)

    @rule(data=st.data())
    def change_stream(self, data: st.DataObject) -> None:
        """Continue on a new stream that waits for the old one's work."""
        rig = self.pick(labelled(data))
        new = rig.device.stream()
        new.wait(rig.device.event(rig.stream))
        rig.stream = new

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        """Wait for one of the tickets."""
        at = labelled(data)(st.integers(0, len(self.tickets) - 1), "ticket")
        assert_no_error(lambda: self.tickets.pop(at).wait(PATIENCE), "waiting for a ticket")

    @rule(data=st.data())
    def overlap(self, data: st.DataObject) -> None:
        """Insert and set values while the stream is held, as a host that runs ahead does."""
        draw = labelled(data)
        rig = self.pick(draw)
        with self.kit.held(rig.stream):
            tasks = draw_batch(draw, rig, STAYING if rig.name in self.unsaved else ALL)
            self.tickets.append(rig.insert(tasks))
            for slot in {task.slot for task in tasks}:
                target = rig.state.view("seed")[slot]
                self.tickets.append(rig.bound.async_set_value(target=target, value=[slot], stream=rig.stream))
                rig.model.set("seed", slot, slot)
        rig.check(f"insert_tasks({told(tasks)}) on a held stream")

    @rule(data=st.data())
    def check(self, data: st.DataObject) -> None:
        """Compare every byte of a state."""
        self.pick(labelled(data)).check("the rules so far")

    def teardown(self) -> None:
        """Compare everything once more at the end."""
        for ticket in self.tickets:
            ticket.wait(PATIENCE)
        for rig in self.rigs:
            rig.check("all rules")
            self.compare_output(rig)


def labelled(data: st.DataObject) -> Draw:
    """Return the labelled draw of a rule."""

    def draw(strategy: st.SearchStrategy[Any], label: str) -> Any:  # noqa: ANN401 (what the strategy gives)
        return data.draw(strategy, label=label)

    return draw
