"""How it ends when ranks cannot go on: the same error on each of them, and in the engine."""

from __future__ import annotations

from collections.abc import Sequence

from hal_core import GroupLost, HalError, InvalidValue

from .words import Delivery, Verdict


class RankLost(GroupLost):
    """A rank was lost in a step, and all others end with it.

    ``rank``: the lost one; ``step``: the last that its group was given; ``undelivered``: request, position and count
    of what will not be delivered, -1 where nobody knows.
    """

    def __init__(
        self, what: str, rank: int, step: int, undelivered: Sequence[Delivery] = (), *, cure: str = ""
    ) -> None:
        super().__init__(what, cure=cure)
        self.rank, self.step, self.undelivered = rank, step, tuple(undelivered)


def error_of(verdict: Verdict) -> HalError:
    """The error that a verdict is on the rank that hears it."""
    if verdict.refused:
        return InvalidValue(verdict.what, cure=verdict.cure)
    return RankLost(verdict.what, verdict.rank, verdict.step, cure=verdict.cure)
