"""Every rule, drawn at random and in any combination, gives the plain oracle's result."""

import numpy as np
import pytest
from hal_engine.sampling import needs_history, sample
from hal_engine.sampling.philox import uniform
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from tests import share

from . import oracle
from .builders import one, pack

VOCAB = 24
tokens = st.integers(0, VOCAB - 1)
# Quarters, so that ties are common and penalties turn signs.
logit_lists = st.lists(
    st.one_of(st.integers(-24, 24).map(lambda quarters: quarters / 4), st.floats(-20, 20, width=32)),
    min_size=VOCAB,
    max_size=VOCAB,
)


def few(elements, most=4):
    return st.lists(elements, max_size=most).map(tuple)


def single(low, high):
    return st.floats(low, high, width=32)


RULES = {
    "masks": {
        "bad_words": few(tokens),
        "eos_token_ids": few(tokens),
        "stop_sequences": few(st.lists(tokens, min_size=1, max_size=2).map(tuple), 3),
        "min_tokens": st.integers(0, 6),
    },
    "penalties": {
        "repetition_penalty": single(0.5, 3.0),
        "frequency_penalty": single(-2.0, 2.0),
        "presence_penalty": single(-2.0, 2.0),
    },
    "top_k": {"top_k": st.integers(0, VOCAB + 2)},
    "top_p": {"top_p": st.floats(0.03125, 1.0, width=32)},
    "min_p": {"min_p": single(0.0, 1.0)},
}
ALL = {name: strategy for rule in RULES.values() for name, strategy in rule.items()}
BASE = {
    "position": st.integers(0, 8),
    "seed": st.integers(0, 2**63 - 1),
    "prompt": few(tokens, 12),
    "output": few(tokens, 12),
}


def check(logits, row):
    """The token, its margin and what cannot be sampled, against the oracle."""
    got = sample(np.array([logits], np.float32), pack([row]), logprobs=None)
    values = oracle.final_logits(logits, row)
    if max(values) == -np.inf:
        event("everything masked")
        assert list(got.errors) == [0]
        assert got.tokens.tolist() == [-1]
        return
    assert not got.errors
    if row["temperature"] == 0.0 or row["top_k"] == 1:
        token, margin = oracle.greedy(values)
        assert (got.tokens.tolist(), got.margins.tolist()) == ([token], [margin])
        return
    (u,) = uniform(np.array([row["seed"]]), np.array([row["position"]])).tolist()
    probabilities, slack = oracle.distribution(values, row)
    assume(slack > 1e-9)
    token, margin = oracle.drawn(probabilities, u)
    assume(margin > 1e-9)
    event(f"{sum(p > 0 for p in probabilities)} tokens left")
    assert got.tokens.tolist() == [token]
    assert got.margins[0] == pytest.approx(margin, abs=1e-9)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=share.of(150), deadline=None)
@given(data=st.data())
def test_each_rule_alone(rule, data):
    temperature = data.draw(st.sampled_from((0.0, 0.5, 1.0, 3.0)))
    row = data.draw(st.fixed_dictionaries({**BASE, **RULES[rule]}))
    check(data.draw(logit_lists), one(temperature=temperature, **row))


@settings(max_examples=share.of(300), deadline=None)
@given(logit_lists, st.fixed_dictionaries({**BASE, **ALL, "temperature": single(0.0, 4.0)}))
def test_all_rules_together(logits, row):
    check(logits, one(**row))


@settings(max_examples=share.of(40), deadline=None)
@given(st.integers(0, 2**32 - 1), st.fixed_dictionaries({**ALL, "temperature": single(0.25, 50.0)}))
def test_a_vocabulary_of_several_runs_and_looks(number, row):
    """1,000 tokens: nuclei of more than 64 and of more than 512, and a last run that is not full."""
    random = np.random.default_rng(number)
    history = {name: random.integers(0, 1000, 50).tolist() for name in ("prompt", "output")}
    if row["top_k"] > 1:
        row["top_k"] = int(random.integers(2, 1000))
    check((random.standard_normal(1000) * 4).astype(np.float32).tolist(), one(seed=number, **history, **row))


@settings(max_examples=share.of(100), deadline=None)
@given(st.lists(st.fixed_dictionaries(RULES["penalties"]), min_size=1, max_size=5))
def test_history_is_needed_by_rows_with_a_penalty_alone(penalties):
    plain = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    rows = pack([one(**row) for row in [plain, *penalties]])
    needed = needs_history(rows.repetition_penalty, rows.frequency_penalty, rows.presence_penalty)
    assert needed.tolist() == [False, *(row != plain for row in penalties)]
