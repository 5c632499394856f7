"""However the work is cut up over ranks, the tokens and log-probabilities are those of one rank."""

from __future__ import annotations

import numpy as np
import pytest

from hal.distributed.errors import RankLost

from .rows import SCARCE, TOLERANCE, Row, reference, run

ROWS = {
    "tp 2, chunks, scarce": Row(tp=2, chunk=3, blocks=SCARCE),
    "tp 2, ngram, scarce": Row(tp=2, speculate="ngram", blocks=SCARCE),
    "tp 2, mtp, every rank samples": Row(tp=2, speculate="mtp", everywhere=True),
    "tp 2, hybrid, chunks": Row(tp=2, speculate="hybrid", chunk=3),
    "dp 2": Row(dp=2),
    "dp 2, chunks, scarce, in step": Row(dp=2, chunk=3, blocks=SCARCE, dp_sync=True),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_tokens_are_those_of_one_rank(worlds, name):
    """And after each step the states of a group's ranks are equal, which HAL_CHECK_RANKS looks at in every row."""
    row = ROWS[name]
    told, answers = run(row, worlds.of(row.tp * row.dp))
    assert dict(told.tokens) == dict(reference().tokens)
    for request, values in reference().logprobs.items():
        np.testing.assert_allclose(told.logprobs[request], values, atol=TOLERANCE, rtol=0)
    assert set(answers.values()) == {None}
    assert bool(told.preempted) == (row.blocks == SCARCE)
    assert (told.drafts[0] > 0) == (row.speculate != "none")


@pytest.mark.parametrize("everywhere", [pytest.param(False, marks=pytest.mark.conform), True])
def test_without_the_broadcast_it_fails(worlds, everywhere):
    """No rank but the first knows the tokens by itself, and those that every rank draws by itself differ."""
    row = Row(tp=2, everywhere=everywhere, check=False, timeout=1.0)
    try:
        told, _ = run(row, worlds.of(2), how=("no broadcast",))
    except RankLost:
        return
    assert dict(told.tokens) != dict(reference().tokens)


@pytest.mark.parametrize("everywhere", [pytest.param(False, marks=pytest.mark.conform), True])
def test_the_check_names_the_field_in_which_ranks_differ(worlds, everywhere):
    row = Row(tp=2, everywhere=everywhere, timeout=3.0)
    with pytest.raises(RankLost, match=r"first in field .sampled_token_ids. of slot \d: rank.s. .1. from rank 0"):
        run(row, worlds.of(2), how=("no broadcast",))
