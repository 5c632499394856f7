"""``--trace FILE``: the calls of a device, their tickets and the steps as spans, for Perfetto (https://ui.perfetto.dev).

A process is one device of the trace. Its rows: the hooks as the host called them; other calls, as marks, but for the
one that begins a step; the steps, each from its first call to the end of its output, so that overlapping ones lie below
each other; for each stream the tickets that were not done when the call returned, from the call to their end as the
host noticed it. Ranks of a host append to one file.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from hal_core import DONE, InvalidValue, hookimpl

from .perfetto import MOST, Events, Track

if TYPE_CHECKING:
    from hal_core import BoundDevice, Step, Ticket

log = logging.getLogger("hal")
_Wait = tuple["Ticket | None", int, str, str, int | None, int | None]
"""A ticket that has not ended: its call's begin; its stream, hook and number; the begin of the step that it ends."""
_Watching = Generator[None, Any, Any]
_now = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)
"""Perfetto's clock, in nanoseconds."""


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
        self._events = Events(os.getpid())
        self._calls = self._events.track("calls")
        self._open: dict[int, _Wait] = {}  # tickets whose end was not noticed
        self._streams: dict[int, str] = {}
        self._rows: dict[str, list[Track]] = {}
        self._begun: int | None = None  # when the step's first call began

    @hookimpl(wrapper=True)
    def insert_tasks(self, tasks: Any, stream: object) -> _Watching:  # noqa: ANN401
        """See the hook."""
        return (yield from self._hook("insert_tasks", stream, len(tasks.requests)))

    @hookimpl(wrapper=True)
    def async_set_value(self, stream: object) -> _Watching:
        """See the hook."""
        return (yield from self._hook("async_set_value", stream))

    @hookimpl(wrapper=True)
    def broadcast_tokens(self, group: Any, stream: object) -> _Watching:  # noqa: ANN401
        """See the hook."""
        return (yield from self._hook("broadcast_tokens", stream, group.size))

    @hookimpl(wrapper=True)
    def save_output(self, step: Step, stream: object) -> _Watching:
        """See the hook."""
        return (yield from self._hook("save_output", stream, step.number))

    def _hook(self, hook: str, stream: object, number: int | None = None) -> _Watching:
        began, step = _now(), None
        if self._begun is None and hook != "async_set_value":
            self._begun = began
        self._events.add((began, self._calls.begin(hook, number)))
        try:
            ticket = yield
        finally:
            self._events.add((_now(), self._calls.end))
        if hook == "save_output":
            step, self._begun = self._begun, None
        if ticket is not DONE or hook == "save_output":
            self._open[id(ticket)] = ticket, began, self._stream(stream), hook, number, step
        return ticket

    def called(self, call: str, arguments: dict[str, object]) -> None:
        """See :mod:`hal_core.runtime.observers`."""
        now = _now()
        if self._begun is None and call == "order_after_reads":
            self._begun = now
        else:
            self._events.add((now, self._calls.mark(call)))

    def ticket_ended(self, hook: str, ticket: Ticket, error: Exception | None) -> None:
        """See :mod:`hal_core.runtime.observers`."""
        wait = self._open.pop(id(ticket), None)
        if wait is not None:
            self._end(wait, error)

    def _end(self, wait: _Wait, error: Exception | None) -> None:
        now, message = _now(), None if error is None else str(error)
        _, began, stream, hook, number, step = wait
        self._span(stream, began, now, hook, number, message)
        if step is not None:
            self._span("steps", step, now, "step", number, message)

    def _span(self, name: str, began: int, ended: int, what: str, number: int | None, error: str | None) -> None:
        """Keep a span on the first row of a name that was free when it began."""
        rows = self._rows.setdefault(name, [])
        row = next((row for row in rows if row.until <= began), None)
        if row is None:
            row = self._events.track(name)
            rows.append(row)
        row.until = ended
        self._events.add((began, row.begin(what, number, error), ended, row.end))

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
        if self._events.full:
            log.warning("--trace: the file has the last %d events; earlier ones were left out", MOST)
        return self._events.packets(who)
