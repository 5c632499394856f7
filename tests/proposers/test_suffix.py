"""Suffix proposals are those of a brute-force search; outputs are kept up to a number of tokens, oldest out first."""

import numpy as np
import pytest
from hal_engine.proposers.contexts import DEPTH, LEAST_SHARE, MOST_PLACES, REACH
from hal_engine.proposers.suffix import LONG_MATCH, OwnText, Shared, Suffix
from hypothesis import assume, given
from hypothesis import strategies as st

from . import models

RULES = {"depth": DEPTH, "reach": REACH, "least_share": LEAST_SHARE}
FEW = MOST_PLACES // 2
"""Up to so many places all are counted; of more, a sample."""
tokens = st.one_of(st.integers(0, 2), st.sampled_from([254, 255, 256, 65535, 2**31 - 1]), st.integers(0, 2**31 - 1))
lists = st.lists(tokens, max_size=6)


@st.composite
def texts(draw, most=60):
    """Tokens that repeat earlier stretches of themselves."""
    text = draw(st.lists(tokens, min_size=1, max_size=12))
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.integers(0, len(text) - 1))
        text = text + text[begin : begin + draw(st.integers(1, 30))] + draw(lists)
    return text[:most]


def own_text(first, appended=()):
    text = OwnText(np.array(first, np.int64))
    for part in appended:
        text.append(part)
    return text


@given(texts(), st.lists(texts(most=20), max_size=3), lists, st.integers(1, 8))
def test_a_request_goes_on_as_most_places_of_its_longest_end_did(first, appended, drafts, most):
    known = [*first, *(token for part in appended for token in part)]
    *expected, score, places = models.own(known, drafts, most, **RULES)
    assume(places <= FEW)
    text = own_text(first, appended)
    found = text.guess(drafts, most)
    assert [found.drafts, found.matched] == expected
    assert found.score == pytest.approx(score)  # added up in another order
    assert text.tokens().tolist() == known


def test_of_many_places_a_sample_is_asked_and_its_drafts_are_among_theirs():
    rng = np.random.default_rng(3)
    text = own_text([*rng.integers(0, 3, 400).tolist(), 1])
    known = text.tokens().tolist()
    guess = text.guess((), 3)
    at = [
        end for end in range(guess.matched, len(known)) if known[end - guess.matched : end] == known[-guess.matched :]
    ]
    assert guess.drafts in [known[end : end + len(guess.drafts)] for end in at]
    assert own_text([0] * 500).guess((), 5) == (([0] * 5), DEPTH, 5.0)


def test_a_text_grows_without_bound_of_its_first_size():
    rng = np.random.default_rng(0)
    known = rng.integers(0, 2**31, 40).tolist()
    text = own_text(known)
    for _ in range(300):
        more = rng.integers(0, 2**31, 7).tolist()
        text.append(more)
        known += more
    assert text.tokens().tolist() == known
    text.append(known[100:130])
    assert text.guess((), 5).drafts == known[130:135]


def kept(outputs, most):
    """Return the expected outputs: of each the end that fits, the latest that fit together."""
    held = [output[-(most - DEPTH) :] for output in outputs if len(output) > 1] if most > DEPTH + 1 else []
    while sum(len(output) + DEPTH for output in held) > most:
        held.pop(0)
    return held


@given(st.lists(texts(), max_size=8), texts(), st.integers(DEPTH + 2, 300), st.integers(1, 8))
def test_shared_outputs_are_bounded_in_tokens_and_say_what_most_of_them_do(outputs, context, most, room):
    shared = Shared(most)
    for output in outputs:
        shared.enter(np.array(output, np.int64))
        assert shared.tokens <= most
    held = kept(outputs, most)
    assert len(shared) == len(held)
    assert shared.tokens == sum(len(output) + DEPTH for output in held)
    *expected, score, places = models.shared(held, context, room, **RULES)
    assume(places <= FEW)
    found = shared.guess(own_text(context).context(()), room)
    assert [found.drafts, found.matched] == expected
    assert found.score == pytest.approx(score)


def test_removed_outputs_are_never_proposed_when_room_is_reused():
    rng, shared = np.random.default_rng(1), Shared(600)
    outputs = []
    for number in range(400):
        outputs.append((1000 * number + rng.integers(0, 1000, rng.integers(2, 200))).tolist())
        shared.enter(np.array(outputs[-1], np.int64))
        held = kept(outputs, 600)
        assert (len(shared), shared.tokens) == (len(held), sum(len(output) + DEPTH for output in held))
        for output in outputs[-8:]:
            if len(output) > 4:
                guess = shared.guess(own_text(output[:3]).context(()), 5)
                assert bool(guess.drafts) == (output in held), number


@pytest.mark.parametrize("most", [0, 1, DEPTH, DEPTH + 1])
def test_a_bound_that_nothing_fits_in_keeps_nothing(most):
    shared = Shared(most)
    shared.enter(np.arange(50))
    assert (len(shared), shared.tokens) == (0, 0)


def test_a_finished_request_helps_others_a_preempted_one_does_not():
    proposer = Suffix(models.SETUP)
    output = list(range(100, 140))
    for finished, expected in ((False, []), (True, [106, 107, 108])):
        models.entered(proposer, 0, [1, 2, 3])
        proposer.observe(models.fed(s0=output))
        proposer.leave(0, finished=finished)
        models.entered(proposer, 1, [8, 9, 104, 105])
        assert proposer.propose({1: 3}).get(1, []) == expected
        proposer.leave(1, finished=False)


def test_prompts_are_shared_with_nobody():
    proposer = Suffix(models.SETUP)
    models.entered(proposer, 0, [50, 51, 52, 53], output=[7])
    proposer.observe(models.fed(s0=[8, 9]))
    proposer.leave(0, finished=True)
    models.entered(proposer, 0, [50, 51])
    assert proposer.propose({0: 5}) == {}
    models.entered(proposer, 1, [7, 8])
    assert proposer.propose({1: 5}) == {1: [9]}


def test_the_longer_match_speaks_and_a_long_one_of_its_own_asks_nobody(monkeypatch):
    proposer = Suffix(models.SETUP)
    proposer.shared.enter(np.array([1, 2, 3, 4, 5, 6]))
    models.entered(proposer, 0, [3, 9, 2, 3])
    assert proposer.propose({0: 2}) == {0: [4, 5]}
    models.entered(proposer, 1, [1, 2, 3, 9, 1, 2, 3])
    assert proposer.propose({1: 2}) == {1: [9, 1]}
    long = list(range(200, 200 + LONG_MATCH))
    models.entered(proposer, 2, [*long, 77, *long])
    monkeypatch.setattr(Shared, "guess", lambda *_: pytest.fail("the shared outputs were asked"))
    assert proposer.propose({2: 1}) == {2: [77]}
