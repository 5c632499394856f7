"""``save_output``: each token once (G19), bounds (G21), and a compute stream that does not wait (G23)."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import numpy as np
from hal_core.errors import InvalidValue, SinkFull
from hal_core.output.records import OutputRecord, SlotStatus
from hal_core.output.sinks import MemorySink
from hal_core.slots.fields import StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind
from hypothesis import strategies as st

from .draw.requests import sizes
from .fixtures.batches import ENTER, LEAVE, draw_batch, draw_world
from .fixtures.stepping import draw_sampling, draw_step, free_ended, run_step
from .fixtures.world import Outputs, World, assert_rows
from .harness.asserts import assert_no_error, assert_raises, assert_says
from .harness.backdoor import PATIENCE, arrive, poisoned
from .harness.guarantees import guarantee
from .harness.sinks import DeadSink, FullSink, KeepingSink
from .kit import Draw, Kit, examples
from .oracle.output import Row, found_rows


@guarantee(19, also=(20, 22))
@examples()
def test_g19_each_token_of_each_request_is_delivered_once_and_in_order(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"))
    given: dict[str, list[int]] = defaultdict(list)
    left: dict[str, int] = defaultdict(int)
    for saved in range(draw(st.integers(2, 6), "rounds")):
        tasks = draw_batch(draw, fixture)
        fixture.enter(tasks)
        for task in tasks:
            if task.kind in ENTER:
                first = [task.first_token] if task.kind is TaskKind.REMOTE_PREFILL else []
                given[task.request.request_id] = [*fixture.model.requests[task.request.admission_id].output, *first]
            left[task.request.request_id] += task.kind in LEAVE
        arrive(fixture.save(run_step(draw, fixture)), "the record of a step of right values")
        records = len(fixture.sink.records)
        assert records == saved + 1, f"{saved + 1} steps were saved, but {records} records were delivered"
        for row in found_rows(fixture.sink.records[-1]):
            had = given[row.request_id]
            if row.tokens:
                assert row.position == len(had), (
                    f"{row.request_id}: tokens from {row.position}, but {len(had)} were delivered before"
                )
            had += row.tokens
            left[row.request_id] -= row.status in (SlotStatus.PREEMPTED, SlotStatus.ABORTED)
        free_ended(fixture)
    for slot, resident in fixture.model.residents.items():
        prompt = len(resident.request.prompt)
        should = fixture.model.cells["token_ids"][slot, prompt : prompt + fixture.model.get("step_idx", slot)].tolist()
        name = resident.request.request_id
        assert given[name] == should, f"{name} got {given[name]}, but generated {should}"
    wrong = {name: count for name, count in left.items() if count}
    assert not wrong, f"requests that left and were not reported exactly once (missing reports): {wrong}"


@guarantee(19)
@examples(0.5)
def test_g19_a_batch_that_is_preempted_as_a_whole_is_reported(kit: Kit, draw: Draw) -> None:
    fixture = draw_world(draw, kit, (TaskKind.PREFILL,))
    fixture.output(run_step(draw, fixture))
    leaving = [
        Task(draw(st.sampled_from(LEAVE), "how"), slot, r.admitted) for slot, r in fixture.model.residents.items()
    ]
    fixture.enter(leaving)
    rows = fixture.output(run_step(draw, fixture))
    assert len(rows) == len(leaving), f"{len(leaving)} requests left, but {len(rows)} rows report it"
    fixture.check("everything was preempted or aborted")


@guarantee(19)
@examples(0.5)
def test_g19_output_that_a_sink_does_not_take_can_still_be_read(kit: Kit, draw: Draw) -> None:
    fixture = draw_world(draw, kit)
    step = run_step(draw, fixture)
    should = fixture.rows_of(step)
    sink = draw(st.sampled_from([FullSink, DeadSink]), "sink")()
    try:
        fixture.save(step, sink)
        error = None
    except Exception as raised:  # noqa: BLE001 (whatever it is, it must lead to the output)
        error = raised
    ticket = getattr(error, "ticket", None)
    assert ticket is not None, f"a {type(sink).__name__} raised {error!r}, which does not lead to the lost output"
    assert_rows(assert_no_error(lambda: ticket.record(PATIENCE), "the record of an output that was lost"), should)


@guarantee(21)
@examples(0.3)
def test_g21_what_the_host_can_see_out_of_bounds_raises_at_the_call(kit: Kit, draw: Draw) -> None:
    fixture = draw_world(draw, kit, drafts=False)
    n, sink = fixture.sizes.num_slots, KeepingSink()
    steps = {
        "a slot that does not exist": Step(1, {fixture.name: np.array([n])}),
        "a negative slot": Step(1, {fixture.name: np.array([-1])}),
        "no order for the state": Step(1, {"another": np.array([0])}),
        "more log-probabilities than the state holds": fixture.step([0], logprobs=fixture.sizes.max_logprobs + 1),
        "less than no log-probabilities": fixture.step([0], logprobs=-1),
        "drafts on a state without": fixture.step([0], speculative=True),
    }
    for why, step in steps.items():
        for hook in ("save_output", "update_inputs"):
            arguments = {"state": fixture.state, "step": step, "stream": fixture.stream}
            arguments |= {"sink": sink} if hook == "save_output" else {}
            error = assert_raises(
                InvalidValue, partial(getattr(fixture.bound, hook), **arguments), f"{hook} with {why}"
            )
            assert_says(error, device=fixture.bound.name, hook=hook, argument="step")
        assert not sink.pending, f"a step with {why} was sent all the same"
        fixture.check(f"{why} was refused")
    most = fixture.step(range(n), logprobs=fixture.sizes.max_logprobs)
    draw_sampling(draw, fixture, most)
    fixture.run(most, "a step at every bound")
    fixture.output(most)


@guarantee(21)
@examples()
def test_g21_what_only_the_device_knows_is_checked_before_encoding(kit: Kit, draw: Draw) -> None:
    fixture = draw_world(draw, kit, drafts=True)
    step = draw_step(draw, fixture, speculative=True)
    draw_sampling(draw, fixture, step)
    slot = draw(st.sampled_from(sorted(fixture.model.residents)), "slot that a kernel writes out of bounds")
    far = [fixture.sizes.max_accept + 1, -1, 2**31 - 1, -(2**31)]
    fixture.poke_cell("accept_num", slot, draw(st.sampled_from(far), "accepted"))
    fixture.run(step)
    fixture.check("update_inputs of a count out of bounds")
    gives = fixture.model.get("stop_reason", slot) == 4
    expect_error(fixture, step) if gives else fixture.output(step)


def expect_error(fixture: World, step: Step) -> None:
    """Assert that the ticket raises, the row is an error, and the other rows are right."""
    __tracebackhide__ = True
    should = fixture.rows_of(step)
    ticket = fixture.save(step)
    error = assert_raises(InvalidValue, lambda: ticket.wait(PATIENCE), "waiting for output out of bounds")
    assert_says(error, device=fixture.bound.name, hook="save_output")
    record = fixture.sink.records[-1]
    assert_rows(record, should)
    assert bool((record.counts <= fixture.sizes.max_accept).all()), f"counts {record.counts} are out of bounds"


@guarantee(21)
@examples(0.5)
def test_g21_a_draft_count_out_of_bounds_is_an_error_of_its_row(kit: Kit, draw: Draw) -> None:
    fixture = draw_world(draw, kit, (TaskKind.PREFILL,))
    step = run_step(draw, fixture)
    slot = draw(st.sampled_from(sorted(fixture.model.residents)), "slot")
    fixture.poke_cell(
        "draft_num", slot, draw(st.sampled_from([fixture.sizes.max_draft_tokens + 1, -1, 2**30]), "drafts")
    )
    expect_error(fixture, step)


@guarantee(21)
@examples(0.5)
def test_g21_an_error_that_the_step_met_is_reported_for_its_request_alone(kit: Kit, draw: Draw) -> None:
    fixture = draw_world(draw, kit)
    step = run_step(draw, fixture)
    slot = draw(st.sampled_from(sorted(fixture.model.residents)), "slot")
    failed = fixture.step(
        step.orders[fixture.name].tolist(), speculative=step.speculative, errors={slot: "no more blocks"}
    )
    fixture.output(failed)


def busy(kit: Kit) -> tuple[World, Step, list[Row]]:
    """Return a state whose step has given tokens, and the expected rows."""
    fixture = World(kit, StateConfig(num_slots=4, max_model_len=16, block_size=2))
    fixture.enter(map(fixture.entering, range(4)))
    fixture.put({"sampled_token_ids": np.arange(10, 14)})
    step = fixture.advance([3, 1, 0, 2])
    return fixture, step, fixture.rows_of(step)


def overwrite(fixture: World) -> None:
    """Fill the output fields with poison in stream order."""
    n = fixture.sizes.num_slots
    fixture.poke({"sampled_token_ids": poisoned(8 * n).view(np.int64), "step_idx": poisoned(8 * n).view(np.int64)})


@guarantee(23)
def test_g23_later_work_on_the_stream_does_not_change_what_was_saved(kit: Kit) -> None:
    fixture, step, _ = busy(kit)
    outputs = Outputs()
    with kit.held(fixture.stream):
        outputs.save(fixture, step)
        overwrite(fixture)
    outputs.deliver()


@guarantee(23, requires=("async_d2h", "can_hold_stream"))
def test_g23_the_call_returns_while_the_stream_is_held(kit: Kit) -> None:
    fixture, step, should = busy(kit)
    sink = MemorySink(threaded=True)
    with kit.held(fixture.stream):
        ticket = fixture.save(step, sink)
        assert not ticket.done(), "the output's ticket is done, but its stream was held"
        assert not sink.records, f"a record was delivered from a held stream: {sink.records}"
    arrive(ticket)
    sink.close(PATIENCE)
    assert_rows(sink.records[0], should)


@guarantee(23, requires=("async_d2h", "can_hold_stream"))
def test_g23_copies_do_not_hold_up_the_compute_stream(kit: Kit) -> None:
    fixture, step, _ = busy(kit)
    sink = MemorySink(threaded=True)
    outputs = Outputs(sink)
    with kit.held(fixture.stream):
        for first in range(0, 80, 10):
            fixture.poke({"sampled_token_ids": np.arange(first, first + 4)})
            outputs.save(fixture, step)
    for ticket, _ in outputs.saved:
        arrive(ticket)
    sink.close(PATIENCE)
    outputs.assert_records(sink.records, "outputs of a held stream")


@guarantee(23)
def test_g23_a_full_sink_raises_and_drops_nothing(kit: Kit) -> None:
    fixture, step, should = busy(kit)
    sink = FullSink()
    error = assert_raises(SinkFull, lambda: fixture.save(step, sink), "save_output into a full sink")
    assert_says(error, device=fixture.bound.name, hook="save_output", argument="sink")
    records: list[OutputRecord] = sink.resolve_all()
    assert len(records) == 1, f"the sink kept {len(records)} records of one step, but should keep 1"
    assert_rows(records[0], should)
