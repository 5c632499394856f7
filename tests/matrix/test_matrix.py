"""Rows of the matrix: the main job gives the tokens of the plain run under any division, proposer and placement.

Here are the eleven most telling rows; ``make conform`` runs those that show every pair of values, ``make matrix`` all.
"""

import pytest
from hal_engine.distributed.errors import RankLost

from tests.matrix import rows, runs

pytestmark = pytest.mark.long(25)

core_library = pytest.importorskip(
    "hal_sim.build", reason="rows on sim and maca need the simulated device (paddle-hal-sim)"
).core_library


@pytest.fixture(scope="module")
def worlds():
    with runs.worlds() as made:
        yield made


@pytest.mark.parametrize("row", rows.in_make_test(), ids=lambda row: row.name)
def test_g13_g25_the_tokens_are_those_of_the_plain_run(worlds, row):
    if row.device in ("sim", "maca"):
        core_library()  # without a compiler this test is skipped here, and not in ranks that other tests share
    if why := runs.missing(row):
        pytest.skip(why)
    runs.check(row, runs.run(row, worlds))


def test_the_rows_show_what_they_should():
    """Every pair of values in the pairwise set, every value in the few of ``make test``, each row once."""
    everything, few = rows.all_rows(), rows.in_make_test()
    assert len(set(everything)) == len(everything) == 1246
    assert len(few) <= rows.IN_MAKE_TEST
    pairs = [set().union(*map(rows.pairs_of, some)) for some in (everything, rows.pairwise())]
    assert pairs[0] == pairs[1]
    elsewhere = {"ray", "maca"}
    for axis, values in rows.AXES.items():
        assert {getattr(row, axis) for row in few} == set(values) - elsewhere


LEFT_OUT = {
    "sampled_token_ids": rows.Row(tp=2, speculate="none", timeout=3.0),
    "accept_tokens": rows.Row(tp=2, speculate="ngram", timeout=3.0),
    "accept_num": rows.Row(tp=2, speculate="ngram", timeout=3.0),
}


@pytest.mark.parametrize("field", LEFT_OUT)
def test_g13_it_fails_by_field_where_the_broadcast_leaves_one_out(worlds, field):
    """The other ranks keep their old values, as if the field were missing in the broadcast's list."""
    with pytest.raises(RankLost, match=rf"first in field .{field}. of slot \d: rank.s. .1. from rank 0"):
        runs.on_ranks(LEFT_OUT[field], worlds.of(LEFT_OUT[field]), ("left out", field))
