"""The value objects of a step, and the prediction of the next launch."""

import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_core.slots.step import Step, predict_launch_tokens
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(0, 6)), st.integers(1, 7))
def test_the_next_launch_feeds_one_token_and_all_drafts_a_request(accepted, tokens_per_step):
    """The number accepted in the step before does not matter: counted request by request, the sum is the same."""
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


@pytest.mark.parametrize("which", ["errors", "recovered"])
@pytest.mark.parametrize("given", [{9: "boom"}, {1: None}, {"1": "boom"}, {True: "boom"}, ["boom"], "boom", {1.0: "b"}])
def test_a_message_that_would_be_lost_is_refused(which, given):
    with pytest.raises(InvalidValue) as raised:
        Step(0, {"target": [0, 1]}, **{which: given})
    assert raised.value.argument == "step"
    assert which in raised.value.what
    assert raised.value.cure


def test_a_message_may_be_of_a_slot_in_any_order():
    step = Step(0, {"target": [1], "draft": [9]}, errors={9: "boom"}, recovered={np.int32(1): "again"})
    assert (dict(step.errors), dict(step.recovered)) == ({9: "boom"}, {1: "again"})


@pytest.mark.parametrize("number", [-1, 2**63, True, 1.0, "1", None, np.int64(1)])
def test_a_step_number_that_no_frame_can_carry_is_refused(number):
    with pytest.raises(InvalidValue, match="step number") as raised:
        Step(number, {"target": [0]})
    assert raised.value.argument == "step"
    assert raised.value.cure


@pytest.mark.parametrize(
    "order",
    [
        *([1.7], np.array([1.7]), ["a"], "ab", b"ab", [None], [True], [True, 1], np.array([True])),
        *([2**31], [-(2**31) - 1], np.array([2**40]), [2**80]),
        *([[1], [2, 3]], [[1, 2]], 1, None, {1, 2}, {1: 2}),
    ],
)
def test_an_order_is_never_cut_rounded_or_refused_rawly(order):
    with pytest.raises(InvalidValue, match="the order of state 'target'") as raised:
        Step(0, {"target": order})
    assert raised.value.argument == "step"
    assert raised.value.cure


@pytest.mark.parametrize("orders", [[1, 2], None, np.array([1]), {1: [1]}])
def test_orders_that_name_no_states_are_refused(orders):
    with pytest.raises(InvalidValue, match="orders") as raised:
        Step(0, orders)
    assert raised.value.argument == "step"


@pytest.mark.parametrize("other", [{"group": None}, {"group": (0, 1)}, {"logprobs": 1.5}, {"logprobs": True}])
def test_what_else_a_step_is_given_is_checked_once(other):
    with pytest.raises(InvalidValue, match=next(iter(other))):
        Step(0, {"target": [1]}, **other)


@pytest.mark.parametrize("order", [[], (), np.zeros(0), range(3), (np.int64(2), 0), np.array([3, 1], np.uint64)])
def test_any_list_of_whole_numbers_is_an_order(order):
    found = Step(0, {"target": order}).order("target")
    assert found.dtype == np.int32
    assert found.tolist() == [int(slot) for slot in order]
