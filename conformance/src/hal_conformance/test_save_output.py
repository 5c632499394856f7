"""``save_output``: who sends (G17), the clean-up (G18), the order of rows (G20), stale data (G22), modes (G24, G25)."""

from __future__ import annotations

import numpy as np
import pytest
from hal_core.errors import SinkClosed, SinkFull, TicketTimeout
from hal_core.group import Group
from hal_core.slots.fields import SplitRole, StateConfig
from hal_core.slots.step import Step
from hal_core.tickets import Ticket
from hypothesis import strategies as st

from .fixtures.batches import ENTER, LEAVE, draw_batch, draw_world
from .fixtures.forms import MODES
from .fixtures.stepping import draftable, draw_advance, draw_proposal, free_ended, run_step
from .fixtures.world import FOLLOWER, Outputs, World, assert_rows
from .harness.asserts import assert_raises
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .harness.sinks import DeadSink, FullSink, KeepingSink
from .harness.waiters import SHORT
from .kit import Draw, Kit, examples


def working(kit: Kit, draw: Draw, *, drafts: bool | None = None, role: SplitRole | None = None) -> World:
    """Return a state with requests in it, some of which have left again."""
    fixture = draw_world(draw, kit, drafts=drafts, role=role)
    if draw(st.booleans(), "some leave again"):
        fixture.enter(draw_batch(draw, fixture, LEAVE))
    return fixture


def advanced(draw: Draw, fixture: World, group: Group, *, speculative: bool | None = None) -> Step:
    """Return a step that has run, with drafts for the next one, and whose output is not saved yet."""
    step = draw_advance(draw, fixture, speculative=speculative, group=group)
    draw_proposal(draw, fixture)
    return step


@guarantee(17, also=(12, 20))
@examples()
def test_g17_a_rank_that_is_not_the_first_sends_nothing(kit: Kit, draw: Draw) -> None:
    role = draw(st.sampled_from([None, SplitRole.PREFILL]), "role")
    fixture = working(kit, draw, role=role)
    sink = KeepingSink()
    step = advanced(draw, fixture, FOLLOWER)
    should = fixture.rows_of(step)
    ticket = fixture.save(step, sink)
    assert not sink.pending, f"rank 1 of {FOLLOWER.ranks} gave {len(sink.pending)} outputs to its sink, not 0"
    arrive(ticket)
    assert_rows(fixture.take(ticket), should)


@guarantee(17)
@examples(0.5)
def test_g17_the_first_rank_sends_once_whatever_its_number(kit: Kit, draw: Draw) -> None:
    fixture = working(kit, draw)
    first = draw(st.integers(0, 5), "the group's first rank")
    outputs = Outputs()
    outputs.save(fixture, advanced(draw, fixture, Group((first, 9, 7), first)))
    outputs.deliver("the first rank's step")


@guarantee(18)
@examples()
def test_g18_every_rank_cleans_up_also_where_nothing_is_sent(kit: Kit, draw: Draw) -> None:
    fixture = working(kit, draw)
    group = draw(st.sampled_from([Group(), FOLLOWER]), "group")
    step = advanced(draw, fixture, group)
    arrive(fixture.save(step))
    fixture.check(f"save_output on rank {group.rank} of {group.ranks}")
    again = fixture.step(step.orders[fixture.name].tolist(), speculative=step.speculative)
    left = [row.status.name for row in fixture.output(again) if row.status.name in ("PREEMPTED", "ABORTED")]
    assert not left, f"reported again: {left}"


@guarantee(18, also=(19,))
@examples()
def test_g18_the_clean_up_happens_where_sending_fails(kit: Kit, draw: Draw) -> None:
    fixture = working(kit, draw)
    kind, sink = draw(st.sampled_from([(SinkFull, FullSink), (SinkClosed, DeadSink)]), "sink")
    step = advanced(draw, fixture, Group())
    error = assert_raises(kind, lambda: fixture.save(step, sink()), f"save_output into a {sink.__name__}")
    if isinstance(error, SinkClosed):  # it did not take the output: whoever waits for it learns so (G19)
        refused = error.ticket
        assert isinstance(refused, Ticket), f"SinkClosed has the ticket {refused!r}"
        assert_raises(SinkClosed, lambda: refused.wait(PATIENCE), "the ticket of a refused output")
    fixture.check(f"sending failed with {kind.__name__}")


@guarantee(18)
@examples(0.5)
def test_g18_the_clean_up_comes_after_the_copy(kit: Kit, draw: Draw) -> None:
    fixture = working(kit, draw)
    outputs, step = Outputs(), advanced(draw, fixture, Group())
    should = fixture.mirrored()
    with kit.held(fixture.stream):
        outputs.save(fixture, step)
    outputs.deliver()
    fixture.take(outputs.saved[0][0])
    fixture.check_mirror(should, "the step was taken")
    fixture.check("save_output")


@guarantee(20, also=(19, 22))
@examples()
def test_g20_rows_are_in_batch_id_order(kit: Kit, draw: Draw) -> None:
    fixture = working(kit, draw)
    for _ in range(draw(st.integers(1, 3), "steps")):
        fixture.output(run_step(draw, fixture))


@guarantee(20)
@examples(0.5)
def test_g20_a_step_names_its_order_for_each_state(kit: Kit, draw: Draw) -> None:
    target = working(kit, draw)
    proposer = World(kit, target.sizes, name="proposer")  # each order fits either state
    proposer.enter(draw_batch(draw, proposer, ENTER, least=1))
    one = run_step(draw, target, speculative=False)
    other = run_step(draw, proposer, speculative=False)
    both = Step(9, {**one.orders, **other.orders})
    for fixture in (target, proposer):
        fixture.output(both)


@guarantee(22, also=(19, 20))
@examples()
def test_g22_nothing_of_an_earlier_step_is_in_a_record(kit: Kit, draw: Draw) -> None:
    fixture = working(kit, draw)
    for _ in range(draw(st.integers(2, 4), "steps")):
        fixture.output(run_step(draw, fixture))
        free_ended(fixture)
        fixture.enter(draw_batch(draw, fixture))


@guarantee(22, also=(19,))
@examples(0.5)
def test_g22_a_record_does_not_change_when_later_steps_run(kit: Kit, draw: Draw) -> None:
    fixture = working(kit, draw)
    kept = [fixture.output(run_step(draw, fixture)) for _ in range(3)]
    for record, rows in zip(fixture.sink.records, kept, strict=True):
        assert_rows(record, rows)


@guarantee(22, also=(19,))
@examples(0.5)
def test_g22_outputs_that_wait_do_not_share_memory(kit: Kit, draw: Draw) -> None:
    fixture = working(kit, draw)
    outputs = Outputs()
    for _ in range(3):
        outputs.save(fixture, advanced(draw, fixture, Group()))
    outputs.deliver()


@guarantee(24, also=(12, 20))
@examples()
def test_g24_a_prefill_node_reports_first_token_and_drafts_aligned(kit: Kit, draw: Draw) -> None:
    fixture = working(kit, draw, drafts=True, role=SplitRole.PREFILL)
    for _ in range(2):
        step = advanced(draw, fixture, Group())
        fixture.output(step)
        record = fixture.sink.records[-1]
        counted = int(record.counts.sum())
        assert counted == len(record.tokens), f"counts add up to {counted}, but there are {len(record.tokens)} tokens"


def accepting(kit: Kit, role: SplitRole) -> World:
    """Return a state whose three slots have accepted one, two and three tokens, with their alternatives."""
    fixture = World(kit, StateConfig(num_slots=3, max_model_len=16, block_size=4, max_draft_tokens=2, max_logprobs=2))
    fixture.enter(fixture.entering(slot, role=role, logprobs=2) for slot in range(3))
    arrive(fixture.sample(np.arange(27, dtype=np.int64).reshape(3, 3, 3), [1, 2, 3]))
    return fixture


@guarantee(24)
@pytest.mark.parametrize("logprobs", [None, 1])
def test_g24_first_tokens_leave_with_every_count_of_drafts(kit: Kit, logprobs: int | None) -> None:
    fixture = accepting(kit, SplitRole.PREFILL)
    step = fixture.advance([2, 0, 1], speculative=True, logprobs=logprobs)
    fixture.draft({0: [], 1: [7], 2: [8, 9]})
    drafted = [(row.first, row.drafts) for row in fixture.output(step)]
    assert drafted == [(True, [8, 9]), (True, []), (True, [7])], f"the kit's own rows have {drafted}"


@guarantee(24)
def test_g24_log_probabilities_belong_to_their_tokens(kit: Kit) -> None:
    fixture = accepting(kit, SplitRole.PREFILL)
    fixture.output(fixture.advance([2, 0, 1], speculative=True, logprobs=1))


@guarantee(24, requires=("async_h2d", "async_d2h", "can_hold_stream", "overlapped_update"))
def test_g24_log_probabilities_are_of_the_step_on_the_given_stream(kit: Kit) -> None:
    fixture, outputs = accepting(kit, SplitRole.MIXED), Outputs()
    fixture.stream = kit.device.stream()
    step = fixture.step([2, 0, 1], speculative=True, logprobs=1)
    with kit.held(fixture.stream, "a step with log-probabilities"):
        fixture.update_inputs(step)
        outputs.save(fixture, step)
        assert_raises(TicketTimeout, lambda: outputs.saved[0][0].record(SHORT), "the record of a step that is held")
    outputs.deliver()


@guarantee(24)
@pytest.mark.parametrize("logprobs", [None, 1])
def test_g24_a_count_counts_the_tokens_of_its_row(kit: Kit, logprobs: int | None) -> None:
    fixture = accepting(kit, SplitRole.MIXED)
    step = fixture.advance([2, 0, 1], speculative=True, logprobs=logprobs)
    counted = [len(row.tokens) for row in fixture.output(step)]
    assert counted == [3, 1, 2], f"the kit's own rows have {counted} tokens"


@guarantee(25)
@examples(0.3)
def test_g25_every_mode_of_decoding_gives_the_same_record(kit: Kit, draw: Draw) -> None:
    for mode in MODES:
        check_mode(kit, draw, mode)


def check_mode(kit: Kit, draw: Draw, mode: str) -> None:
    """Compare the records of two steps of a mode with the model's rows."""
    drafts, verifies, proposes = MODES[mode]
    slots = draw(st.integers(1, 4), "slots")
    size = StateConfig(num_slots=slots, max_model_len=16, block_size=2, max_draft_tokens=drafts, max_logprobs=1)
    fixture = World(kit, size)
    fixture.enter(draw_batch(draw, fixture, ENTER, least=1))
    for turn in range(2):
        step = draw_advance(draw, fixture, speculative=verifies[turn % len(verifies)])
        if proposes:
            draw_proposal(draw, fixture)
        fixture.output(step)
        fixture.check(f"a step of mode {mode!r}")


@guarantee(25, also=(12, 24))
@pytest.mark.parametrize("role", SplitRole, ids=lambda role: role.name.lower())
@pytest.mark.parametrize("mode", MODES)
def test_g25_each_count_of_tokens_and_drafts_is_told_in_every_mode(kit: Kit, mode: str, role: SplitRole) -> None:
    """In each of four steps a slot gives another count, from none to all; then it has another count of drafts."""
    drafts, verifies, proposes = MODES[mode]
    size = StateConfig(num_slots=6, max_model_len=40, block_size=8, max_draft_tokens=drafts, max_logprobs=1)
    fixture = World(kit, size)
    fixture.enter(fixture.entering(slot, role=role, max_tokens=30, logprobs=1) for slot in range(6))
    most = size.max_accept
    for turn in range(4):
        speculative = verifies[turn % len(verifies)]
        tokens = 1000 * turn + 10 * np.arange(6)[:, None] + np.arange(most)
        alternatives = np.stack([tokens, tokens + 500_000], axis=2)
        fixture.sample(alternatives, (np.arange(6) + 1 + turn) % (most + 1), turn=turn, speculative=speculative)
        step = fixture.advance(np.roll(range(6), turn).tolist(), speculative=speculative, logprobs=turn % 2)
        fixture.check(f"step {turn} of mode {mode!r}")
        if proposes:
            given = {slot: [7] * ((slot + turn) % (drafts + 1)) for slot in draftable(fixture)}
            fixture.draft(given)
        fixture.output(step)


@guarantee(25)
def test_g25_a_plain_step_of_a_speculative_state_reports_its_tokens(kit: Kit) -> None:
    fixture = accepting(kit, SplitRole.MIXED)
    fixture.put({"sampled_token_ids": np.array([7, 8, 9])})
    fixture.output(fixture.advance([2, 0, 1]))
