"""n-gram proposals are those of a model of a few lines, at any length and in any order of events."""

import numpy as np
import pytest
from hal_engine.proposers.ngram import LONGEST, NGram, NGrams
from hypothesis import example, given
from hypothesis import strategies as st

from . import models

few = st.integers(0, 2)
tokens = st.one_of(few, st.sampled_from([0, 1, 2**31 - 2, 2**31 - 1]), st.integers(0, 2**31 - 1))
lists = st.lists(tokens, max_size=6)


def guessed(first, appended, drafts, most):
    text = NGrams(np.array(first, np.int64))
    for part in appended:
        text.append(part)
    guess = text.guess(drafts, most)
    assert text.tokens().tolist() == [*first, *(token for part in appended for token in part)]
    return guess.drafts, guess.matched


@given(st.lists(tokens, min_size=1, max_size=12), st.lists(lists, max_size=4), lists, st.integers(1, 8))
@example([5], [], [], 5)
@example([5], [[5]], [], 5)
def test_drafts_follow_the_last_place_of_the_longest_ngram(first, appended, drafts, most):
    known = [*first, *(token for part in appended for token in part)]
    assert guessed(first, appended, drafts, most) == models.ngram(known, drafts, most)


@pytest.mark.parametrize("length", range(1, LONGEST + 3))
@pytest.mark.parametrize("entered", range(1, LONGEST + 3))
def test_every_text_of_two_tokens_at_lengths_around_n(length, entered):
    for number in range(2**length):
        text = [number >> bit & 1 for bit in range(length)]
        first, rest = text[:entered], text[entered:]
        assert guessed(first, [rest], [], 5) == models.ngram(text, [], 5)


def test_a_request_without_anything_known_has_no_drafts():
    text = NGrams(np.zeros(0, np.int64))
    assert text.guess((), 3).drafts == []
    text.append([4, 4])
    assert text.guess((), 3).drafts == [4, 4, 4]


def test_a_text_with_a_period_is_continued_beyond_its_end():
    proposer = NGram(models.SETUP)
    models.entered(proposer, 0, [9, 1, 2, 3, 1, 2, 3])
    assert proposer.propose({0: 5}) == {0: [1, 2, 3, 1, 2]}


def test_the_border_of_prompt_and_output_is_none():
    proposer = NGram(models.SETUP)
    models.entered(proposer, 0, [1, 2], output=[3, 4, 9])
    proposer.observe(models.fed(s0=[2, 3]))
    assert proposer.propose({0: 3}) == {0: [4, 9, 2]}


def test_no_more_drafts_than_there_is_room():
    proposer = NGram(models.SETUP)
    for slot in range(4):
        models.entered(proposer, slot, [7] * 9)
    assert proposer.propose({0: 0, 1: 1, 2: 4}) == {1: [7], 2: [7] * 4}
