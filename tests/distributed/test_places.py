"""Placement of requests by an engine of several groups: where there is room, in their order. Ranks are simulated."""

from collections import defaultdict, deque
from unittest import mock

import numpy as np
import pytest
from hal_core import ENTERING, FinishReason, OutputRecord, Request, SamplingParams, StateConfig
from hal_core.output.records import SlotStatus
from hal_engine.distributed.control_messages import Setup
from hal_engine.distributed.engine import engine_of_ranks
from hal_engine.distributed.errors import RankLost
from hal_engine.distributed.rank_info import RankInfo

SIZES = StateConfig(vocab_size=100, num_slots=2, max_model_len=64, block_size=4, max_logprobs=0)


class Paper:
    """Ranks that give every request in a slot one token a step; ``entered``: the requests of each group, in order;
    ``came``: the same of all groups.

    The output of a step comes when the test lets it: ``held`` groups keep theirs.
    """

    undelivered = ()
    drafts, progress, sockets = (0, 0, 0), deque(), ()
    rank_info = RankInfo("cpu:0", {}, "", overlap=False)

    def __init__(self):
        self.entered, self.slots = defaultdict(list), defaultdict(dict)
        self.orders, self.came, self.held = [], [], set()

    def assemble(self):
        return True

    def order(self, number, tasks, taken):
        for task in tasks:
            if task.kind in ENTERING:
                self.entered[number].append(task.request.request_id)
                self.came.append(task.request.request_id)
                self.slots[number][task.slot] = [task.request, 0]
        self.orders.append(number)

    def receive(self, timeout):
        ready = [number for number in self.orders if number not in self.held]
        if not ready:
            return None
        self.orders.remove(ready[0])
        return ready[0], self.record(self.slots[ready[0]])

    def record(self, slots):
        rows = []
        for slot, held in list(slots.items()):
            held[1] += 1
            ends = held[1] == held[0].params.max_tokens
            rows.append((held[0].request_id, FinishReason.LENGTH if ends else FinishReason.NONE, held[1] - 1))
            if ends:
                del slots[slot]
        names, finish, positions = zip(*rows, strict=True) if rows else ((), (), ())
        ones = np.ones(len(rows), np.uint8)
        status = np.full(len(rows), SlotStatus.TOKEN, np.uint8)
        return OutputRecord(
            0, names, status, np.array(finish, np.uint8), np.array(positions, np.int64), ones.astype(np.int32),
            np.arange(len(rows)), ones < 0,
        )  # fmt: skip

    def rest(self):
        return []

    def stop(self):
        pass

    close = stop


def request(name, prompt=4, most=3):
    return Request(name, range(prompt), SamplingParams(max_tokens=most))


@pytest.fixture
def paper():
    return Paper()


def engine_of(paper, *requests, blocks=8, groups=2):
    """An engine of groups with two slots and eight blocks of four tokens each."""
    setup = Setup(model="", sizes=SIZES, blocks=blocks, dp=groups, timeout=1.0)
    engine = engine_of_ranks(setup, lambda setup: paper)
    for one in requests:
        engine.submit(one)
    return engine


def test_requests_go_to_the_least_busy_group(paper):
    engine = engine_of(paper, *(request(f"r{n}") for n in range(4)))
    ended = [one.request_id for one in engine.run()]
    assert paper.entered == {0: ["r0", "r2"], 1: ["r1", "r3"]}
    assert sorted(ended) == ["r0", "r1", "r2", "r3"]


def test_a_request_goes_where_there_are_blocks_for_it(paper):
    """Both groups have one request and a free slot, and that of the first one has all its blocks."""
    engine = engine_of(paper, request("large", prompt=28, most=2), request("a"), request("b"))
    list(engine.run())
    assert paper.entered == {0: ["large"], 1: ["a", "b"]}


def test_nobody_overtakes_the_first_one_that_waits(paper):
    """There is room for a small request; the large one before it waits for that of whole groups."""
    engine = engine_of(paper, request("a", most=9), request("b", most=5), request("large", prompt=28), request("small"))
    list(engine.run())
    assert paper.came == ["a", "b", "large", "small"]


def test_a_request_that_waits_in_front_is_aborted_there(paper):
    engine = engine_of(paper, *(request(f"r{n}") for n in range(5)))
    engine.step()
    engine.abort("r4")
    ended = {one.request_id: (one.reason, one.reported) for one in engine.run()}
    assert ended["r4"] == (FinishReason.ABORT, False)
    assert sum(map(len, paper.entered.values())) == 4


def test_groups_take_steps_at_their_own_pace(paper):
    """One group's output does not come: the other one continues."""
    engine = engine_of(paper, request("a", most=6), request("b", most=6))
    paper.held.add(1)
    for _ in range(4):
        engine.step()
    assert engine.steps == 4
    paper.held.clear()
    assert len(list(engine.run())) == 2


def test_ranks_without_requests_are_looked_after(paper):
    engine, paper.sockets = engine_of(paper), ("a socket",)
    paper.receive = mock.Mock(side_effect=RankLost("rank 1 was lost", 1, 0))
    with pytest.raises(RankLost, match="rank 1 was lost"):
        engine.step()


def test_a_loss_names_all_that_was_not_delivered(paper):
    """Requests in slots count from their next position, and waiting ones from their first."""

    def lost(timeout):
        raise RankLost("rank 1 was lost", 1, 2)

    engine = engine_of(paper, *(request(f"r{n}") for n in range(5)), groups=1)
    engine.step()
    paper.receive = lost
    with pytest.raises(RankLost) as caught:
        engine.step()
    assert caught.value.undelivered == (("r0", 1, -1), ("r1", 1, -1), ("r2", 0, -1), ("r3", 0, -1), ("r4", 0, -1))
