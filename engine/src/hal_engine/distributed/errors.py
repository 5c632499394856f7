"""Errors raised on every rank and in the engine when a rank is lost."""

from __future__ import annotations

from collections.abc import Sequence

from hal_core import (
    CapabilityMissing,
    DeviceNotFound,
    GroupLost,
    HalError,
    InvalidValue,
    OutOfMemory,
    PluginError,
    Unavailable,
    trace_of,
)

from hal.cli import failures
from hal_engine.stepping.runner import RunnerFailed, sendable

from .control_messages import Delivery, Failed, Stop

_REFUSALS = (
    InvalidValue,
    DeviceNotFound,
    Unavailable,
    CapabilityMissing,
    OutOfMemory,
    PluginError,
    ModuleNotFoundError,
)
"""Errors of a start that a restart would meet again: the user's options or installation must change."""
_TRACE = 8192
"""Most characters of a rank's traceback in a message."""


class RankLost(GroupLost):
    """A rank was lost in a step, and all other ranks end with it.

    ``rank``: the lost rank. ``step``: the last step of its group. ``undelivered``: request, position and count of
    tokens that will not be delivered; -1 if unknown.
    """

    def __init__(
        self, what: str, rank: int, step: int, undelivered: Sequence[Delivery] = (), *, cure: str = ""
    ) -> None:
        super().__init__(what, cure=cure)
        self.rank, self.step, self.undelivered = rank, step, tuple(undelivered)


def failed_message(error: Exception, rank: int, step: int) -> Failed:
    """Return the message about an error that ends a rank in ``step``; 0 before the first step."""
    what, cure = f"{type(error).__name__}: {error}", ""
    gone = isinstance(error, GroupLost)
    if isinstance(error, HalError):
        who = () if gone else (error.device, error.hook, error.argument)  # for a loss, the engine adds the rank
        what, cure = ": ".join(filter(None, (*who, error.what))), error.cure
    elif isinstance(error, ModuleNotFoundError):  # the line of a command, which names what to install
        what = failures.message(error) or what
    lost = [error.rank] if isinstance(error, GroupLost) and error.rank >= 0 else []
    broken = isinstance(error, RunnerFailed)  # by its device, which a restart opens again
    refused = (isinstance(error, PluginError) and not broken) or (not step and isinstance(error, _REFUSALS))
    plain = gone or isinstance(error, OSError | ModuleNotFoundError)  # the line says it all
    trace = "" if plain else short_trace(error)
    return Failed(rank, sendable(what), cure, step, lost, vague=gone and not lost, refused=refused, trace=trace)


def short_trace(error: Exception) -> str:
    """Return the traceback of a plugin's or runner's exception. A long one keeps its end, which has the message and the
    place. Characters that a message cannot carry are escaped."""
    trace = trace_of(error).encode("utf-8", "backslashreplace").decode()
    return trace if len(trace) <= _TRACE else f"...{trace[3 - _TRACE :]}"


def error_of(stop: Stop) -> HalError:
    """Return the error of the engine's verdict, for the rank that receives it."""
    if stop.refused:
        return InvalidValue(stop.what, cure=stop.cure)
    return RankLost(stop.what, stop.rank, stop.step, cure=stop.cure)
