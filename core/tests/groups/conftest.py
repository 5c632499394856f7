"""One pool of four ranks for all tests of this folder; it restarts after a test has killed one of them.

Test files may run in parallel in separate processes. The repository's ``conftest.py`` gives this whole folder to one
of
them, and the pool ends with the folder's last test.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.ranks import ForkedRanks

GROUPS = [(0, 1), (2, 3), (0, 1, 2, 3), (0, 2), (1, 3)]
TIMEOUT = 2.0


def _actions():
    spec = importlib.util.spec_from_file_location("hal_group_actions", Path(__file__).with_name("actions.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Ranks:
    """The pool, with every group of :data:`GROUPS` open."""

    def __init__(self):
        self.actions, self.pool = _actions(), None

    def open(self):
        """Start the pool if necessary, and open every group that is closed."""
        if self.pool is None:
            self.pool = ForkedRanks(4)
        self.pool.run(self.actions.open_all, GROUPS, TIMEOUT)
        return self.pool

    def end(self):
        """End the pool, so that the next test gets a new one."""
        if self.pool is not None:
            self.pool.close()
        self.pool = None


_RANKS = Ranks()


def pytest_runtest_teardown(nextitem):
    """End the pool after the folder's last test: four idle processes would slow later tests down."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _RANKS.end()


@pytest.fixture(scope="session")
def ranks():
    yield _RANKS
    _RANKS.end()


@pytest.fixture
def pool(ranks):
    """Four ranks, with every group open and healthy."""
    return ranks.open()


@pytest.fixture(scope="session")
def actions(ranks):
    return ranks.actions
