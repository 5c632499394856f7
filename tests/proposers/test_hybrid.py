"""Two proposers as one: the second if it matches and was accepted lately, else the first with the second after it."""

import numpy as np
from hal_engine.proposers import Drawn
from hal_engine.proposers.hybrid import Hybrid
from hal_engine.proposers.naive import Naive
from hal_engine.proposers.ngram import NGram
from hal_engine.proposers.suffix import Suffix

from . import models


class Says(Naive):
    """Drafts ``tokens``, as many as there is room for; ``asked`` records the room that it received."""

    def __init__(self, tokens):
        self.tokens, self.asked = tokens, []

    def propose(self, room):
        self.asked.append(dict(room))
        return {slot: self.tokens[:most] for slot, most in room.items() if most}


def hybrid(tokens, first_most=3):
    return Hybrid(Says(tokens), NGram(models.SETUP), first_most)


def test_a_long_match_is_taken_and_the_first_not_asked():
    proposer = hybrid([90, 91, 92])
    models.entered(proposer, 0, [1, 2, 3, 4, 5, 1, 2, 3])
    assert proposer.propose({0: 4}) == {0: [4, 5, 1, 2]}
    assert proposer.first.asked == [{}]


def test_without_a_match_the_first_drafts_and_the_second_continues():
    proposer = hybrid([5, 6, 7])
    models.entered(proposer, 0, [5, 6, 7, 8, 9])
    assert proposer.propose({0: 5}) == {0: [5, 6, 7, 8, 9]}
    assert proposer.propose({0: 3}) == {0: [5, 6, 7]}
    assert proposer.first.asked == [{0: 3}, {0: 3}]


def test_what_the_first_drew_its_drafts_from_is_handed_on():
    """Without it, drafts that were drawn count as certain where they are accepted by rejection, and fewer are."""
    drawn = [np.array([1, 3]), np.array([2, 2]), np.array([4, 0])]
    proposer = hybrid([])
    proposer.first.propose = lambda room: {slot: Drawn([5, 6, 7], drawn) for slot in room}
    models.entered(proposer, 0, [5, 6, 7, 8, 9])
    models.entered(proposer, 1, [4])
    found = proposer.propose({0: 5, 1: 5})
    assert found == {0: [5, 6, 7, 8, 9], 1: [5, 6, 7]}
    assert [tokens.weights for tokens in found.values()] == [drawn, drawn]


def test_no_slot_has_more_drafts_than_room():
    proposer = hybrid([1, 1, 1])
    models.entered(proposer, 0, [1] * 9)
    models.entered(proposer, 1, [2, 3])
    for most in range(6):
        drafts = proposer.propose({0: most, 1: most})
        assert len(drafts.get(0, [])) == most
        assert len(drafts.get(1, [])) <= most


def test_a_second_with_rejected_drafts_pauses_and_returns():
    proposer = hybrid([90], first_most=1)
    text = [1, 2, 3, 4] * 3
    models.entered(proposer, 0, text)
    for token in (50, 51, 52, 53):
        # the continuation of 1 2 3 is always new: the second would be wrong each time
        proposer.observe(models.fed(s0=[token]))
        proposer.observe(models.fed(s0=[1, 2, 3]))
        said = proposer.propose({0: 2})
    assert said == {0: [90]}
    for _ in range(12):
        proposer.observe(models.fed(s0=[4]))
        proposer.observe(models.fed(s0=[1, 2, 3]))
        said = proposer.propose({0: 2})
    assert said == {0: [4, 1]}


def test_it_runs_on_hidden_states_where_one_of_its_proposers_does():
    wants = Says([])
    wants.wants_hidden = True
    assert Hybrid(wants, NGram(models.SETUP), 1).wants_hidden
    assert not hybrid([]).wants_hidden


def test_suffix_may_be_the_second_too():
    proposer = Hybrid(Says([90]), Suffix(models.SETUP), 1)
    models.entered(proposer, 0, [1, 2, 3, 4, 5, 1, 2, 3])
    assert proposer.propose({0: 3}) == {0: [4, 5, 1]}
