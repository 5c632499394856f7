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
    trace_of,
)

from .words import Delivery, Failed, Verdict

_REFUSALS = (InvalidValue, DeviceNotFound, Unavailable, CapabilityMissing, PluginError)
"""Errors of a start that the next one would meet again: what was asked for, or is installed, is to be mended."""
_TRACE = 8192
"""Most characters of a traceback that a rank tells."""


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
    what, cure = " ".join(f"{type(error).__name__}: {error}".split()), ""
    gone = isinstance(error, GroupLost)
    if isinstance(error, HalError):
        who = () if gone else (error.device, error.hook, error.argument)  # of a loss, the engine says whose it is
        what, cure = ": ".join(filter(None, (*who, error.what))), error.cure
    lost = [error.rank] if isinstance(error, GroupLost) and error.rank >= 0 else []
    refused = isinstance(error, PluginError) or (not step and isinstance(error, _REFUSALS))
    plain = gone or isinstance(error, OSError | ModuleNotFoundError)  # of which the line says all
    trace = "" if plain else trace_told(error)
    return Failed(rank, what, cure, step, lost, vague=gone and not lost, refused=refused, trace=trace)


def trace_told(error: Exception) -> str:
    """The traceback of somebody else's exception as a rank tells it: of a long one the end, which says what and where;
    characters that no message can carry, as escapes."""
    trace = trace_of(error).encode("utf-8", "backslashreplace").decode()
    return trace if len(trace) <= _TRACE else f"...{trace[3 - _TRACE :]}"


def error_of(verdict: Verdict) -> HalError:
    """The error that a verdict is on the rank that hears it."""
    if verdict.refused:
        return InvalidValue(verdict.what, cure=verdict.cure)
    return RankLost(verdict.what, verdict.rank, verdict.step, cure=verdict.cure)
