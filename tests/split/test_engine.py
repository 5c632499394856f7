"""The engine of a split with simulated workers: the transitions of the table one by one, then any order of events."""

from unittest import mock

import pytest
from hal_core import FinishReason
from hal_engine.distributed.split.migration import Migration
from hal_engine.distributed.split.states import TABLE, Event, State
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.split.world import World

PROMPT = [1, 2, 3, 4, 5, 6, 8, 9, 10]


@pytest.mark.parametrize("split", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("tp", [1, 2])
def test_requests_give_the_tokens_foretold(split, tp):
    """Without a retry: no offer is lost while no worker is lost."""
    world = World(split, tp=tp, chunk=2)  # so that some are placed long before they enter
    for number in range(6):
        world.submit([number + 1, *PROMPT[: 2 + number]], 3 + 2 * number)
    with mock.patch.object(Migration, "_lose_offer", side_effect=AssertionError("an offer was lost")):
        world.finish()
    assert {one.reason for one in world.ended.values()} <= {FinishReason.STOP, FinishReason.LENGTH}


def test_drafts_travel_and_are_verified_in_the_first_step_there():
    world = World(drafts=2)
    for number in range(4):
        world.submit([number + 1, *PROMPT], 12)
    world.finish()
    assert sum(rank_executor.accepted for rank_executor in world.rank_executors) > 0


def until(world, state, *, words, records):
    """Advance in the smallest steps until a request is in that state; ``words``, ``records``: deliver these every so
    many turns. Return that request.
    """
    for turn in range(1, 400):
        for rank in [rank for rank_executor in world.living for rank in rank_executor.channel.ranks]:
            rank.run()
            for worker in world.engine.workers:
                if worker.rank_executor is not None and not worker.rank_executor.dead:
                    if turn % words == 0:
                        worker.rank_executor.deliver(word=True)
                    if turn % records == 0:
                        worker.rank_executor.deliver(word=False)
            world.step()
            world.now += 0.01
            found = [one for one in world.engine.front.split_requests.values() if one.state is state]
            if found:
                return found[0]
    raise AssertionError(f"no request came to be {state}")


REACHED = [state for state in State if state not in (State.WAITING, State.ENDED)]
PACE = {State.LANDED: (1, 40), State.MOVING: (1, 40), State.HELD_OFFERED: (40, 1)}
"""Deliver messages, and records, every so many turns; by default as soon as possible."""
NO_ROOM = {State.PREFILLING, State.HELD}


def world_with(state, count=4, **how):
    """A world of so many requests, of which one is in that state, and it."""
    world = World(slots=1 if state in NO_ROOM else 3, **how)
    for number in range(count):
        world.submit([number + 1, *PROMPT], 12)
    words, records = PACE.get(state, (1, 1))
    return world, until(world, state, words=words, records=records)


@pytest.mark.parametrize("state", REACHED, ids=lambda state: state.name)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_may_die_in_any_state_of_a_request(state, role):
    world, split_request = world_with(state, restarts=1)
    worker = getattr(split_request, role) or getattr(world.engine.front, role)[0]
    worker.rank_executor.kill(1)
    world.finish()
    assert {one.reason for one in world.ended.values()} <= {FinishReason.STOP, FinishReason.LENGTH}
    assert world.engine.restarts == 1


@pytest.mark.parametrize("state", REACHED, ids=lambda state: state.name)
def test_a_request_may_be_aborted_in_any_state(state):
    world, split_request = world_with(state)
    world.engine.abort(split_request.name)
    world.engine.abort(split_request.name)
    world.finish()
    others = {one.reason for name, one in world.ended.items() if name != split_request.name}
    assert world.ended[split_request.name].reason is FinishReason.ABORT
    assert others <= {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("state", REACHED, ids=lambda state: state.name)
def test_words_that_come_twice_count_once(state):
    world, _ = world_with(state, tp=2)
    for rank_executor in world.rank_executors:
        for word in reversed(range(len(rank_executor.heard))):
            rank_executor.repeat(word)
    with mock.patch.object(Migration, "_lose_offer", side_effect=AssertionError("an offer was lost")):
        world.finish()
    assert {one.reason for one in world.ended.values()} <= {FinishReason.STOP, FinishReason.LENGTH}


def test_the_prefill_worker_is_rid_of_a_request_that_was_inserted():
    world, split_request = world_with(State.INSERTING)
    assert split_request.prefill.scheduler.kept
    worker, split_request = split_request.prefill, until(world, State.DECODING, words=1, records=1)
    assert split_request.prefill is None
    for _ in range(3):  # the message to its rank, the answer, and its receipt by the engine
        world.turn()
    assert not worker.scheduler.keeps(split_request.name)
    world.finish()


@pytest.mark.parametrize("state", [State.HELD_OFFERED, State.HELD_MOVING], ids=lambda state: state.name)
def test_blocks_of_an_ended_offer_are_freed_when_all_ranks_confirm(state):
    world, split_request = world_with(state, 1, tp=2)
    worker, before = split_request.decode, split_request.decode.scheduler.pool.free
    world.engine.abort(split_request.name)
    for rank in worker.rank_executor.channel.ranks:
        for _ in range(4):
            world.step()
        assert worker.scheduler.pool.free <= before, "blocks are free that a rank may still write"
        while rank.inbox:
            rank.run()
        rank.run()
        for _ in range(20):
            worker.rank_executor.deliver(word=True)
    world.finish()


def test_without_decode_room_a_request_is_computed_again():
    world, split_request = world_with(State.HELD)
    before = len(world.delivered[split_request.name])
    world.now += 31
    world.step()
    assert split_request.careful
    assert split_request.state is not State.HELD
    world.finish()
    assert before == 1
    assert {one.reason for one in world.ended.values()} <= {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_end_with_an_error_if_a_role_has_no_worker_left(role):
    world, split_request = world_with(State.HELD_MOVING)
    getattr(split_request, role).rank_executor.kill(0)
    world.finish()
    reported = [one for one in world.ended.values() if one.reason is FinishReason.ERROR]
    assert reported
    cure = "give more workers, or --restart"
    assert all(f"no {role} worker is left" in one.message and cure in one.message for one in reported)


def test_a_decode_worker_that_does_not_answer_is_left_for_another():
    world = World((1, 2))
    name = world.submit(PROMPT, 12)
    split_request = until(world, State.OFFERED, words=400, records=1)
    first = split_request.decode
    for _ in range(60):
        world.now += 1
        for rank in [
            rank for one in world.engine.workers if one is not first for rank in one.rank_executor.channel.ranks
        ]:
            rank.run()
        for one in world.engine.workers:
            one.rank_executor.deliver(word=True)
            one.rank_executor.deliver(word=False)
        world.step()
        if name in world.ended:
            break
    assert world.ended[name].reason in (FinishReason.STOP, FinishReason.LENGTH)
    world.finish()


def test_a_name_may_be_used_again():
    world = World()
    for _ in range(2):
        name = world.submit(PROMPT, 9, name="again")
        with mock.patch.object(Migration, "_lose_offer", side_effect=AssertionError("an offer was lost")):
            world.finish()
        assert world.ended.pop(name).reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_a_request_that_fits_no_worker_ends_with_an_error_of_its_own():
    world = World(blocks=4)
    large, small = world.submit([1] * 14, 8), world.submit([1, 2], 3)
    world.ended.clear()
    world.requests.pop(large)
    world.finish()
    assert world.ended[large].reason is FinishReason.ERROR
    assert "KV blocks" in world.ended[large].message
    assert world.ended[small].reason is not FinishReason.ERROR


def test_every_state_has_a_way_out_and_may_end():
    for state in State:
        assert (state is State.ENDED) is not bool(TABLE[state])
        if state is not State.ENDED:
            assert TABLE[state][Event.END] is State.ENDED


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.integers(0, 9)),
        st.tuples(st.just("word"), st.integers(0, 5)),
        st.tuples(st.just("record"), st.integers(0, 5)),
        st.tuples(st.just("step"), st.just(0)),
        st.tuples(st.just("turn"), st.integers(1, 8)),
        st.tuples(st.just("unheard"), st.integers(1, 8)),
        st.tuples(st.just("unseen"), st.integers(1, 8)),
        st.tuples(st.just("submit"), st.integers(1, 20)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("kill"), st.integers(0, 30)),
        st.tuples(st.just("again"), st.integers(0, 60)),
        st.tuples(st.just("cut"), st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from([0.3, 4.0, 11.0, 31.0])),
    ),
    min_size=5,
    max_size=60,
)


def play(world, operations):
    for what, number in operations:
        if what == "run":
            world.run(number)
        elif what in ("word", "record"):
            world.deliver(number, word=what == "word")
        elif what == "step":
            world.step()
        elif what == "turn":
            for _ in range(number):
                world.turn()
        elif what in ("unheard", "unseen"):
            for _ in range(number):
                world.turn(words=what == "unseen", records=what == "unheard")
        elif what == "submit":
            world.submit([number, *PROMPT[: number % 9]], 1 + number % 13)
        elif what == "abort" and world.requests:
            world.engine.abort(list(world.requests)[number % len(world.requests)])
        elif what == "again":
            world.repeat(number)
        elif what == "kill":
            world.kill(number % 7, number // 7)
        elif what == "cut":
            world.net.cut()
        elif what == "wait":
            world.now += number


HOW = st.fixed_dictionaries(
    {
        "split": st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
        "tp": st.sampled_from([1, 1, 2]),
        "blocks": st.sampled_from([9, 12, 30]),
        "slots": st.sampled_from([1, 3]),
        "drafts": st.sampled_from([0, 2]),
        "overlap": st.booleans(),
        "restarts": st.integers(0, 5),
    }
)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(how=HOW, operations=OPERATIONS)
def test_whatever_happens_each_token_comes_once_or_is_reported(how, operations):
    world = World(**how)
    for number in range(4):
        world.submit([number + 1, *PROMPT[: 2 * number]], 4 + 3 * number)
    play(world, operations)
    world.finish()
