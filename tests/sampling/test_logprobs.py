"""Log-probabilities are those of the raw logits, whatever shapes the draw."""

import numpy as np
import pytest
from hal_engine.sampling import sample
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import share

from . import oracle
from .builders import many, one, pack

logit_lists = st.lists(
    st.one_of(st.integers(-8, 8).map(float), st.floats(-100, 100, width=32)), min_size=1, max_size=30
)


@settings(max_examples=share.of(200), deadline=None)
@given(logit_lists, st.integers(0, 35), st.integers(0, 1000))
def test_the_sampled_token_then_the_best_in_order_with_its_rank(logits, count, seed):
    row = one(temperature=5.0, top_k=3, seed=seed, bad_words=[0], repetition_penalty=3.0, prompt=[1, 2], output=[0])
    got = sample(np.array([logits], np.float32), pack([row]), logprobs=count)
    if got.errors:
        assert len(logits) == 1
        return
    (token,) = got.tokens.tolist()
    order, values = oracle.best_first(logits), oracle.log_softmax(logits)
    shown = [token, *order[:count]]
    missing = count + 1 - len(shown)
    assert got.token_ids.tolist() == [shown + [-1] * missing]
    expected = [values[t] for t in shown] + [0.0] * missing
    np.testing.assert_allclose(got.logprobs[0], expected, rtol=2e-7, atol=1e-9)
    assert got.ranks.tolist() == [order.index(token) + 1]
    assert (got.logprobs.dtype, got.ranks.dtype, got.token_ids.dtype) == (np.float32, np.int32, np.int64)


@pytest.mark.parametrize("vocab", [5, 2048, 20_000])
def test_over_the_vocabulary_they_sum_to_one(vocab):
    logits = (np.random.default_rng(3).standard_normal((4, vocab)) * 5).astype(np.float32)
    got = sample(logits, many(4, temperature=1.0), logprobs=vocab)
    np.testing.assert_allclose(np.exp(got.logprobs[:, 1:].astype(np.float64)).sum(axis=1), 1.0, rtol=1e-6)
    assert (np.sort(got.token_ids[:, 1:], axis=1) == np.arange(vocab)).all()
    assert (np.diff(got.logprobs[:, 1:], axis=1) <= 0).all()


def test_none_asks_for_none_and_zero_for_the_sampled_token_alone():
    logits = np.array([[0.0, 3.0, 3.0]], np.float32)
    got = sample(logits, many(1), logprobs=None)
    assert (got.token_ids, got.logprobs, got.ranks) == (None, None, None)
    got = sample(logits, many(1), logprobs=0)
    assert got.token_ids.tolist() == [[1]]
    assert got.ranks.tolist() == [1]


def test_ranks_of_equal_logits_go_by_id():
    rows = pack([one(), one(bad_words=[1]), one(bad_words=[1, 2])])
    got = sample(np.array([[0, 3, 3, 3]] * 3, np.float32), rows, logprobs=2)
    assert got.ranks.tolist() == [1, 2, 3]
    assert got.token_ids.tolist() == [[1, 1, 2], [2, 1, 2], [3, 1, 2]]
