"""Ranks that all tests here share: starting one costs seconds, joining a job seconds more."""

import contextlib

import pytest

from tests.ranks import ForkedRanks

PATIENCE = 60.0
"""Seconds in which ranks must have answered, on a machine that may be busy."""


class Worlds:
    """Yield one world of ranks for each size, kept until the session ends; a world that lost a rank is restarted."""

    def __init__(self):
        self._pools = {}

    def of(self, size):
        """The world of so many ranks."""
        if size not in self._pools:
            self._pools[size] = ForkedRanks(size)
        return self._pools[size]

    def end(self, size):
        """End a world, the ranks that hang too."""
        if (pool := self._pools.pop(size, None)) is not None:
            pool.kill()
            pool.close()


@pytest.fixture(scope="session")
def worlds():
    made = Worlds()
    with contextlib.ExitStack() as stack:
        for size in (2, 4):
            stack.callback(made.end, size)
        yield made
