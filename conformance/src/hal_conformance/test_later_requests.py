"""Requests that follow one another in their slots, two states, counts out of bounds: ten steps (G20, G21, G24)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hal_core.errors import InvalidBatch, InvalidValue
from hal_core.group import Group
from hal_core.output.records import SlotStatus
from hal_core.slots.fields import SplitRole
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind

from .fixtures.forms import (
    FORMS,
    LATER,
    LONG,
    SINGLE_RANKS,
    SIZES,
    SLOTS,
    Turns,
    advance,
    named,
    order_of,
    sample,
    working,
)  # fmt: skip
from .fixtures.stepping import draftable, free_ended
from .fixtures.world import Outputs, World
from .harness.asserts import assert_raises
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .kit import Kit

SHORT: dict[str, Any] = {"max_tokens": 2, "logprobs": 2}


def enter_free(world: World, turn: int) -> None:
    """Put a new request into each free slot, by turns of the prefill role of a split and of none."""
    free = [slot for slot in range(SLOTS) if slot not in world.model.residents]
    roles = [SplitRole.PREFILL if (slot + turn) % 3 else SplitRole.MIXED for slot in free]
    world.insert([world.entering(slot, role=role, **SHORT) for slot, role in zip(free, roles, strict=True)])


@guarantee(24, also=(12, 19, 20, 25))
@pytest.mark.parametrize("form", FORMS)
def test_g24_first_tokens_are_told_of_each_request_in_a_slot(kit: Kit, form: str) -> None:
    """A slot whose first token was reported gets another request before the next step; so does the mirror."""
    world, outputs = World(kit, SIZES), Turns(FORMS[form])
    mirrored: list[dict[str, np.ndarray]] = []
    firsts = 0
    for turn in range(1 + LATER):
        enter_free(world, turn)
        step = advance(world, FORMS[form], turn, every_slot=turn % 4 == 0)
        if FORMS[form].speculative:
            world.propose({slot: [7 + turn] * ((slot + turn) % 3) for slot in draftable(world)})
        mirrored.append(world.mirrored())
        firsts += sum(row.first for row in outputs.save(world, step))
        free_ended(world)
        if FORMS[form].due(turn):
            tickets = [ticket for ticket, _ in outputs.saved]
            outputs.compare()
            for ticket, should in zip(tickets, mirrored, strict=True):
                world.take(ticket)
                world.check_mirror(should, f"step {ticket.step} was taken")
            mirrored.clear()
    assert firsts > 5, f"the kit's own rows have {firsts} first tokens"
    outputs.sink.resolve_all()
    world.check("ten steps of first tokens")


@guarantee(20, also=(19, 24))
@pytest.mark.parametrize("form", FORMS)
def test_g20_a_step_of_two_states_has_the_order_of_each_in_every_form(kit: Kit, form: str) -> None:
    worlds, outputs = [working(kit), working(kit, "other")], Turns(FORMS[form])
    for turn in range(1 + LATER):
        orders: Any = {"target": order_of(FORMS[form], turn), "other": np.roll(range(SLOTS), turn + 1).tolist()}
        step = Step(100 + turn, orders, **FORMS[form].arguments)
        for at, world in enumerate(worlds):
            sample(world, orders[world.name], turn + at)
            world.update_inputs(step)
        for world in worlds:
            outputs.save(world, step)
        outputs.read(turn)
    outputs.sink.resolve_all()


COUNTS = {1: ("accept_num", 9, (1,)), 2: ("draft_num", -1, (0, 3)), 4: ("accept_num", -1, (1, 2))}
"""Before which outputs a kernel writes which field out of bounds, and in which slots."""


@guarantee(21, also=(19,))
@pytest.mark.parametrize("form", FORMS)
def test_g21_a_count_out_of_bounds_is_an_error_of_its_step_alone(kit: Kit, form: str) -> None:
    """The steps after it report their tokens; the ticket of a rank that sends raises."""
    world, outputs = working(kit), Outputs()
    for turn in range(1 + LATER):
        name, value, slots = COUNTS.get(turn, ("", 0, ()))
        step = advance(world, FORMS[form], turn, every_slot=bool(slots))
        for slot in slots:
            world.poke_cell(name, slot, value)
        rows = outputs.save(world, step)
        assert len(named(rows, SlotStatus.ERROR)) == len(slots), f"the kit's own rows: {rows}"
        ((ticket, _),) = outputs.saved
        outputs.compare()
        outputs.sink.resolve_all()
        if slots and FORMS[form].group.is_first:
            assert_raises(InvalidValue, lambda: ticket.wait(PATIENCE), "waiting for output out of bounds")  # noqa: B023
        if slots and name == "draft_num":  # the kernel's next step writes it well
            for slot in slots:
                world.poke_cell(name, slot, 0)


def wrong_batch(world: World, turn: int) -> list[Task]:
    """Return tasks that are all refused: into held slots, into one beyond the last, and out of another's slot."""
    entering = [world.entering(slot, blocks=[0], **SHORT) for slot in (turn % SLOTS, SLOTS + turn, 0)]
    kind = (TaskKind.PREEMPTED, TaskKind.ABORTED)[turn % 2]
    return [*entering[:2], Task(kind, (turn + 1) % SLOTS, entering[2].request)]


@guarantee(8, also=(9, 19))
@pytest.mark.parametrize("form", FORMS)
def test_g08_a_refused_batch_before_each_step_changes_nothing(kit: Kit, form: str) -> None:
    """Of each such batch every problem is listed, in the tenth step too; the steps go on, and so do departures."""
    world, outputs = working(kit), Turns(FORMS[form])
    for turn in range(1 + LATER):
        tasks, before, changing = wrong_batch(world, turn), kit.bound.counters().submissions, turn % 3 == 2
        call: Any = {"state": world.state, "tasks": tasks, "stream": world.stream}
        error = assert_raises(InvalidBatch, lambda: kit.bound.insert_tasks(**call), f"a wrong batch before step {turn}")  # noqa: B023
        assert len(error.problems) == len(tasks), f"{len(tasks)} tasks are wrong, but listed are {error.problems}"
        spent = kit.bound.counters().submissions - before
        assert spent == 0, f"a refused batch made {spent} submissions before step {turn}"
        if changing:
            slot = turn % SLOTS
            world.insert([*world.leaving([slot]), world.entering(slot, **LONG)])
        world.check(f"a refused batch before step {turn}")
        outputs.save(world, advance(world, FORMS[form], turn, every_slot=changing))
        outputs.read(turn)
    outputs.sink.resolve_all()


@guarantee(15, also=(13, 17))
@pytest.mark.parametrize("form", SINGLE_RANKS)
def test_g15_a_group_of_one_communicates_nothing_in_any_step(kit: Kit, form: str) -> None:
    """Whatever its rank, with drafts and log-probabilities, and of two states; its output is sent."""
    worlds, asking, outputs = [working(kit), working(kit, "other")], list[Group](), Outputs()

    def communicator(group: Group) -> object:
        asking.append(group)
        raise AssertionError(f"a group of one asked for its collectives: {group}")

    device: Any = kit.device
    device.communicator = communicator
    try:
        for turn in range(1 + LATER):
            for world in worlds:
                before, group = kit.bound.counters().submissions, FORMS[form].group
                arrive(kit.bound.broadcast_tokens(state=world.state, group=group, stream=world.stream))
                spent = kit.bound.counters().submissions - before
                assert spent == 0, f"broadcast_tokens in {group} made {spent} submissions in step {turn}"
                outputs.save(world, advance(world, FORMS[form], turn))
                outputs.compare()
    finally:
        del device.communicator
    assert not asking, f"collectives were asked for in a group of one: {asking}"
    sent = len(outputs.sink.resolve_all())
    assert sent == 2 * (1 + LATER), f"the first and only rank sent {sent} outputs, but should send {2 * (1 + LATER)}"
