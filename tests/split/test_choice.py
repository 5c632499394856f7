"""The engine's choice of workers, and its limits of time and tries, with simulated workers."""

from unittest import mock

import pytest
from hal_core import FinishReason, InvalidValue, Request, Unavailable
from hal_engine.distributed.errors import RankLost
from hal_engine.distributed.split.migration import Migration
from hal_engine.distributed.split.states import State

from tests.split.test_engine import PROMPT, world_with
from tests.split.world import World


def test_the_prefill_worker_with_least_to_do_is_given_a_request():
    world = World((2, 1))
    for number in range(4):
        world.submit([number + 1, *PROMPT], 12)
    world.step()
    places = [world.engine.front.split_requests[name].prefill.number for name in world.requests]
    assert places == [0, 1, 0, 1]
    world.finish()


def test_the_decode_worker_with_most_free_blocks_is_asked():
    world = World((1, 2), blocks=30)
    lengths = [20, 2, 2]  # the first one takes more blocks than all the rest together
    for length in lengths:
        world.submit([1] * length, 12)
        world.step()
    places = [world.engine.front.split_requests[name].decode.number for name in world.requests]
    assert places == [0, 1, 1]
    world.finish()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_wait_however_long_a_restart_takes(role):
    world, split_request = world_with(State.HELD_MOVING, restarts=1)
    getattr(split_request, role).rank_executor.kill(0)
    world.step()
    coming = world.rank_executors[-1]
    assert not coming.assemble()
    coming._slow = 10**4
    for _ in range(1000):
        world.now += 60
        world.step()
    assert not world.ended
    assert not coming.assemble()
    coming._slow = 0
    world.finish()
    assert {one.reason for one in world.ended.values()} <= {FinishReason.STOP, FinishReason.LENGTH}


def test_a_start_that_fails_without_restarts_left_ends_requests():
    world, split_request = world_with(State.DECODING, restarts=1)
    split_request.decode.rank_executor.kill(0)
    world.step()
    world.rank_executors[-1].assemble = mock.Mock(side_effect=RankLost("rank 0 did not come up", 0, 0))
    for _ in range(2):  # the loss, and the engine's next turn
        world.step()
    ending = world.ended[split_request.name]
    assert ending.reason is FinishReason.ERROR
    assert "no decode worker is left (decode worker 0 was lost: rank 0 did not come up)" in ending.message
    assert "give more workers, or --restart" in ending.message
    world.finish()


def test_thousands_of_restarts_that_fail_at_once_end_requests():
    world, split_request = world_with(State.DECODING, restarts=3000)
    worker = split_request.decode
    worker._start = mock.Mock(side_effect=Unavailable("no node has room", cure="add one"))
    worker.rank_executor.kill(0)
    for _ in range(2):  # the loss, and the engine's next turn
        world.step()
    assert worker._start.call_count == world.engine.restarts == 3000
    assert "no decode worker is left" in world.ended[split_request.name].message
    world.finish()


def test_a_request_that_decode_workers_keep_refusing_ends_with_the_reason():
    world = World((1, 2))
    refused, other = world.submit([1, *PROMPT], 12, name="refused"), world.submit([2, *PROMPT], 12)
    for rank_executor in world.rank_executors[1:]:
        transfer = rank_executor.channel.ranks[0].transfer
        reserve = transfer.reserve

        def picky(key, blocks, source, reserve=reserve):
            if key.request_id == refused:
                raise InvalidValue("not this one", cure="ask another")
            reserve(key, blocks, source)

        transfer.reserve = picky
    world.finish()
    ending = world.ended[refused]
    assert (ending.reason, len(ending.token_ids)) == (FinishReason.ERROR, 1)
    assert "no decode worker took over request 'refused' in " in ending.message
    assert "tries: not this one (ask another)" in ending.message
    assert world.ended[other].reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_a_rank_receives_blocks_between_any_two_steps():
    """As with overlapping steps, or if the engine is quicker than a rank after its record."""
    world, _ = world_with(State.MOVING)
    with mock.patch.object(Migration, "_lose_offer", side_effect=AssertionError("an offer was lost")):
        world.finish()


def test_g29_a_rank_lets_nobody_in_whose_blocks_have_not_arrived():
    """For any message of the engine."""
    world, split_request = world_with(State.HELD_OFFERED, 1)
    split_request.decode.scheduler.insert(split_request.key, split_request.first, ())
    world.step()
    with pytest.raises(InvalidValue, match="arrived for it: nothing"):
        run_all(split_request.decode.rank_executor.channel.ranks[0])


def run_all(rank):
    while rank.inbox:
        rank.run()


def test_lower_priorities_are_placed_first_and_equal_ones_in_order():
    moves = Migration([], lambda ended: None, check=lambda request: None)
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1)):
        moves.add(Request(name, [1], priority=priority))
    assert [split_request.name for split_request in moves.front] == ["c", "e", "a", "d", "b"]
