"""Frames with a row of every kind, beside each other: the sender (G17), clean-up (G18), each token once (G19), order
(G20), no rest of an earlier step (G22), aligned parts (G24), in any mode (G25)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hal_core.errors import HalError
from hal_core.group import ALONE, Group
from hal_core.output.sinks import MemorySink, PendingOutput
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind

from .fixtures.crowd import ERRORS, LATE, ORDER, RECOVERED, SIZES, crowd_rows, crowded, entering, sample
from .fixtures.forms import FORMS
from .fixtures.world import FOLLOWER, Outputs, World, assert_rows
from .harness.asserts import assert_no_error, assert_raises
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .harness.sinks import DeadSink, FullSink, KeepingSink
from .kit import Kit
from .liars import faults
from .oracle.output import Row
from .test_faults import under


def name_of(case: object) -> str:
    """Return the name of a case."""
    if isinstance(case, Group):
        return f"rank {case.rank} of {len(case.ranks)}"
    return {True: "speculative", False: "plain"}[case] if isinstance(case, bool) else f"logprobs {case}"


@guarantee(24, also=(17, 18, 19, 20, 22, 25))
@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
@pytest.mark.parametrize("form", FORMS)
def test_g24_rows_of_every_kind_in_one_frame_have_their_own_parts(kit: Kit, form: str, own_stream: bool) -> None:
    """Then a step by ``Step.again``, in which no error, departure or token of the first is reported again."""
    speculative = FORMS[form].speculative
    fixture = crowded(kit, speculative=speculative)
    if own_stream:
        fixture.stream = kit.device.stream()
        fixture.stream.wait(kit.device.event(kit.device.default_stream))
    messages = {"errors": ERRORS, "recovered": RECOVERED, "late_errors": lambda: LATE}
    step = fixture.step(ORDER, **FORMS[form].arguments, **messages)
    fixture.run(step)
    fixture.check("a step of slots of every kind")
    if speculative:
        fixture.draft({2: [7], 0: [8, 9], 1: [], 12: [6, 5]})
    saved(fixture, step, crowd_rows(fixture, step))
    fixture.enter([Task(TaskKind.PREEMPTED, 2, fixture.model.residents[2].admitted), entering(fixture, 5)])
    sample(fixture, 2, speculative=speculative)
    fixture.steps += 1
    again = step.again(step.number + 1)
    fixture.run(again)
    fixture.check("a second step with the same slots")
    saved(fixture, again, fixture.rows_of(again))


def saved(fixture: World, step: Step, should: list[Row]) -> None:
    """Save a step; compare the sink's record, the record that the rank has, and every byte of the state."""
    __tracebackhide__ = True
    sink, ids, what = KeepingSink(), fixture.batch_ids_of(step), f"save_output of step {step.number}"
    ticket = assert_no_error(lambda: fixture.save(step, sink), what)
    sends = int(step.group.is_first)
    assert len(sink.pending) == sends, (
        f"rank {step.group.rank} of {step.group.ranks} gave {len(sink.pending)} outputs to its sink, not {sends}"
    )
    for record in (fixture.take(ticket), *sink.resolve_all()):
        assert_rows(record, should, step.number)
    arrive(ticket, what)
    assert ticket.batch_ids == ids, f"{what}: the rows have the batch ids {ticket.batch_ids}, but should have {ids}"
    fixture.check(what)


TURNS: tuple[tuple[tuple[int, ...], bool, int | None], ...] = (
    ((14, 12, 2, 8, 7, 3), True, 1),
    ((2, 3, 7, 8, 12, 14), False, None),
    ((8, 14, 2, 12, 3, 7), False, 2),
    ((14, 12, 2, 8, 7, 3), True, 0),
    ((2, 3, 7, 8, 12, 14), False, None),
    ((7, 3, 12, 2, 14, 8), True, None),
)
"""Orders that change from step to step and leave out slots that do not run, kinds of steps, log-probabilities."""


@guarantee(19, also=(12, 20, 22, 24, 25))
@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
@pytest.mark.parametrize("taken", [(5, 2, 4, 0, 1, 3), (0, 1, 2, 3, 4, 5), (3,), ()], ids=str)
def test_g19_outputs_are_their_own_steps_in_whatever_order_they_are_taken(
    kit: Kit, taken: tuple[int, ...], held: bool
) -> None:
    """By the worker, before the sink takes any. Each take sets the mirror to its step; no other call changes it."""
    if held and (need := kit.missing(("async_h2d", "async_d2h", "can_hold_stream", "overlapped_update"))):
        pytest.skip(f"needs {need}")
    fixture, outputs, mirrors = crowded(kit, speculative=False), Outputs(), []
    fixture.output(fixture.advance(ORDER))
    before = {name: column.copy() for name, column in fixture.state.mirror.items()}
    with kit.held(fixture.stream, "several steps and their outputs") if held else nullcontext():
        for turn, (order, speculative, logprobs) in enumerate(TURNS):
            sample(fixture, turn + 2, speculative=speculative)
            step = fixture.step(order, speculative=speculative, logprobs=logprobs)
            fixture.update_inputs(step)
            mirrors.append(fixture.mirrored())
            outputs.save(fixture, step)
    fixture.check_mirror(before, "outputs that nobody has taken")
    for at in taken:
        ticket, rows = outputs.saved[at]
        assert_rows(fixture.take(ticket), rows, ticket.step)
        fixture.check_mirror(mirrors[at], f"taking output {at} of {len(TURNS)}")
    outputs.deliver("several steps whose outputs were taken late")
    fixture.check_mirror(mirrors[taken[-1]] if taken else before, "the sink has read outputs that nobody took")
    fixture.check("several steps whose outputs were taken late")


@guarantee(20, also=(17, 18, 19, 22))
@pytest.mark.parametrize("group", [ALONE, FOLLOWER], ids=name_of)
def test_g20_a_step_without_slots_and_steps_of_one_have_their_rows(kit: Kit, group: Group) -> None:
    """A frame of no rows, then each slot in a step of its own, which reports the departure from that slot."""
    fixture = crowded(kit, speculative=True)
    fixture.advance(ORDER, speculative=True)
    for order in ([], *([slot] for slot in reversed(ORDER)), []):
        step = fixture.step(order, speculative=True, logprobs=1, group=group)
        saved(fixture, step, fixture.rows_of(step))


@guarantee(25, also=(20, 22, 24))
def test_g25_two_states_save_by_turns_in_their_own_modes(kit: Kit) -> None:
    """Steps that name both states, each in its order; the second has neither drafts nor log-probabilities."""
    target, plain = (
        crowded(kit, speculative=True),
        World(kit, replace(SIZES, max_draft_tokens=0, max_logprobs=0), name="plain"),
    )
    slots = [3, 0, 15, 6]
    plain.enter([entering(plain, slot) for slot in slots])
    for turn in range(3):
        orders = {"target": np.roll(ORDER, turn).tolist(), "plain": np.roll(slots, turn).tolist()}
        number = 100 + turn
        verifying = Step(number, orders, speculative=True, logprobs=2)
        drawing = Step(number, orders)
        for fixture, step in ((plain, drawing), (target, verifying)):
            sample(fixture, turn + 3, speculative=True) if fixture is target else draw_plain(plain, turn)
            fixture.run(step)
        for fixture, step in ((target, verifying), (plain, drawing)):
            fixture.output(step)
            fixture.check(f"step {number} of two states")


def draw_plain(fixture: World, turn: int) -> None:
    """Write the sampled tokens of a state without drafts."""
    fixture.poke({"sampled_token_ids": 70 + 100 * turn + np.arange(fixture.sizes.num_slots)})


class BrokenSink(KeepingSink):
    """Raises an error of its own, of no class of the contract."""

    def put(self, pending: PendingOutput) -> None:
        """Raise."""
        raise ZeroDivisionError("the sink's own")


SINKS: dict[str, Callable[[], Any]] = {
    "full": FullSink,
    "dead": DeadSink,
    "broken": BrokenSink,
    "never read": KeepingSink,
    "on a thread": lambda: MemorySink(threaded=True),
    "none, on another rank": lambda: None,
    "broken, on another rank": BrokenSink,
}


@guarantee(18, also=(17, 19, 23))
@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize(("speculative", "logprobs"), [(False, None), (True, 2)], ids=name_of)
def test_g18_rows_of_every_kind_are_cleaned_up_whatever_the_sink_does(
    kit: Kit, kind: str, speculative: bool, logprobs: int | None
) -> None:
    """The worker has the rows all the same; the next step goes to a good sink and reports no departure again."""
    fixture, sink = crowded(kit, speculative=speculative), SINKS[kind]()
    group = FOLLOWER if kind.endswith("rank") else ALONE
    step = fixture.step(
        ORDER, speculative=speculative, logprobs=logprobs, group=group,
        errors=ERRORS, recovered=RECOVERED, late_errors=lambda: LATE,
    )  # fmt: skip
    fixture.run(step)
    should, raised = crowd_rows(fixture, step), None
    ticket: Any = None
    try:
        ticket = fixture.bound.save_output(state=fixture.state, step=step, sink=sink, stream=fixture.stream)
    except (HalError, ZeroDivisionError) as error:
        raised, ticket = error, getattr(error, "ticket", None)
    fixture.model.clean_up(ORDER)
    assert (raised is not None) == (kind in ("full", "dead", "broken")), f"a sink that is {kind}: {raised!r}"
    fixture.check(f"save_output into a sink that is {kind}")
    if ticket is not None:
        assert_rows(fixture.take(ticket, f"taking an output whose sink is {kind}"), should, step.number)
    if kind == "on a thread":
        sink.close(PATIENCE)
        assert_rows(sink.records[0], should, step.number)
    sample(fixture, 2, speculative=speculative)
    fixture.steps += 1
    again = step.again(step.number + 1)
    fixture.run(again)
    saved(fixture, again, fixture.rows_of(again))


@guarantee(18, also=(17, 19))
@pytest.mark.parametrize("late", [False, True], ids=["at the call", "late"])
@pytest.mark.parametrize("group", [ALONE, FOLLOWER], ids=name_of)
@pytest.mark.parametrize(("speculative", "logprobs"), [(False, 1), (True, None)], ids=name_of)
def test_g18_rows_of_every_kind_are_cleaned_up_where_the_copy_fails(
    kit: Kit, speculative: bool, logprobs: int | None, group: Group, late: bool
) -> None:
    with under(kit, faults.FailingCopies) as (laid, fuse):
        fixture, sink = crowded(laid, speculative=speculative), KeepingSink()
        step = fixture.advance(ORDER, speculative=speculative, logprobs=logprobs, group=group)
        laid.device.late, fuse.at = late, 1  # type: ignore[attr-defined]  # the fault's
        why = "save_output whose copy failed"
        assert_raises(faults.CopyFailed, lambda: fixture.state.take(fixture.save(step, sink)), why)
        fuse.at = 0
        fixture.check(why)
        sample(fixture, 2, speculative=speculative)
        after = fixture.advance(ORDER[::-1], speculative=speculative, logprobs=logprobs, group=group)
        saved(fixture, after, fixture.rows_of(after))
