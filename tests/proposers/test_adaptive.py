"""The number of a request's drafts depends only on acceptance."""

import itertools
import time

import numpy as np
import pytest
from hal_engine.proposers import Fed
from hal_engine.proposers.adaptive import FIRST_PAUSE, LONGEST_PAUSE, Adaptive, row_cost, worthwhile
from hal_engine.proposers.naive import Naive
from hal_engine.proposers.ngram import NGram
from hypothesis import given
from hypothesis import strategies as st

from . import models


class Fixed(Naive):
    """Drafts as many tokens as allowed; ``asked`` records the room that it received."""

    def __init__(self, token=1):
        self.token, self.asked = token, []

    def propose(self, room):
        self.asked.append(dict(room))
        return {slot: [self.token] * most for slot, most in room.items()}


def steps(adaptive, accepted, slot=0):
    """Drafts of each step, of which ``accepted(drafts, step)`` are right."""
    counts = []
    for step in range(300):
        drafts = adaptive.propose({slot: 5}).get(slot, [])
        counts.append(len(drafts))
        right = min(len(drafts), accepted(len(drafts), step))
        adaptive.observe(models.fed(**{f"s{slot}": [1] * (right + 1)}))
    return counts


def entered(proposer):
    adaptive = Adaptive(proposer, 10)
    models.entered(adaptive, 0, [1, 2])
    return adaptive


def test_right_drafts_are_made_as_many_as_there_is_room():
    assert steps(entered(Fixed()), lambda drafts, _: drafts)[4:] == [5] * 296


def test_wrong_drafts_end_but_for_a_single_one_ever_less_often():
    counts = steps(entered(Fixed()), lambda *_: 0)
    tried = [step for step, count in enumerate(counts) if count]
    assert sum(counts[8:]) <= 8
    assert set(counts[8:]) == {0, 1}
    pauses = [later - earlier for earlier, later in itertools.pairwise(tried[-5:])]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE


def test_several_requests_try_drafts_on_the_same_steps():
    """A step with any drafts slows all requests; they come at different times, and one gains more than the rest."""
    adaptive, steps_with, number = Adaptive(Fixed(), 10), set(), 6
    for step in range(400):
        if step % 5 == 0 and step < 5 * number:
            models.entered(adaptive, step // 5, [1, 2])
        running = range(min(step // 5 + 1, number))
        drafts = adaptive.propose(dict.fromkeys(running, 5))
        if drafts and step > 100:
            steps_with.add(step)
        right = {slot: int(slot == 0 and step % 3 == 0 and bool(drafts.get(slot))) for slot in running}
        adaptive.observe(models.fed(**{f"s{slot}": [1] * (count + 1) for slot, count in right.items()}))
    assert len({step % FIRST_PAUSE for step in steps_with}) == 1
    assert len(steps_with) < 40


def test_drafts_right_half_the_time_are_made_for_few_requests_only():
    """One more row costs little with few requests, and nearly a step with many."""
    few, some, many = (sum(drafted(requests)) for requests in (1, 8, 40))
    assert few > some > many
    assert many < 5


def drafted(requests):
    """Return the drafts that each of so many requests has in 100 steps, of which every second one is right."""
    adaptive = Adaptive(Fixed(), 10)
    for slot in range(requests):
        models.entered(adaptive, slot, [1, 2])
    counts = []
    for step in range(300):
        drafts = adaptive.propose(dict.fromkeys(range(requests), 5))
        right = {slot: int((step + slot) % 2 and bool(drafts.get(slot))) for slot in range(requests)}
        adaptive.observe(models.fed(**{f"s{slot}": [1] * (count + 1) for slot, count in right.items()}))
        counts += [sum(map(len, drafts.values())) / requests] * (step >= 200)
    return counts


def test_one_request_of_many_gets_drafts_only_if_the_step_gains():
    """A chance of one half gains less than a step pays for having any drafts."""
    adaptive = Adaptive(Fixed(), 1000)
    for slot in range(8):
        models.entered(adaptive, slot, [1, 2])
    steps_with = 0
    for step in range(400):
        drafts = adaptive.propose(dict.fromkeys(range(8), 5))
        right = {slot: int(slot == 0 and step % 2 and bool(drafts.get(0))) for slot in range(8)}
        adaptive.observe(models.fed(**{f"s{slot}": [1] * (count + 1) for slot, count in right.items()}))
        steps_with += bool(drafts) and step >= 200
    assert steps_with <= 20


def test_drafts_come_back_once_one_is_accepted():
    counts = steps(entered(Fixed()), lambda drafts, step: 0 if step < 100 else drafts)
    assert sum(counts[60:100]) <= 2
    assert counts[-100:] == [5] * 100


def test_a_steady_chance_gives_as_many_drafts_as_are_worth_it():
    counts = steps(entered(Fixed()), lambda _, step: step % 2)  # every second step one is right
    assert set(counts[20:]) <= {1, 2}


def test_a_proposer_is_not_asked_for_slots_without_room():
    adaptive = entered(inner := Fixed())
    assert adaptive.propose({0: 0}) == {}
    assert inner.asked == [{}]


@given(st.floats(0, 1), st.integers(0, 8), st.floats(0, 1))
def test_a_draft_is_worthwhile_while_its_chance_is_above_its_cost(rate, most, cost):
    count, gain = worthwhile(rate, most, cost)
    chances = [rate**n for n in range(1, most + 1)]
    assert count == sum(chance > cost for chance in chances)
    assert gain == pytest.approx(sum(chance - cost for chance in chances[:count]))


def test_a_row_costs_more_the_more_requests_there_are():
    costs = [row_cost(requests, 10) for requests in (1, 8, 32, 1000)]
    assert costs == sorted(costs)
    assert costs[0] < 0.1
    assert costs[-1] < 1


def test_a_proposer_whose_drafts_cost_time_is_asked_for_fewer():
    free, costly = Fixed(), Fixed()
    costly.draft_cost = 0.4
    few, many = (sum(steps(entered(one), lambda drafts, step: step % 3)[50:]) for one in (costly, free))
    assert few < many


def test_a_request_begins_with_what_drafts_of_all_were_worth():
    adaptive = entered(Fixed())
    first = steps(adaptive, lambda *_: 0)
    adaptive.leave(0, finished=True)
    models.entered(adaptive, 0, [1, 2])
    assert sum(steps(adaptive, lambda *_: 0)[:20]) < sum(first[:20])


def test_the_same_tokens_give_the_same_drafts_at_any_time(monkeypatch):
    def run():
        adaptive = Adaptive(NGram(models.SETUP), 10)
        models.entered(adaptive, 0, [1, 2, 3, 1, 2])
        return models.decode(adaptive, 0, [1, 2, 3, 1, 2] + [3, 1, 2, 9, 7] * 40, 5)

    first = run()
    for name in ("time", "monotonic", "perf_counter", "process_time"):
        monkeypatch.setattr(time, name, lambda: pytest.fail("the clock was read"))
    assert run() == first


def test_a_step_that_gave_a_slot_no_token_says_nothing_of_its_drafts():
    drafts = []
    for idle in (0, 4):
        adaptive = entered(Fixed())
        for _ in range(3):
            adaptive.propose({0: 5})
            for _ in range(idle):
                adaptive.observe(Fed([], []))
                adaptive.observe(models.fed(s0=[]))
            adaptive.observe(models.fed(s0=[2]))
        drafts.append(adaptive.propose({0: 5}))
    assert drafts[0] == drafts[1]


def test_what_was_fed_counts_and_not_what_was_proposed():
    """Ranks whose proposals differ in the last bit of the logits request the same number after the same steps."""
    first, other = Fixed(), Fixed()
    other.propose = lambda room: (other.asked.append(dict(room)), {slot: [1] for slot in room if slot % 2})[1]
    ranks = [Adaptive(first, 10), Adaptive(other, 10)]
    for adaptive in ranks:
        for slot in range(2):
            models.entered(adaptive, slot, [1, 2])
    for step in range(60):
        shared, *_ = [adaptive.propose({0: 5, 1: 5}) for adaptive in ranks]
        counts = [len(shared.get(slot, ())) for slot in range(2)]
        given = [np.ones(1 + min(count, step % 3), np.int64) for count in counts]
        for adaptive in ranks:
            adaptive.observe(Fed([0, 1], given, drafted=counts))
    assert first.asked == other.asked
    assert len({tuple(asked.items()) for asked in first.asked}) > 3
