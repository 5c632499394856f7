"""The tests of ranks detect their faults: each liar, in all ranks or in the engine, makes one of them fail."""

import functools

import pytest
from hal_engine.distributed.errors import RankLost
from hal_engine.engine import Scheduler
from msgspec.structs import replace

from . import test_losses, test_refusals, test_rows
from .rank_work import lie

KILLED = ("killed", 2, 1, 1, 7)
CAUGHT = (AssertionError, pytest.fail.Exception, RankLost)


class Lying:
    """Worlds whose ranks are wrong in one way more."""

    def __init__(self, worlds, liar):
        self.worlds, self.liar = worlds, liar

    def of(self, size):
        return LyingPool(self.worlds.of(size), self.liar)

    def end(self, size):
        self.worlds.end(size)


class LyingPool:
    """A pool of such ranks."""

    def __init__(self, pool, liar):
        self._pool, self._liar = pool, liar

    def __getattr__(self, name):
        return getattr(self._pool, name)

    def begin(self, work, url, *how, ranks):
        self._pool.begin(lie, url, self._liar, *how, ranks=ranks)


TESTS = {
    "no check": functools.partial(test_rows.test_the_check_names_the_field_in_which_ranks_differ, everywhere=True),
    "half a check": functools.partial(test_rows.test_the_check_names_the_field_in_which_ranks_differ, everywhere=True),
    "any step": test_refusals.test_a_step_out_of_its_turn_is_refused_by_name,
    "says nothing": lambda worlds: test_losses.survivors_agree(worlds, *KILLED),
    "its own words": lambda worlds: test_losses.survivors_agree(worlds, *KILLED),
}
"""Liar to the test that kills it."""


@pytest.mark.conform
@pytest.mark.parametrize("liar", TESTS)
def test_a_lying_rank_is_found(worlds, liar):
    with pytest.raises(CAUGHT):
        TESTS[liar](Lying(worlds, liar))
    worlds.end(2)


@pytest.mark.conform
def test_an_engine_that_forgets_what_was_delivered_is_found(worlds, monkeypatch):
    withdraw = Scheduler.withdraw

    def forgetful(scheduler):
        resumed, ended = withdraw(scheduler)
        return [replace(request, output=()) for request in resumed], ended

    monkeypatch.setattr(Scheduler, "withdraw", forgetful)
    with pytest.raises(AssertionError, match="a token was lost, or came twice"):
        test_losses.goes_on(worlds, *KILLED)
    worlds.end(2)
