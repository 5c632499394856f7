"""The native part's rows of a usual step: positions, tokens and reasons as bytes, or None for any other step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .stand_in import built

if isinstance(built(), str):
    pytest.skip(built(), allow_module_level=True)
NATIVE = built()[0]
SLOTS, LIMIT = 6, 100
ODD = {
    "counts": (0, 2, -1),
    "serials": (0, 7_000_000_000),
    "drafts": (1, -1),
    "steps": (0, -5, 2**33, -(2**63)),
    "reasons": (1, 2, 3, 4, 255, 256, -1, 2**31 - 1),
    "tokens": (-1, LIMIT, LIMIT - 1, 2**62, -(2**63)),
}
"""Field to values that most steps do not have; some of them are usual all the same."""


def columns(width):
    """The fields of a usual step."""
    ones = np.ones((SLOTS, 1), np.int32)
    serials = np.arange(11, 11 + SLOTS).reshape(-1, 1)
    steps = np.arange(1, 1 + SLOTS).reshape(-1, 1) << 5
    tokens = np.arange(SLOTS * width).reshape(SLOTS, width) % LIMIT
    return {
        "counts": ones,
        "serials": serials,
        "drafts": 0 * ones,
        "steps": steps,
        "reasons": 0 * ones,
        "tokens": tokens,
    }


def usual(fields, order, held):
    """The rows as the native part must give them, read one by one; None if one is not usual."""
    positions, tokens, reasons = [], [], []
    for slot, serial in zip(order.tolist(), held.tolist(), strict=True):
        row = {name: int(values[slot, 0]) for name, values in fields.items()}
        positions.append(row["steps"] - 1)
        tokens.append(row["tokens"])
        reasons.append(row["reasons"])
        one = (row["counts"], row["drafts"], row["serials"]) == (1, 0, serial)
        if not (one and 0 <= positions[-1] < 2**32 and 0 <= tokens[-1] < LIMIT and 0 <= reasons[-1] < 256):
            return None
    return np.array(positions, np.int64).tobytes(), np.array(tokens, np.int64).tobytes(), bytes(reasons)


@given(
    st.integers(1, 3),
    st.permutations(range(SLOTS)).flatmap(lambda slots: st.integers(0, SLOTS).map(lambda n: slots[:n])),
    st.lists(st.tuples(st.sampled_from([*ODD]), st.integers(0, SLOTS - 1), st.integers(0, 7)), max_size=2),
)
def test_rows_are_those_that_are_read_one_by_one(width, order, odd):
    fields, order = columns(width), np.array(order, np.intp)
    held = fields["serials"][order, 0]
    for name, slot, which in odd:
        fields[name][slot, 0] = ODD[name][which % len(ODD[name])]
    found = usual(fields, order, held)
    assert NATIVE.usual_rows(*fields.values(), order, held, LIMIT) == found
    if not odd:
        assert found is not None


@pytest.mark.parametrize("name", ODD)
def test_every_field_is_looked_at(name):
    fields, order = columns(1), np.arange(SLOTS)
    held = fields["serials"][order, 0]
    fields[name][3, 0] = ODD[name][-1]
    assert NATIVE.usual_rows(*fields.values(), order, held, LIMIT) is None


def test_arrays_that_do_not_fit_each_other_are_left_to_the_core():
    fields, order = columns(2), np.arange(SLOTS)
    held = fields["serials"][order, 0]
    assert NATIVE.usual_rows(*fields.values(), order + 1, held, LIMIT) is None
    assert NATIVE.usual_rows(*fields.values(), order, held[:-1], LIMIT) is None
    for name in fields:
        less = fields | {name: fields[name][:-1]}
        assert NATIVE.usual_rows(*less.values(), order, held, LIMIT) is None, name
    with pytest.raises(TypeError, match="9 arguments"):
        NATIVE.usual_rows(*fields.values())
    for other in (fields["tokens"][:, ::2], None):
        assert NATIVE.usual_rows(*(fields | {"steps": other}).values(), order, held, LIMIT) is None
    assert NATIVE.usual_rows(*fields.values(), order, held, -1) is None
