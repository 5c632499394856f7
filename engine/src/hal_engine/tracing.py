"""``--trace FILE``: the calls of a device, their tickets and the steps as spans, for Perfetto (https://ui.perfetto.dev).

A process is one device of the trace. Its rows: the calls as the host made them; the steps, each from its first call to
the end of its output; for each stream the tickets that were not done when the call returned, from the call to their end
as the host noticed it. Spans that overlap lie below each other. Ranks of a host append to one file.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from time import CLOCK_BOOTTIME, clock_gettime_ns, monotonic_ns
from typing import TYPE_CHECKING, Any

from hal_core import DONE, InvalidValue

from .perfetto import MOST, Spans

if TYPE_CHECKING:
    from hal_core import BoundDevice, Ticket

log = logging.getLogger("hal")
_HOOKS = frozenset(("insert_tasks", "async_set_value", "broadcast_tokens", "save_output"))
_STEP = _HOOKS - {"async_set_value"} | {"order_after_reads"}
"""The calls that may begin a step."""
_Wait = tuple["Ticket", int, str, str, int | None, int | None]
"""A ticket that has not ended: its call's begin; its stream, hook and number; the begin of the step that it ends."""


def begin_trace(file: str | None) -> None:
    """Make the file empty, before anything is loaded. Raises :class:`InvalidValue` if that cannot be."""
    if file is None:
        return
    try:
        with open(file, "wb"):
            pass
    except OSError as error:
        cure = "give a file in a folder that this user may write to"
        raise InvalidValue(f"{file}: {error.strerror}", cure=cure, argument="--trace") from error


@contextmanager
def traced(file: str | None, device: BoundDevice, who: str) -> Iterator[None]:
    """Inside, the device's calls are kept; at the end they are appended to the file. ``who``: the process as the trace
    names it. None: nothing is done."""
    if file is None:
        yield
        return
    trace = Trace()
    device.observe(trace, name="--trace")
    try:
        yield
    finally:
        with open(file, "ab") as out:
            fcntl.flock(out, fcntl.LOCK_EX)  # of other ranks
            out.write(trace.packets(f"{who}, {device.name}"))


class Trace:
    """An observer that keeps spans (:mod:`hal_core.runtime.observers`)."""

    def __init__(self) -> None:
        self._spans = Spans(os.getpid())
        self._add = self._spans.add
        self._open: dict[int, _Wait] = {}  # tickets whose end was not noticed
        self._streams: dict[int, str] = {}
        self._begun: int | None = None  # when the step's first call began

    def timed(self, call: str, began: int, result: Any, arguments: tuple[Any, ...]) -> None:  # noqa: ANN401
        """See :mod:`hal_core.runtime.observers`."""
        ended, number = monotonic_ns(), 0
        if call == "save_output":
            number = arguments[-3].number
        elif call == "insert_tasks":
            number = len(arguments[-2])
        elif call == "broadcast_tokens":
            number = arguments[-2].size
            if number == 1:  # the device receives no call
                return
        self._add((began, ended, "calls", call, number, None))
        if self._begun is None and call in _STEP:
            self._begun = began
        if call in _HOOKS and result is not None and (result is not DONE or call == "save_output"):
            step = None
            if call == "save_output":
                step, self._begun = self._begun, None
            self._open[id(result)] = result, began, self._stream(arguments[-1]), call, number, step

    def ticket_ended(self, hook: str, ticket: Ticket, error: Exception | None) -> None:
        """See :mod:`hal_core.runtime.observers`."""
        wait = self._open.pop(id(ticket), None)
        if wait is not None:
            self._end(wait, error)

    def _end(self, wait: _Wait, error: Exception | None) -> None:
        now, message = monotonic_ns(), None if error is None else str(error)
        _, began, stream, hook, number, step = wait
        self._add((began, now, stream, hook, number, message))
        if step is not None:
            self._add((step, now, "steps", "step", number, message))

    def _stream(self, stream: object) -> str:
        raw = getattr(stream, "raw", None)
        key = raw if isinstance(raw, int) else id(stream)
        name = self._streams.get(key)
        if name is None:
            name = self._streams[key] = f"stream {len(self._streams)}"
        return name

    def packets(self, who: str) -> bytes:
        """Return the bytes of the trace's packets; tickets whose end nobody has noticed end now."""
        for wait in self._open.values():
            self._end(wait, None)
        self._open.clear()
        if self._spans.full:
            log.warning("--trace: the file has the last %d spans; earlier ones were left out", MOST)
        return self._spans.packets(who, clock_gettime_ns(CLOCK_BOOTTIME) - monotonic_ns())
