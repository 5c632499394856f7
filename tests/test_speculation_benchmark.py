"""The benchmark of speculation distinguishes a token chosen by the last bits of a sum from a wrong one."""

from __future__ import annotations

import pytest

from benchmarks.speculation import Run, told_of

PLAIN = Run({"one": (1, 2, 3), "two": (4,)}, {"one": [0.1, 1e-9, 0.2], "two": [0.5]}, 1.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("tokens", "margins"), [((1, 2, 3), []), ((1, 9, 9), [1e-9]), ((2, 2, 3), [0.1]), ((1, 2), [0.2]), ((), [0.1])]
)
def test_the_margin_is_plain_decodings_where_an_answer_parts_from_it(tokens, margins):
    run = Run({"one": tokens, "two": (4,)}, {}, 1.0, 1.0, 1.0, 0.0)
    assert run.partings(PLAIN) == margins


def test_a_wide_margin_is_told_as_wrong():
    assert told_of([[], []], 2) == ""
    assert told_of([[1e-9], []], 2) == "  1 of 4 answers part where the margin is at most 1.0e-09"
    assert told_of([[1e-9, 2e-3]], 2).endswith("2.0e-03: WRONG, as it is 0.001 or more")
