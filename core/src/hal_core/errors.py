"""Error classes of hal: each error names who, what and the cure (guarantee G26).

All errors derive from :class:`HalError`. Each also derives from the built-in exception that callers already catch for
that kind of error (``ValueError``, ``TimeoutError``, ``LookupError``, …).
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path


class HalError(Exception):
    """Root of hal's errors.

    ``device``, ``hook`` and ``argument`` name where the error occurred, ``what`` states the fact, and ``cure`` states
    what to do. Each may be empty where it does not apply. The text has them in that order.
    """

    trace = ""
    """What :func:`trace_of` returned in the process that this error came from, if that was another one."""

    def __init__(self, what: str, *, cure: str = "", device: str = "", hook: str = "", argument: str = "") -> None:
        self.what, self.cure = what, cure
        self.device, self.hook, self.argument = device, hook, argument
        super().__init__(what)

    def __str__(self) -> str:
        who = ": ".join(part for part in (self.device, self.hook, self.argument) if part)
        text = f"{who}: {self.what}" if who else self.what
        return f"{text} ({self.cure})" if self.cure else text

    def located(self, *, device: str = "", hook: str = "", argument: str = "") -> HalError:
        """Fill in the device, hook and argument where they are still unknown, and return the error itself."""
        self.device, self.hook = self.device or device, self.hook or hook
        self.argument = self.argument or argument
        return self


_RUNNERS = {"_pytest", "pluggy", "hypothesis"}
_CALLERS = _RUNNERS | {"hal_conformance"}
"""Packages that only call the failing code: :func:`trace_of` leaves out their frames. An error in the kit's own code
has the frames of the kit."""


def trace_of(error: BaseException) -> str:
    """Return the traceback of a foreign exception that led to ``error``; "" if hal itself found the fault."""
    while isinstance(error, BaseExceptionGroup) or (isinstance(error, HalError) and error.__cause__ is not None):
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error
    if isinstance(error, HalError | AssertionError):
        return getattr(error, "trace", "")
    report = traceback.TracebackException.from_exception(error)
    outside = [
        [frame for frame in report.stack if not names.intersection(Path(frame.filename).parts)]
        for names in (_CALLERS, _RUNNERS)
    ]
    frames = next(filter(None, outside), report.stack)
    report.stack = traceback.StackSummary.from_list(
        [traceback.FrameSummary(frame.filename, frame.lineno, frame.name, line=frame.line) for frame in frames]
    )  # without columns, so without lines of ^^^
    return "".join(report.format())


class InvalidValue(HalError, ValueError):
    """An argument or option has an unusable value; no state was changed."""


class InvalidBatch(InvalidValue):
    """A task batch is invalid; no state was changed. ``problems`` lists every problem (G8)."""

    def __init__(self, problems: Sequence[str], *, device: str = "", hook: str = "insert_tasks") -> None:
        self.problems = tuple(problems)
        super().__init__(
            f"{len(self.problems)} problem(s), nothing was inserted: " + "; ".join(self.problems),
            cure="correct or leave out the tasks named, then insert the batch again",
            device=device,
            hook=hook,
            argument="tasks",
        )


class ConversionRefused(InvalidValue, TypeError):
    """A value's type class or range does not fit the target's dtype (G6)."""


class ShapeMismatch(InvalidValue):
    """A value's element count or shape does not fit the target (G6)."""


class DeviceNotFound(HalError, LookupError):
    """No installed distribution provides a device with that name."""


class Unavailable(HalError, RuntimeError):
    """A plugin is sound but its device cannot be used here: no driver, no chip, no framework build."""


class PluginError(HalError, RuntimeError):
    """A plugin's distribution is broken: it does not import, or does not implement the contract."""


class ContractMismatch(PluginError):
    """A plugin was made for another contract version, or names no contract range."""


class CapabilityMissing(HalError, RuntimeError):
    """The device lacks a capability that ``require=`` or a call needs; one opened for ``require=`` is closed again."""


class DeviceClosed(HalError, RuntimeError):
    """The device, or its copy after a fork, accepts no more calls."""


class StateUnusable(HalError, RuntimeError):
    """The ranks disagree about a state, so it must not be used again (G14)."""


class OutOfMemory(HalError, MemoryError):
    """The device or the staging ring has no room left, or a wait for room, an upload or a busy stream reached its
    deadline; no part of the work was queued."""


class TicketTimeout(HalError, TimeoutError):
    """A wait timed out before the work was done. The ticket stays pending and can be waited for again."""


class GroupLost(HalError, ConnectionError):
    """A peer of the group is lost or hung, and the group is unusable (G16). ``rank``: the peer's global rank, -1 if
    unknown."""

    rank: int = -1


class SinkFull(HalError, TimeoutError):
    """The sink took no record before its deadline. The record is kept and sent when there is room (G23).

    ``ticket`` is the ticket of the waiting output, so that a worker can still read it.
    """

    ticket: object = None


class SinkClosed(HalError, ConnectionError):
    """The sink is closed; the record was not taken.

    ``ticket`` is the ticket of the output that was to be sent. Its ``record()`` gives the lost record (G19).
    """

    ticket: object = None


class Undelivered(HalError, ConnectionError):
    """Records that could not be delivered: ``records`` holds ``(request_id, first_position, count)`` for each (G19)."""

    def __init__(self, what: str, records: Sequence[tuple[str, int, int]], *, cure: str = "") -> None:
        self.records = tuple(records)
        super().__init__(what, cure=cure, hook="save_output", argument="sink")


class FrameError(HalError, ValueError):
    """Bytes that form no valid frame: wrong magic, version, length, checksum or count, or truncated."""
