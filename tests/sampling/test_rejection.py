"""Acceptance by rejection gives the target's distribution, and its draws depend only on seed and position.

Chi-squared of the emitted tokens against the target's distribution, 200,000 positions of one seed (in ``make test`` a
share of them), a vocabulary of 12, at a level of 1e-8: a total variation of 1.2 % (2.4 %) is found with 99.9 % power
(the noncentrality is at least 4 N TV^2). Each control is a known mistake of a different project, and must fail.
"""

from dataclasses import replace
from functools import cache

import hal_engine.sampling.rejection as rejection
import numpy as np
import pytest
from hal_engine.sampling import draw_drafts, sample, sample_by_rejection
from hal_engine.sampling.philox import ACCEPT, DRAFT, RESIDUAL, TARGET, uniform

from tests import share as part

from .builders import one, pack

pytestmark = pytest.mark.drawn

COUNT, VOCAB = part.of(200_000), 12
CRITICAL = {4: 43.1, 5: 45.8, 6: 48.4, 7: 50.8, 8: 53.2, 9: 55.4, 10: 57.7, 11: 59.8}
"""Of the chi-squared distribution at 1e-8, by degrees of freedom."""
TARGET_LOGITS = np.array([2.0, 1.5, 1.1, 0.4, 0.0, -0.3, 1.9, -1.0, 0.7, -0.2, 0.9, -0.6], np.float32)
DRAFT_LOGITS = np.array([0.3, 2.2, 0.1, 1.4, 0.8, 0.6, -0.5, 0.2, 1.7, -0.1, 0.4, 0.5], np.float32)
SHAPES = {"plain": {"temperature": 1.0}, "cut": {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05}}


@cache
def many(shape):
    """One row for each position."""
    (row,) = (pack([one(seed=7, **SHAPES[shape])]),)
    rows = {
        name: np.repeat(getattr(row, name), COUNT, axis=0) for name in row.__slots__ if name not in ("prompt", "output")
    }
    rows["position"] = np.arange(COUNT)
    return replace(row, **rows, prompt=None, output=None)


def chi_squared(tokens, shares):
    """Return the statistic and its degrees of freedom; impossible tokens must be absent."""
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[shares == 0].any()
    expected = shares[shares > 0] * len(tokens)
    assert expected.min() >= 5
    return float(((counts[shares > 0] - expected) ** 2 / expected).sum()), len(expected) - 1


def target(rows):
    """The distribution that plain decoding draws from, in float64 from its definition."""
    logits = TARGET_LOGITS.astype(np.float64) / float(rows.temperature[0])
    shares = np.exp(logits - logits.max())
    order = np.argsort(-shares, kind="stable")
    if top_k := int(rows.top_k[0]):
        shares[order[top_k:]] = 0
    shares /= shares.sum()
    below = np.cumsum(shares[order])
    shares[order[np.searchsorted(below, float(rows.top_p[0])) + 1 :]] = 0
    shares[shares < float(rows.min_p[0]) * shares.max()] = 0
    return shares / shares.sum()


def emitted(rows, drafts, weights):
    logits = np.repeat(TARGET_LOGITS[None], COUNT, axis=0)
    return sample_by_rejection(logits, rows, drafts, weights, logprobs=None).tokens


@cache
def drawn(shape):
    """Drafts from the other distribution, and their weights."""
    drafts, weights = draw_drafts(np.repeat(DRAFT_LOGITS[None], COUNT, axis=0), many(shape))
    assert (weights == weights[0]).all()
    drafts.flags.writeable = False
    return drafts, (weights[0],) * COUNT


def certain(shape):
    """One draft everywhere, without its distribution."""
    return np.full(COUNT, 2), [None] * COUNT


def untold(shape):
    """Drafts that were drawn, without their distribution."""
    return drawn(shape)[0], [None] * COUNT


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafted", [drawn, certain, untold])
def test_tokens_have_the_targets_distribution(shape, drafted):
    rows = many(shape)
    drafts, weights = drafted(shape)
    tokens = emitted(rows, drafts, weights)
    statistic, freedom = chi_squared(tokens, target(rows))
    assert statistic < CRITICAL[freedom]
    share = float(np.mean(tokens == drafts))
    p, q = target(rows), np.bincount(drafts, minlength=VOCAB) / COUNT
    expected = np.minimum(p, q).sum() if drafted is drawn else (p * q).sum()
    assert abs(share - expected) < 0.006 * (200_000 / COUNT) ** 0.5, "as many are accepted as can be"


def same_noise(first, second):
    """Two streams that are equal."""
    return lambda seed, position, stream=TARGET: uniform(seed, position, first if stream == second else stream)


def test_a_replacement_that_shares_the_drafts_noise_is_found(monkeypatch):
    rows = many("plain")
    drafts, weights = drawn("plain")
    monkeypatch.setattr(rejection, "uniform", same_noise(DRAFT, RESIDUAL))
    statistic, freedom = chi_squared(emitted(rows, drafts, weights), target(rows))
    assert statistic > 2 * CRITICAL[freedom]


def test_an_acceptance_that_shares_the_drafts_noise_is_found(monkeypatch):
    rows = many("plain")
    drafts, weights = drawn("plain")
    monkeypatch.setattr(rejection, "uniform", same_noise(DRAFT, ACCEPT))
    statistic, freedom = chi_squared(emitted(rows, drafts, weights), target(rows))
    assert statistic > 2 * CRITICAL[freedom]


def test_a_certain_draft_that_is_judged_by_a_ratio_is_found():
    rows = many("plain")
    _, weights = drawn("plain")
    statistic, freedom = chi_squared(emitted(rows, np.full(COUNT, 2), weights), target(rows))
    assert statistic > 2 * CRITICAL[freedom]


def test_taking_whatever_is_in_the_best_set_is_found():
    rows = many("plain")
    drafts, weights = drawn("plain")
    best = np.argsort(-TARGET_LOGITS)[:6]
    tokens = np.where(np.isin(drafts, best), drafts, emitted(rows, drafts, weights))
    statistic, freedom = chi_squared(tokens, target(rows))
    assert statistic > 2 * CRITICAL[freedom]


def test_comparing_as_in_plain_decoding_keeps_the_distribution():
    """The control for the test itself, and for rows without a draft."""
    rows = many("cut")
    logits = np.repeat(TARGET_LOGITS[None], COUNT, axis=0)
    plain = sample(logits, rows, logprobs=None).tokens
    statistic, freedom = chi_squared(plain, target(rows))
    assert statistic < CRITICAL[freedom]
    assert (emitted(rows, np.full(COUNT, -1), [None] * COUNT) == plain).all()


def test_rows_that_draw_nothing_are_compared():
    rows = pack([one(), one(temperature=1.0, top_k=1), one()])
    logits = np.repeat(TARGET_LOGITS[None], 3, axis=0)
    got = sample_by_rejection(logits, rows, np.array([0, 3, -1]), [None] * 3, logprobs=2)
    assert got.tokens.tolist() == [0, 0, 0]
    assert got.token_ids[:, 0].tolist() == [0, 0, 0]
    assert got.ranks.tolist() == [1, 1, 1]


def test_log_probabilities_are_those_of_the_token_that_is_given():
    rows = many("plain")
    drafts, weights = drawn("plain")
    logits = np.repeat(TARGET_LOGITS[None], COUNT, axis=0)
    got = sample_by_rejection(logits, rows, drafts, weights, logprobs=0)
    logs = TARGET_LOGITS - np.log(np.exp(TARGET_LOGITS.astype(np.float64)).sum())
    np.testing.assert_allclose(got.logprobs[:, 0], logs[got.tokens], atol=1e-5)
