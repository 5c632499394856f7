"""How it ends when ranks cannot go on: the same error on each of them, and in the engine."""

from __future__ import annotations

from collections.abc import Sequence

from hal_core import (
    CapabilityMissing,
    DeviceNotFound,
    GroupLost,
    HalError,
    InvalidValue,
    PluginError,
    Unavailable,
)

from .words import Delivery, Failed, Verdict

_REFUSALS = (InvalidValue, DeviceNotFound, Unavailable, CapabilityMissing, PluginError)
"""Errors of a start that the next one would meet again: what was asked for, or is installed, is to be mended."""


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


def word_of(error: Exception, rank: int, step: int) -> Failed:
    """What a rank says of an error that ends it in ``step``, 0 before the first."""
    what, cure = f"{type(error).__name__}: {error}", ""
    gone = isinstance(error, GroupLost)
    if isinstance(error, HalError):
        who = () if gone else (error.device, error.hook, error.argument)  # of a loss, the engine says whose it is
        what, cure = ": ".join(filter(None, (*who, error.what))), error.cure
    lost = [error.rank] if isinstance(error, GroupLost) and error.rank >= 0 else []
    refused = isinstance(error, PluginError) or (not step and isinstance(error, _REFUSALS))
    return Failed(rank, what, cure, step, lost, vague=gone and not lost, refused=refused)


def error_of(verdict: Verdict) -> HalError:
    """The error that a verdict is on the rank that hears it."""
    if verdict.refused:
        return InvalidValue(verdict.what, cure=verdict.cure)
    return RankLost(verdict.what, verdict.rank, verdict.step, cure=verdict.cure)
