"""Ranks of a group: tokens and log-probabilities of one rank, its errors, its collectives, its proposers."""

import numpy as np
import pytest
from hal_core import FinishReason
from hal_engine.distributed.errors import RankLost

from tests.distributed.rank_work import broadcasts, closed

from .rows import TOLERANCE, Delivered, Pooled, Row, alone, engine_of, reference, requests, run


def test_the_tokens_are_those_of_one_rank_where_every_rank_samples(worlds):
    """And after each step the states of a group's ranks are equal. Where the first one samples, tests/matrix crosses
    what there is."""
    delivered, answers = run(Row(tp=2, speculate="mtp", everywhere=True), worlds.of(2))
    assert dict(delivered.tokens) == dict(reference().tokens)
    for request, values in reference().logprobs.items():
        np.testing.assert_allclose(delivered.logprobs[request], values, atol=TOLERANCE, rtol=0)
    assert set(answers.values()) == {None}
    assert delivered.drafts[0] > 0


def test_a_token_outside_the_vocabulary_is_its_requests_error(worlds):
    """The first rank's record reports it; every rank stops the slot, and the states stay equal."""
    delivered, pooled = Delivered(), Pooled(worlds.of(2), ("astray", 4, 0, 1 << 40))
    engine = engine_of(Row(tp=2), lambda: pooled, delivered)
    for request in requests():
        engine.submit(request)
    try:
        ended = {one.request_id: one for one in engine.run()}
    finally:
        engine.stop()
    assert set(pooled.answers.values()) == {None}
    (failed,) = [one for one in ended.values() if one.reason is FinishReason.ERROR]
    assert failed.message.startswith(f"the step gave token {1 << 40}, outside the vocabulary of ")
    undisturbed = dict(reference().tokens)
    assert 0 < len(failed.token_ids) < len(undisturbed[failed.request_id])
    assert list(failed.token_ids) == undisturbed[failed.request_id][: len(failed.token_ids)]
    for name, one in ended.items():
        assert one is failed or list(one.token_ids) == undisturbed[name]


@pytest.mark.parametrize(
    ("speculate", "everywhere"),
    [("mtp", False), *(pytest.param(*row, marks=pytest.mark.conform) for row in (("ngram", False), ("mtp", True)))],
)
def test_rejection_gives_the_tokens_of_one_rank(worlds, speculate, everywhere):
    """The first rank accepts and samples; the broadcast makes the other ranks agree."""
    row = Row(tp=2, speculate=speculate, everywhere=everywhere, rejection=True)
    delivered, answers = run(row, worlds.of(2))
    expected = alone(row)
    assert dict(delivered.tokens) == dict(expected.tokens)
    assert dict(delivered.tokens) != dict(reference().tokens), "nothing was drawn another way than by comparing"
    assert set(answers.values()) == {None}
    assert delivered.drafts[1]


@pytest.mark.parametrize(("speculate", "collectives"), [("none", 1), ("ngram", 2)])
def test_a_step_has_one_collective_for_its_tokens_and_one_for_its_drafts(worlds, speculate, collectives):
    """Each of one size, whatever was accepted or drafted."""
    delivered, pooled = Delivered(), Pooled(worlds.of(2), ("broadcasting",))
    engine = engine_of(Row(tp=2, speculate=speculate, check=False), lambda: pooled, delivered)
    engine.submit(requests()[0])
    for _ in engine.run():
        pass
    engine.stop()
    for nbytes in worlds.of(2).run(broadcasts).values():
        assert nbytes == nbytes[:collectives] * engine.steps


def test_each_rank_closes_its_proposer(worlds):
    """MTP runs on every rank; n-gram is closed at once on all ranks but the first, as only the first one's drafts are
    fed.
    """
    for speculate in ("mtp", "ngram"):
        run(Row(tp=2, speculate=speculate), worlds.of(2), how=("closing",), chosen=requests()[:1])
        assert worlds.of(2).run(closed) == {0: [1], 1: [1]}, speculate


@pytest.mark.parametrize("everywhere", [pytest.param(False, marks=pytest.mark.conform), True])
def test_without_the_broadcast_it_fails(worlds, everywhere):
    """Only the first rank knows the tokens at first, and the tokens that every rank draws for itself differ."""
    row = Row(tp=2, everywhere=everywhere, check=False, timeout=1.0)
    try:
        delivered, _ = run(row, worlds.of(2), how=("no broadcast",))
    except RankLost:
        return
    assert dict(delivered.tokens) != dict(reference().tokens)


@pytest.mark.parametrize("everywhere", [pytest.param(False, marks=pytest.mark.conform), True])
def test_the_check_names_the_field_in_which_ranks_differ(worlds, everywhere):
    row = Row(tp=2, everywhere=everywhere, timeout=3.0)
    with pytest.raises(RankLost, match=r"first in field .sampled_token_ids. of slot \d: rank.s. .1. from rank 0"):
        run(row, worlds.of(2), how=("no broadcast",))
