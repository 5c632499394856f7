"""Start of the ranks of an engine, on this host or on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from hal.selection import ENVIRONMENT
from hal_engine.stepping import DEFAULT, check_runs

from .launch import LocalLaunch
from .rank_executor import RankExecutor

if TYPE_CHECKING:
    from hal_engine.options import Ranks

    from .control_messages import Setup

ADDRESS = "RAY_ADDRESS"
"""Ray's own variable for a cluster's address; ``ray_address`` takes precedence."""


class RankStart:
    """Starts the ranks of one engine. A context manager that owns the connection to a Ray cluster.

    ``look`` is called from time to time while ranks start; what it raises ends the start.
    """

    def __init__(self, ranks: Ranks, device: str | None, look: Callable[[], None] = lambda: None) -> None:
        """Raises :class:`InvalidValue` for a device that Ray cannot assign."""
        self._ranks, self._look, self._cluster = ranks, look, None
        if ranks.launcher == "ray":
            from .ray_launch import RayCluster, bundle_of

            self._bundle = bundle_of(device or os.environ.get(ENVIRONMENT))
            address = ranks.ray_address or os.environ.get(ADDRESS) or None
            self._cluster = RayCluster(address, ranks.size * ranks.workers)

    def __call__(self, setup: Setup) -> RankExecutor:
        """Begin to start the ranks of a setup. See :class:`RankExecutor`."""
        ranks = self._ranks
        if self._cluster is not None:
            return self._cluster.rank_executor(setup, self._bundle, ranks.ray_placement, look=self._look)
        if not setup.named_runner:
            check_runs(DEFAULT)  # before a rank fails deep in a library
        before, among = setup.number * ranks.size, ranks.size * ranks.workers
        return RankExecutor(setup, LocalLaunch(ranks.size, before=before, among=among), look=self._look)

    def __enter__(self) -> RankStart:
        if self._cluster is not None:
            self._cluster.__enter__()
        return self

    def __exit__(self, *ended: object) -> None:
        if self._cluster is not None:
            self._cluster.__exit__(*ended)
