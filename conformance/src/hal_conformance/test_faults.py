"""Injected faults: no work is half applied, the error has fact and cure, and the device works afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from hal_core.errors import GroupLost, HalError, OutOfMemory
from hal_core.group import Group
from hal_core.output.records import OutputRecord
from hal_core.slots.step import Step
from hal_core.slots.tasks import TaskKind
from hypothesis import strategies as st

from .draw.requests import sizes
from .fixtures.batches import ENTER, LEAVE, draw_batch, draw_world, text_of
from .fixtures.stepping import draw_advance, draw_sampling, draw_step, run_step
from .fixtures.world import Outputs, World, assert_rows
from .harness.asserts import assert_no_error, assert_raises, assert_says, in_time
from .harness.backdoor import PATIENCE
from .harness.guarantees import guarantee
from .harness.sinks import DeadSink, FullSink
from .kit import Draw, Kit, examples
from .liars import faults

if TYPE_CHECKING:
    from hal_core.tickets import Ticket

PAIR = Group((0, 1), 0)


@contextmanager
def under(kit: Kit, fault: type[faults.Fault]) -> Iterator[tuple[Kit, faults.Fuse]]:
    """Open another device with the fault, and return its fuse too."""
    laid = Kit(replace(kit.subject, open=lambda: faults.lay(kit.subject.open(), fault)), kit.effort)
    try:
        yield laid, laid.device.fault  # type: ignore[attr-defined]  # laid over it
    finally:
        laid.renew()


def attempt(call: Callable[[], object]) -> HalError | None:
    """Return the error of the contract that a call raises, or None."""
    try:
        call()
    except HalError as error:
        return error
    return None


def works(draw: Draw, fixture: World, after: str) -> None:
    """Insert a request, run a step, and compare its output."""
    __tracebackhide__ = True
    fixture.enter(draw_batch(draw, fixture, ENTER))
    fixture.output(run_step(draw, fixture))
    fixture.check(f"a step after {after}")


@guarantee(8)
@examples(0.5)
def test_g08_a_write_that_fails_leaves_nothing_half_applied(kit: Kit, draw: Draw) -> None:
    with under(kit, faults.FailingWrites) as (laid, fuse):
        fixture = World(laid, draw(sizes(), "sizes"))
        fixture.enter(draw_batch(draw, fixture, ENTER))
        tasks = draw_batch(draw, fixture, least=1)
        fuse.at = draw(st.integers(1, 2), "the write that fails")
        booked = fixture.state.host_table.admission_ids.copy()

        def insert() -> None:
            fixture.bound.insert_tasks(state=fixture.state, tasks=[*tasks], stream=fixture.stream).wait(PATIENCE)

        error = attempt(insert)
        if error is None:
            assert not fuse.met, f"insert_tasks({text_of(tasks)}) hid that its write was refused"
            fixture.model.insert(tasks)
        else:
            assert_says(error, device=laid.bound.name, hook="insert_tasks")
            assert fuse.met == 1, f"insert_tasks raised {error}, but no write has failed"
            now = fixture.state.host_table.admission_ids.tolist()
            assert now == booked.tolist(), f"the host has booked {now}, though the write was refused"
            fixture.check(f"the refused insert_tasks({text_of(tasks)})")
            fuse.at = 0
            fixture.enter(tasks, "the same batch once more")
        fuse.at = 0
        fixture.check(f"insert_tasks({text_of(tasks)})")
        works(draw, fixture, "a write that failed")


@guarantee(26)
@examples(0.5)
def test_g26_an_unwritable_value_raises_and_leaves_the_target_unchanged(kit: Kit, draw: Draw) -> None:
    with under(kit, faults.FailingWrites) as (laid, fuse):
        fixture = World(laid, draw(sizes(), "sizes"))
        fuse.at = 1
        view = fixture.state.view(draw(st.sampled_from(["seed", "next_tokens", "block_tables"]), "field"))
        values = np.full(view.shape, draw(st.integers(0, 99), "value"))

        def write() -> None:
            fixture.bound.async_set_value(target=view, value=values, stream=fixture.stream).wait(PATIENCE)

        error = assert_raises(faults.CopyFailed, write, "async_set_value whose copy the driver refused")
        assert_says(error, device=laid.bound.name, hook="async_set_value")
        fixture.check("a refused async_set_value")
        assert_no_error(write, "the same value once more")
        works(draw, World(laid, fixture.sizes, name="another"), "a refused async_set_value")


@guarantee(18)
@examples(0.5)
def test_g18_the_clean_up_happens_where_the_copy_out_fails(kit: Kit, draw: Draw) -> None:
    with under(kit, faults.FailingCopies) as (laid, fuse):
        fixture = draw_world(draw, laid, (TaskKind.PREFILL,))
        fixture.enter(draw_batch(draw, fixture, LEAVE))
        step = draw_advance(draw, fixture)
        laid.device.late = draw(st.booleans(), "it fails late")  # type: ignore[attr-defined]  # the fault's
        fuse.at = 1
        error = assert_raises(
            faults.CopyFailed, lambda: fixture.save(step).wait(PATIENCE), "save_output whose copy failed"
        )
        assert error.cure, f"{error} names no cure"
        assert not fixture.sink.records, f"{len(fixture.sink.records)} records were delivered of a copy that failed"
        fixture.check("save_output whose copy failed")
        works(draw, fixture, "a copy that failed")


@guarantee(26)
@examples(0.5)
def test_g26_whichever_allocation_fails_the_device_goes_on(kit: Kit, draw: Draw) -> None:
    with under(kit, faults.OutOfRoom) as (laid, fuse):
        size = draw(sizes(), "sizes")
        fuse.at = draw(st.integers(1, 3), "the allocation that fails")
        fixtures: list[World] = []
        for name in ("first", "second", "third"):
            before = fuse.met
            error = attempt(lambda name=name: fixtures.append(World(laid, size, name=name)))  # type: ignore[misc]
            assert (error is not None) == (fuse.met > before), f"{error!r}, but {fuse.met - before} allocations failed"
            if error is not None:
                assert isinstance(error, OutOfMemory), f"an allocation without room raised {error!r}"
                assert error.cure, f"{error} names no cure"
        fuse.at = 0
        for fixture in fixtures:
            fixture.check("another state found no memory")
        works(draw, World(laid, size, name="after"), "an allocation that failed")


@guarantee(16)
@examples(0.5)
def test_g16_a_lost_peer_is_told_and_nothing_of_its_step_is_sent(kit: Kit, draw: Draw) -> None:
    with under(kit, faults.LostPeer) as (laid, fuse):
        fixture = draw_world(draw, laid)
        fixture.bound.open_group(state=fixture.state, group=PAIR)
        fuse.at = 1
        step = draw_step(draw, fixture, group=PAIR)
        draw_sampling(draw, fixture, step)

        def broadcast() -> Ticket:
            with in_time("a broadcast with a lost peer", kit.effort.hang):
                return fixture.bound.broadcast_tokens(state=fixture.state, group=PAIR, stream=fixture.stream)

        waited_first = draw(st.booleans(), "the broadcast is waited for")
        if waited_first:
            for again in ("", " once more"):
                why = f"a broadcast with a lost peer{again}"
                error = assert_raises(GroupLost, lambda: broadcast().wait(PATIENCE), why)
                assert_says(error, device=laid.bound.name, hook="broadcast_tokens", argument="group")
        else:
            broadcast()
        assert_raises(GroupLost, lambda: saved(fixture, step), "saving the output of a step whose group is lost")
        assert not fixture.sink.records, "tokens that the ranks may not agree on were sent"
        works(draw, World(laid, fixture.sizes, name="another"), "its peer was lost")


def saved(fixture: World, step: Step) -> OutputRecord:
    """Advance, save and wait, as a worker that checks only the last ticket."""
    fixture.update_inputs(step)
    fixture.save(step).wait(PATIENCE)
    return fixture.sink.records[-1]


@guarantee(23)
@examples(0.5)
def test_g23_after_a_full_or_dead_sink_the_device_goes_on(kit: Kit, draw: Draw) -> None:
    fixture = draw_world(draw, kit)
    step = run_step(draw, fixture)
    should = fixture.rows_of(step)
    kind = draw(st.sampled_from([FullSink, DeadSink]), "sink")
    sink = kind()
    error = assert_raises(HalError, lambda: fixture.save(step, sink), f"save_output into a {kind.__name__}")
    assert_says(error, device=fixture.bound.name, hook="save_output", argument="sink")
    works(draw, fixture, f"a {kind.__name__}")
    kept = sink.resolve_all()
    assert len(kept) == (kind is FullSink), f"a {kind.__name__} kept {len(kept)} records of one step"
    if kept:
        assert_rows(kept[0], should)


@guarantee(19)
@examples(0.5)
def test_g19_copies_that_come_late_lose_no_token(kit: Kit, draw: Draw) -> None:
    with under(kit, faults.DelayedCopies) as (laid, _):
        fixture = draw_world(draw, laid)
        outputs = Outputs()
        for _ in range(draw(st.integers(1, 3), "steps")):
            outputs.save(fixture, run_step(draw, fixture))
        outputs.deliver("copies that come late")
