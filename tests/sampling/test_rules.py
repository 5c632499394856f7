"""The edges of the rules, one by one, by hand; and faults of a row or a call."""

import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_core.slots.fields import STATE_TABLE, StateConfig
from hal_engine.sampling import SamplingRows, sample
from hal_engine.sampling.drawing import Draws, draw

from .builders import many, one, pack


def logits(*rows):
    return np.array(rows, np.float32)


def possible(row, values, draws=2000):
    """Every token that comes up in many draws."""
    rows = pack([one(**{"temperature": 1.0, **row, "seed": 5, "position": i}) for i in range(draws)])
    return sorted(set(sample(np.tile(logits(values), (draws, 1)), rows, logprobs=None).tokens.tolist()))


def test_of_equal_logits_the_lowest_id_wins_and_the_margin_is_zero():
    got = sample(logits([1, 3, 3, 3], [0, -0.0, -1, -1]), many(2), logprobs=None)
    assert (got.tokens.tolist(), got.margins.tolist()) == ([1, 0], [0.0, 0.0])


def test_minus_zero_and_zero_tie_in_top_k_too():
    assert possible({"top_k": 2}, [-0.0, 0.0, 0.0, -1]) == [0, 1]


def test_a_greedy_margin_is_the_gap_of_the_two_best_final_logits():
    rows = pack([one(), one(bad_words=[1]), one(bad_words=[1, 2, 3])])
    got = sample(logits(*[[1, 7, 4.5, -1]] * 3), rows, logprobs=None)
    assert (got.tokens.tolist(), got.margins.tolist()) == ([1, 2, 0], [2.5, 3.5, np.inf])


@pytest.mark.parametrize("row", [{}, {"bad_words": [1]}, {"temperature": 1.0}])
@pytest.mark.parametrize("is_writeable", [True, False])
def test_the_logits_are_as_before(row, is_writeable):
    given = logits([1, 7, np.nan, -1], [1, 7, 4.5, -1], [5, 7, 4.5, -1])
    kept = given.copy()
    given.flags.writeable = is_writeable
    got = sample(given, pack([one(**row)] * 3), logprobs=1)
    np.testing.assert_array_equal(given, kept)
    assert got.tokens[0] == -1


def test_top_p_keeps_the_smallest_set_that_reaches_it_ties_by_lowest_id():
    equal = [0.0, 0.0, 0.0, 0.0]
    assert possible({"top_p": 0.5}, equal) == [0, 1]
    assert possible({"top_p": np.nextafter(np.float32(0.5), np.float32(1))}, equal) == [0, 1, 2]
    assert possible({"top_p": 0.25}, equal) == [0]
    assert possible({"top_p": 1.0}, equal) == [0, 1, 2, 3]


def test_top_p_counts_what_top_k_left():
    """Of four equal tokens top-k leaves two, and half of these is one token."""
    assert possible({"top_p": 0.5, "top_k": 2}, [0.0] * 4) == [0]


def test_min_p_is_relative_to_the_best_token_and_keeps_an_equal_share():
    values = [0.0, np.log(0.5) - 1e-3, 0.0, np.log(0.5) + 1e-3]
    assert possible({"min_p": 0.5}, values) == [0, 2, 3]
    assert possible({"min_p": 1.0}, values) == [0, 2]


def test_temperature_comes_before_truncation():
    """At temperature 4 the second token has 0.44 of the mass; at 1 it would have 0.27."""
    assert possible({"temperature": 4.0, "top_p": 0.6}, [1.0, 0.0]) == [0, 1]
    assert possible({"temperature": 1.0, "top_p": 0.6}, [1.0, 0.0]) == [0]


@pytest.mark.parametrize("shape", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-40}])
def test_what_leaves_one_token_is_greedy(shape):
    values = (np.random.default_rng(1).standard_normal((200, 700)) * 3).astype(np.float32)
    rows = [one(**{"temperature": 0.9, **shape, "seed": i}) for i in range(200)]
    assert sample(values, pack(rows), logprobs=None).tokens.tolist() == values.argmax(axis=1).tolist()


def test_repetition_divides_what_is_positive_and_multiplies_what_is_not():
    """After the penalty of 2: 2 and -4, so token 2 (2.5) is best, then tokens 0 and 1."""
    row = one(repetition_penalty=2.0, prompt=[0, 0], output=[1])
    got = sample(logits([4, -2, 2.5]), pack([row]), logprobs=None)
    assert (got.tokens[0], got.margins[0]) == (2, 0.5)
    last = one(repetition_penalty=2.0, prompt=[0, 0], output=[1], bad_words=[2])
    assert sample(logits([4, -2, 2.5]), pack([last]), logprobs=None).margins[0] == 6.0


def test_frequency_counts_presence_does_not_neither_reads_prompts():
    row = {"prompt": [0, 0, 0], "output": [1, 1, 2]}
    values = logits([1, 10, 10, 8.5])
    frequency = sample(values, pack([one(frequency_penalty=1.0, **row)]), logprobs=None)
    assert (frequency.tokens[0], frequency.margins[0]) == (2, 0.5)  # 1, 8, 9, 8.5
    presence = sample(values, pack([one(presence_penalty=1.0, **row, bad_words=[2, 3])]), logprobs=None)
    assert (presence.tokens[0], presence.margins[0]) == (1, 8.0)  # 1, 9


def test_penalties_that_overflow_stay_finite():
    row = one(repetition_penalty=1e6, frequency_penalty=-1e6, prompt=[0], output=[1, 1], temperature=1.0)
    got = sample(logits([-3e38, 3e38, 0]), pack([row]), logprobs=None)
    assert (got.tokens.tolist(), got.errors) == ([1], {})


def test_a_token_that_the_model_rules_out_stays_out_under_penalties():
    row = one(repetition_penalty=2.0, frequency_penalty=-9.0, prompt=[0], output=[1], bad_words=[2])
    assert sample(logits([-np.inf, -np.inf, 1]), pack([row]), logprobs=None).tokens.tolist() == [-1]


def test_end_and_single_stop_tokens_are_masked_below_min_tokens_alone():
    row = {"eos_token_ids": [3], "stop_sequences": [(2,), (1, 3)], "min_tokens": 4}
    rows = pack([one(position=at, **row) for at in (3, 4)])
    assert sample(logits([0, 1, 2, 3], [0, 1, 2, 3]), rows, logprobs=None).tokens.tolist() == [1, 3]


def test_tokens_outside_the_vocabulary_are_passed_over():
    row = one(bad_words=[2, -1, 99], prompt=[77], output=[2, -1, 4], presence_penalty=2.5)
    got = sample(logits([0, 1, 5, 3]), pack([row]), logprobs=None)
    assert (got.tokens.tolist(), got.margins.tolist()) == ([3], [2.0])


def test_a_row_that_cannot_be_sampled_is_reported_and_the_others_go_on():
    good = [0, 2, 1, 0]
    rows = [one(seed=at, temperature=0.7 * (at % 2)) for at in range(8)]
    rows[3]["bad_words"] = rows[2]["bad_words"] = [0, 1, 2, 3]
    rows[5].update(bad_words=[1], frequency_penalty=1.0, prompt=[], output=[1])
    values = logits(good, good, good, good, [0, np.nan, 1, 2], [0, np.nan, 1, 2], [0, np.inf, 1, 2], [-np.inf] * 4)
    before = values.copy()
    got = sample(values, pack(rows), logprobs=2)
    assert sorted(got.errors) == [2, 3, 4, 5, 6, 7]
    assert got.tokens[2:].tolist() == [-1] * 6
    assert got.tokens[0] == 1
    assert "masked" in got.errors[3]
    assert "nan of token 1" in got.errors[5]
    assert "inf of token 1" in got.errors[6]
    assert "all its logits are -inf" in got.errors[7]
    assert got.token_ids[2:].tolist() == [[-1] * 3] * 6
    assert not got.logprobs[2:].any()
    assert not got.ranks[2:].any()
    assert not got.margins[2:].any()
    alone = sample(values[:2], pack(rows[:2]), logprobs=2)
    for name in ("tokens", "token_ids", "logprobs", "ranks", "margins"):
        assert getattr(got, name)[:2].tobytes() == getattr(alone, name).tobytes()
    assert before.tobytes() == values.tobytes()


def test_no_rows_and_one_token():
    assert sample(np.zeros((0, 5), np.float32), pack([]), logprobs=1).token_ids.shape == (0, 2)
    rows = pack([one(), one(temperature=1.0), one(temperature=1.0, top_p=0.5, top_k=3)])
    assert sample(np.zeros((3, 1), np.float32), rows, logprobs=None).tokens.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("values", "rows", "count", "named"),
    [
        (np.zeros((2, 4), np.float64), [one()] * 2, None, "logits: float64"),
        (np.zeros((3, 4), np.float32), [one()] * 2, None, "logits: float32 \\[3, 4\\] for 2 rows"),
        (np.zeros((1, 0), np.float32), [one()], None, "logits"),
        (np.zeros((1, 4), np.float32), [one()], -1, "logprobs"),
        (np.zeros((1, 4), np.float32), [one(presence_penalty=1.0, output=[1])], None, "rows.prompt: row 0 has a pen"),
        (np.zeros((1, 4), np.float32), [one(repetition_penalty=2.0, prompt=[1])], None, "rows.output: row 0"),
    ],
)
def test_what_the_caller_got_wrong_is_raised(values, rows, count, named):
    with pytest.raises(InvalidValue, match=named):
        sample(values, pack(rows), logprobs=count)


@pytest.mark.parametrize("name", ["seed", "bad_words", "prompt"])
def test_columns_of_another_length_are_refused(name):
    rows = pack([one(), one()])
    columns = {field: getattr(rows, field) for field in SamplingRows.__slots__}
    columns[name] = columns[name][:1]
    with pytest.raises(InvalidValue, match=f"rows.{name}: shape .* 2 rows"):
        SamplingRows(**columns)


def test_rows_are_taken_from_the_fields_of_a_slot_state():
    sizes = StateConfig(num_slots=3, max_model_len=32)
    fields = {f.name: np.full((3, sizes.width(f.width)), f.reset, f.dtype.storage) for f in STATE_TABLE}
    fields["step_idx"][:, 0], fields["min_dec_len"][:, 0] = [0, 4, 5], 5
    fields["eos_token_ids"][:, 0], fields["eos_num"][:] = 3, 1
    fields["stop_seqs"][1, 16], fields["stop_seqs_len"][1, 1], fields["stop_seqs_num"][1] = 2, 1, 2
    rows = SamplingRows.from_state(fields, prompt=None, output=None)
    assert sample(logits(*[[0, 1, 2, 3]] * 3), rows, logprobs=None).tokens.tolist() == [2, 1, 3]


def test_a_draw_at_either_end_stays_inside():
    """u = 0 takes the first token with weight, the largest u the last one; never one that was cut off."""
    count, unit = 2, np.ones(2, np.float32)
    values = logits(*[[-np.inf] * 70 + [0, 1, 0, -np.inf] * 40 + [-np.inf] * 70] * count)
    for top_p, look in ((1.0, "all"), (0.99, "best")):
        draws = Draws(
            values, unit, unit, np.zeros(2, np.int32), unit * np.float32(top_p), unit * 0, np.array([0.0, 1 - 2**-53])
        )
        drawn, margins = draw(draws)
        assert values[0, drawn].min() > -np.inf, look
        assert drawn[0] in (70, 71)
        assert drawn[1] in (70 + 157, 70 + 158)
        assert (margins >= 0).all()
