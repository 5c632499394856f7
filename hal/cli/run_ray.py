"""``hal run --launcher ray``: ranks that Ray places, on one host or several."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hal.distributed.ray_launch import RayCluster, bundle_of
from hal.selection import ENVIRONMENT

from . import signals

if TYPE_CHECKING:
    from hal.distributed.crew import Crew
    from hal.distributed.words import Setup

    from .run_options import Options

ADDRESS = "RAY_ADDRESS"
"""Ray's own variable for the address of a cluster; ``--ray-address`` goes before it."""


class RayRanks:
    """The ranks of one command on a Ray cluster; a context manager, with which the connection to the cluster ends."""

    def __init__(self, options: Options) -> None:
        """Raises :class:`InvalidValue` for a device that Ray cannot assign."""
        ranks = options.ranks
        self._bundle = bundle_of(options.device or os.environ.get(ENVIRONMENT))
        self._strategy = ranks.ray_placement
        workers = sum(ranks.split) if ranks.split else 1
        self._cluster = RayCluster(ranks.ray_address or os.environ.get(ADDRESS) or None, ranks.size * workers)

    def crew(self, setup: Setup) -> Crew:
        """Begin to start the ranks of a setup. See :class:`hal.distributed.crew.Crew`."""
        chosen = self._bundle, self._strategy
        return self._cluster.crew(setup, *chosen, look=signals.check)

    def __enter__(self) -> RayRanks:
        self._cluster.__enter__()
        return self

    def __exit__(self, *ended: object) -> None:
        self._cluster.__exit__(*ended)
