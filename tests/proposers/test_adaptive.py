"""How many drafts a request has follows what was accepted, and nothing else."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.proposers import Fed
from hal.proposers.adaptive import LONGEST_PAUSE, WORTH, Acceptance, Adaptive
from hal.proposers.naive import Naive
from hal.proposers.ngram import NGram

from . import models


class Fixed(Naive):
    """Drafts as many tokens as it may; ``asked`` has the room that it was given."""

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
    adaptive = Adaptive(proposer)
    models.entered(adaptive, 0, [1, 2])
    return adaptive


def test_right_drafts_are_made_as_many_as_there_is_room():
    assert steps(entered(Fixed()), lambda drafts, _: drafts)[2:] == [5] * 298


def test_wrong_drafts_end_but_for_a_single_one_ever_less_often():
    counts = steps(entered(Fixed()), lambda *_: 0)
    tried = [step for step, count in enumerate(counts) if count]
    assert sum(counts[20:]) < 10
    assert set(counts[20:]) == {0, 1}
    pauses = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert pauses == sorted(pauses)
    assert pauses[-1] <= LONGEST_PAUSE + 1
    assert max(pauses) >= LONGEST_PAUSE // 2


def test_drafts_come_back_once_one_is_accepted():
    counts = steps(entered(Fixed()), lambda drafts, step: 0 if step < 100 else drafts)
    assert sum(counts[60:100]) <= 2
    assert counts[-100:] == [5] * 100


def test_a_steady_chance_gives_as_many_drafts_as_are_worth_it():
    counts = steps(entered(Fixed()), lambda _, step: step % 2)  # every other step one is right: a chance of a third
    assert set(counts[20:]) <= {1, 2}


def test_a_proposer_is_not_asked_for_slots_without_room():
    adaptive = entered(inner := Fixed())
    assert adaptive.propose({0: 0}) == {}
    assert inner.asked == [{}]


@given(st.floats(0, 1), st.integers(0, 8))
def test_a_draft_is_worthwhile_while_its_chance_is(rate, most):
    acceptance = Acceptance(rate)
    count = acceptance.worthwhile(most)
    assert count == sum(acceptance.rate**n >= WORTH for n in range(1, most + 1))


def test_a_request_begins_with_what_drafts_in_general_were_worth():
    adaptive = entered(Fixed())
    first = steps(adaptive, lambda *_: 0)
    adaptive.leave(0, finished=True)
    models.entered(adaptive, 0, [1, 2])
    assert sum(steps(adaptive, lambda *_: 0)[:20]) < sum(first[:20])


def test_the_same_tokens_give_the_same_drafts_at_any_time(monkeypatch):
    def run():
        adaptive = Adaptive(NGram(models.SETUP))
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
