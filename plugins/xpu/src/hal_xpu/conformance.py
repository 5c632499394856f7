"""What the conformance kit is told of the xpu device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hal_core.paddle.conformance import PaddleSupport

from . import PLACE


class XpuSupport(PaddleSupport):
    """Several ranks where Paddle's CPU place stands in, whose groups are those of gloo; BKCL cannot be started here."""

    ranks = os.environ.get(PLACE) == "cpu"

    def rank_environment(self, rank: int, endpoints: Sequence[str]) -> Mapping[str, str]:
        """What ``paddle.distributed`` asks for."""
        from hal_core.ranks import gloo

        return gloo(rank, endpoints)

    def join(self, groups: Sequence[Sequence[int]], timeout: float, epoch: str) -> None:
        """Open all groups in one order; those that were lost are made anew."""
        from hal_core.paddle_groups import open_groups

        open_groups(groups, timeout=timeout)
