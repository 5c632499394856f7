"""Proposers of many slots: each sees only its own request, whatever the slot held before, for any number of them."""

import numpy as np
import pytest
from hal_core import InvalidValue
from hal_engine.proposers import Fed, Setup, make_proposer
from hal_engine.proposers.ngram import NGram
from hal_engine.proposers.suffix import Suffix
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests import share

from . import models

NAMES = ("naive", "ngram", "suffix", "ngram+suffix")
lists = st.lists(st.integers(0, 4), max_size=6)


class Slots(RuleBasedStateMachine):
    """Requests enter and leave slots. Each proposer is compared with a fresh one for each call; n-gram and suffix there
    receive only the slot's request, and shared outputs are counted by hand.
    """

    def __init__(self):
        super().__init__()
        self.known = {}

    @initialize()
    def make(self):
        self.ngram, self.suffix = NGram(models.SETUP), Suffix(models.SETUP, shared_tokens=0)

    def both(self):
        return (self.ngram, self.suffix)

    @precondition(lambda self: len(self.known) < 4)
    @rule(data=st.data(), prompt=st.lists(st.integers(0, 4), min_size=1, max_size=9), output=lists)
    def enter(self, data, prompt, output):
        slot = data.draw(st.sampled_from([slot for slot in range(4) if slot not in self.known]))
        for proposer in self.both():
            models.entered(proposer, slot, prompt, output)
        self.known[slot] = [*prompt, *output]

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def observe(self, data):
        slots = data.draw(st.lists(st.sampled_from(sorted(self.known)), unique=True))
        accepted = [data.draw(lists) for _ in slots]
        fed = Fed(slots, [np.array(tokens, np.int64) for tokens in accepted])
        for proposer in self.both():
            proposer.observe(fed)
        for slot, tokens in zip(slots, accepted, strict=True):
            self.known[slot] += tokens

    @precondition(lambda self: self.known)
    @rule(data=st.data(), finished=st.booleans())
    def leave(self, data, finished):
        slot = data.draw(st.sampled_from(sorted(self.known)))
        for proposer in self.both():
            proposer.leave(slot, finished=finished)
        del self.known[slot]

    @invariant()
    def drafts_are_those_of_the_request_alone(self):
        room = dict.fromkeys(self.known, 5)
        for proposer in self.both():
            drafts = proposer.propose(room)
            assert drafts.keys() <= self.known.keys()
            for slot, known in self.known.items():
                fresh = type(proposer)(models.SETUP)
                models.entered(fresh, 0, known)
                assert drafts.get(slot, []) == fresh.propose({0: 5}).get(0, [])
                assert proposer.tokens(slot).tolist() == known


Slots.TestCase.settings = settings(max_examples=share.of(60), stateful_step_count=25, deadline=None)
TestSlots = Slots.TestCase


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_a_slot_that_nobody_left_cannot_be_entered(name):
    proposer = make_proposer(name, models.SETUP)
    models.entered(proposer, 0, [1, 2])
    with pytest.raises(InvalidValue, match="slot 0 still has the tokens of another request") as caught:
        models.entered(proposer, 0, [3])
    assert "call leave" in caught.value.cure


@pytest.mark.parametrize("name", NAMES)
def test_leaving_a_slot_that_holds_nothing_and_closing_twice_are_nothing(name):
    proposer = make_proposer(name, models.SETUP)
    proposer.leave(3, finished=True)
    proposer.close()
    proposer.close()


@pytest.mark.parametrize("name", NAMES)
def test_what_a_request_enters_with_may_be_changed_afterwards(name):
    proposer, twin = make_proposer(name, models.SETUP), make_proposer(name, models.SETUP)
    tokens = np.array([1, 2, 3, 1, 2, 3], np.int64)
    proposer.enter(0, models.request([1]), tokens)
    twin.enter(0, models.request([1]), tokens.copy())
    tokens[:] = 9
    assert proposer.propose({0: 5}) == twin.propose({0: 5})


@pytest.mark.drawn
@pytest.mark.parametrize("name", NAMES)
def test_hundreds_of_slots_and_thousands_of_requests(name):
    slots, requests, rng = 512, share.of(3000, 1100), np.random.default_rng(5)
    proposer = make_proposer(name, Setup(5, slots, 8192, 1000, step_rows=10**6))
    periods = [rng.integers(0, 1000, 12).tolist() for _ in range(40)]
    waiting = [(periods[at % 40] * 4)[: 20 + at % 7] for at in range(requests)]
    running, given, fed_rows = {}, 0, 0
    while waiting or running:
        for slot in range(slots):
            if slot not in running and waiting:
                text = waiting.pop()
                running[slot] = (text, 13)
                admitted = models.request(text[:1])
                proposer.enter(slot, admitted, np.array(text[:13], np.int64))
        room = {slot: min(5, len(text) - known - 1) for slot, (text, known) in running.items()}
        drafts = proposer.propose(room)
        accepted = {}
        for slot, (text, known) in running.items():
            guess = drafts.get(slot, [])
            assert len(guess) <= room[slot]
            right = next((i for i, token in enumerate(guess) if token != text[known + i]), len(guess))
            accepted[slot] = np.array(text[known : known + right + 1], np.int64)
            running[slot] = (text, known + right + 1)
            fed_rows, given = fed_rows + 1, given + right + 1
        proposer.observe(Fed(list(accepted), list(accepted.values())))
        for slot in [slot for slot, (text, known) in running.items() if known == len(text)]:
            proposer.leave(slot, finished=True)
            del running[slot]
    assert given == sum(20 + at % 7 - 13 for at in range(requests))
    assert name == "naive" or given > 3 * fed_rows
    proposer.close()
