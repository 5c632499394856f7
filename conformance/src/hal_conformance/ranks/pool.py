"""The kit's ranks: four worker processes, started for the first test that needs several ranks, shared by all tests.

:mod:`hal_conformance.ranks.work` has their functions. A rank opens the device under test for each call, so that one
    pool serves a whole session.
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hal_core.errors import GroupLost, TicketTimeout

from .processes import RankFailed, RankPool

if TYPE_CHECKING:
    from hal_core.contract.support import Support

    from ..harness.subject import Recipe

SIZE = 4
GROUPS = ((0, 1), (2, 3))
"""The groups of every test: 4 ranks as 2 x 2; a test with 2 ranks uses the first."""
TIMEOUT = 2.0
"""Seconds after which a collective's group must be given up (G16)."""
PATIENCE = 12.0
"""Seconds after which a rank without an answer counts as hung."""
STARTING = 120.0
"""Seconds in which ranks must start: each imports its framework, on a machine that may be busy."""


class Ranks:
    """The pool for one kind of device. A test uses it with :meth:`run` or :meth:`watch`."""

    def __init__(self, support: Support) -> None:
        self._support = support
        self._pool: RankPool | None = None
        self._gone: set[int] = set()
        self._epochs = itertools.count()

    def start(self, recipe: Recipe) -> str:
        """Start the processes if there are none. Return "", or why they did not start, which is not the device's
        fault."""
        try:
            if self._pool is None:
                self.ready(recipe, range(SIZE))
        except TicketTimeout as error:
            return f"the kit's ranks are not up: {' '.join(str(error).split())}"
        except RankFailed:
            pass  # the device's own groups: the test meets the error, and fails
        return ""

    def run(
        self, recipe: Recipe, function: Callable[..., Any], *arguments: object, ranks: Sequence[int]
    ) -> dict[int, Any]:
        """Run ``function(rank, recipe, *arguments)`` on these ranks at once; return the answers by rank."""
        __tracebackhide__ = True
        pool = self.ready(recipe, ranks)
        pool.begin(function, recipe, *arguments, ranks=ranks)
        return self.collect(ranks)

    def collect(self, ranks: Sequence[int], patience: float = PATIENCE) -> dict[int, Any]:
        """Return the answers of ranks that are running a function. A missing answer, or an error of a rank that is no
        part of its answer, fails the test."""
        __tracebackhide__ = True
        try:
            return self._collect(ranks, patience)
        except RankFailed as error:
            raise AssertionError(f"an error ended the work of a rank: {error.what}") from error

    def _collect(self, ranks: Sequence[int], patience: float = PATIENCE) -> dict[int, Any]:
        """Return the same, with a rank's error as it is."""
        __tracebackhide__ = True
        assert self._pool is not None
        try:
            return self._pool.finish(ranks, patience)
        except TicketTimeout as error:
            stuck = str(error.what)
            self.close()
            raise AssertionError(f"a rank still waits: {stuck}") from None

    @contextmanager
    def casualty(
        self, recipe: Recipe, function: Callable[..., Any], rank: int, how: str, groups: Sequence[Sequence[int]]
    ) -> Iterator[None]:
        """Let all ranks of ``groups`` run ``function``, in which ``rank`` kills ("lost") or stops ("hung") itself.

        Within the context the other ranks' answers are collected. Then the rank is woken, or dropped.
        """
        everyone = [one for group in groups for one in group]
        pool = self.ready(recipe, everyone)
        pool.begin(function, recipe, groups, rank, how, ranks=everyone)
        try:
            yield
        finally:
            if self._support.loss_ends_ranks:
                gone = next(group for group in groups if rank in group)
                self._gone.update(gone)
                if self._pool is pool:
                    pool.kill(gone)  # Their pending work would keep a shared device busy.
            elif how == "lost":
                self._gone.add(rank)
            elif self._pool is pool:
                pool.signal(rank, signal.SIGCONT)
                self._wake(rank)

    def _wake(self, rank: int) -> None:
        """Collect the answer of a woken rank. It is not a survivor, so it may also end.

        Gloo's own thread in such a rank answers messages it had read. If the other ranks have closed their side, it
        throws and the process aborts, which cannot be prevented from outside (seen in about half of all runs).
        """
        try:
            self._collect([rank])
        except RankFailed as error:
            if not isinstance(error.errors[rank], GroupLost):  # the process continues, and raised another error
                raise
            self._gone.add(rank)

    def ready(self, recipe: Recipe, ranks: Sequence[int]) -> RankPool:
        """Return the pool, with these ranks alive and every group open and sound."""
        from . import work as rank_work

        if self._gone & set(ranks):
            self.close()
        fresh = self._pool is None
        if self._pool is None:
            self._pool, self._gone = RankPool(SIZE, environment=self._environment), set()
        if not self._gone:  # without that rank no group can be opened; open ones serve one last test
            epoch = f"{os.getpid()}_{next(self._epochs)}"
            arguments = (recipe, GROUPS, TIMEOUT, epoch)
            try:
                self._pool.run(rank_work.join, *arguments, timeout=STARTING if fresh else PATIENCE)
            except (RankFailed, TicketTimeout):
                self.close()
                if fresh or not self._support.loss_ends_ranks:
                    raise
                return self.ready(recipe, ranks)  # a failed test has lost a group: that ends ranks, too
        return self._pool

    def _environment(self, rank: int, endpoints: Sequence[str]) -> dict[str, str]:
        paths = os.pathsep.join(path for path in sys.path if path)
        return {"PYTHONPATH": paths} | dict(self._support.rank_environment(rank, endpoints))

    def close(self) -> None:
        """End every process, including hung ones. The next test starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.kill()
            pool.close()


_shared: dict[type[Support], Ranks] = {}


def shared(support: Support) -> Ranks:
    """Return the ranks of all devices with this kind of support."""
    return _shared.setdefault(type(support), Ranks(support))


def release() -> None:
    """End all ranks."""
    while _shared:
        _shared.popitem()[1].close()


atexit.register(release)
