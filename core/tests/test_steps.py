"""The value objects of a step, and the prediction of the next launch."""

from __future__ import annotations

import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_core.steps import Step, predict_launch_tokens
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(0, 6)), st.integers(1, 7))
def test_the_next_launch_feeds_one_token_and_all_drafts_a_request(accepted, tokens_per_step):
    """What was accepted in the step before plays no part: counted request by request, the sum is the same."""
    fed = sum(1 + (tokens_per_step - 1) for _ in accepted)
    assert predict_launch_tokens(len(accepted), tokens_per_step) == fed


@pytest.mark.parametrize(("requests", "tokens"), [(-1, 1), (1, 0)])
def test_a_prediction_refuses_counts_that_cannot_be(requests, tokens):
    with pytest.raises(InvalidValue, match="tokens a step"):
        predict_launch_tokens(requests, tokens)


def test_a_step_keeps_its_own_order():
    order = np.array([2, 0])
    step = Step(0, {"target": order})
    order[0] = 1
    assert step.order("target").tolist() == [2, 0]
    with pytest.raises(ValueError, match="read-only"):
        step.order("target")[0] = 1


def test_g20_an_order_that_names_a_slot_twice_or_is_missing_is_refused():
    with pytest.raises(InvalidValue, match="each slot once"):
        Step(0, {"target": np.array([1, 1])})
    with pytest.raises(InvalidValue, match="names no order for state 'draft'"):
        Step(0, {"target": np.array([1])}).order("draft")
