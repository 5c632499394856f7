"""``--trace FILE``: the calls of a device, their tickets and the steps as spans, for Perfetto (https://ui.perfetto.dev).

A process is one device of the trace. Its rows: the hooks as the host called them; other calls, as marks; the steps,
each from its first call to the end of its output, so that overlapping ones lie below each other; for each stream the
tickets, from the call to their end as the host noticed it. Ranks of a host append to one file.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hal_core import InvalidValue, Unavailable, hookimpl

if TYPE_CHECKING:
    from hal_core import BoundDevice, Step, Ticket

log = logging.getLogger("hal")
MOST = 200_000
"""Spans of a process that are kept, some 50 MB; those that come later are left out."""
_Row = tuple[str, str, int, int, dict[str, int | str] | None]  # track, name, begin, end in ns; arguments
_Wait = tuple[str, str, int, dict[str, int | str] | None]  # of a row that has not ended
_Watching = Generator[None, Any, Any]
_now = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)
"""Perfetto's clock, in nanoseconds."""


def begin_trace(file: str | None) -> None:
    """Make the file empty, before anything is loaded. Raises :class:`InvalidValue` if that cannot be, and
    :class:`hal_core.Unavailable` without the package that writes it."""
    if file is None:
        return
    if find_spec("perfetto") is None:
        cure = "pip install 'perfetto>=0.59'"
        raise Unavailable("the Python package 'perfetto' is not installed", cure=cure, argument="--trace")
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
        self._rows: list[_Row] = []
        self._open: dict[int, tuple[Ticket | None, Sequence[_Wait]]] = {}  # tickets whose end was not noticed
        self._streams: dict[Hashable, str] = {}
        self._begun: int | None = None  # when the step's first call began

    @hookimpl(wrapper=True)
    def insert_tasks(self, tasks: Any, stream: object) -> _Watching:  # noqa: ANN401
        """See the hook."""
        return (yield from self._hook("insert_tasks", stream, {"requests": len(tasks.requests)}))

    @hookimpl(wrapper=True)
    def async_set_value(self, stream: object) -> _Watching:
        """See the hook."""
        return (yield from self._hook("async_set_value", stream))

    @hookimpl(wrapper=True)
    def broadcast_tokens(self, group: Any, stream: object) -> _Watching:  # noqa: ANN401
        """See the hook."""
        return (yield from self._hook("broadcast_tokens", stream, {"ranks": group.size}))

    @hookimpl(wrapper=True)
    def save_output(self, step: Step, stream: object) -> _Watching:
        """See the hook."""
        return (yield from self._hook("save_output", stream, {"step": step.number}))

    def _hook(self, hook: str, stream: object, given: dict[str, int | str] | None = None) -> _Watching:
        began = _now()
        if self._begun is None and hook != "async_set_value":
            self._begun = began
        try:
            ticket = yield
        finally:
            self._keep(("calls", hook, began, _now(), given))
        waits = [(self._stream(stream), hook, began, given)]
        if hook == "save_output" and given is not None:
            step, self._begun = self._begun, None
            waits.append(("steps", f"step {given['step']}", step or began, given))
        self._open[id(ticket)] = ticket, waits
        return ticket

    def called(self, call: str, arguments: dict[str, object]) -> None:
        """See :mod:`hal_core.runtime.observers`."""
        now = _now()
        if self._begun is None and call == "order_after_reads":
            self._begun = now
        self._keep(("calls", call, now, now, None))

    def ticket_ended(self, hook: str, ticket: Ticket, error: Exception | None) -> None:
        """See :mod:`hal_core.runtime.observers`."""
        now = _now()
        for track, name, began, given in self._open.pop(id(ticket), (None, ()))[1]:
            self._keep((track, name, began, now, given if error is None else {**(given or {}), "error": str(error)}))

    def _keep(self, row: _Row) -> None:
        if len(self._rows) < MOST:
            self._rows.append(row)
            if len(self._rows) == MOST:
                log.warning("--trace: %d spans are kept, and no further one", MOST)

    def _stream(self, stream: object) -> str:
        key = getattr(stream, "raw", None)
        return self._streams.setdefault(key if isinstance(key, int) else id(stream), f"stream {len(self._streams)}")

    def packets(self, who: str) -> bytes:
        """Return the bytes of the trace's packets: ``Trace`` of perfetto's protocol, which may be joined."""
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder

        for _, waits in self._open.values():
            for track, name, began, given in waits:
                self._keep((track, name, began, _now(), given))
        self._open.clear()
        builder, pid = TraceProtoBuilder(), os.getpid()
        of_process = builder.add_packet().track_descriptor
        of_process.uuid, of_process.process.pid, of_process.process.process_name = pid << 20, pid, who
        events: list[tuple[int, bool, int, int, _Row]] = []  # time, whether it begins, the outer one first
        uuids: dict[tuple[str, int], int] = {}
        for lane, row in _lanes(sorted(self._rows, key=lambda row: (row[2], -row[3]))):
            if lane not in uuids:
                uuids[lane] = (pid << 20) + len(uuids) + 1
                own = builder.add_packet().track_descriptor
                own.uuid, own.parent_uuid, own.name = uuids[lane], pid << 20, lane[0]
            begin, end = row[2], row[3]
            events.append((begin, True, -end, uuids[lane], row))
            if end > begin:
                events.append((end, False, -begin, uuids[lane], row))
        kinds = {False: TrackEvent.TYPE_SLICE_END, True: TrackEvent.TYPE_SLICE_BEGIN}
        for at, begins, _, uuid, row in sorted(events, key=lambda event: event[:3]):
            packet = builder.add_packet()
            packet.timestamp, packet.trusted_packet_sequence_id = at, pid
            event = packet.track_event
            event.track_uuid, event.type = uuid, TrackEvent.TYPE_INSTANT if row[2] == row[3] else kinds[begins]
            if begins:
                event.name = row[1]
                for name, value in (row[4] or {}).items():
                    event.debug_annotations.add(name=name, string_value=str(value))
        found: bytes = builder.serialize()
        return found


def _lanes(rows: list[_Row]) -> Iterator[tuple[tuple[str, int], _Row]]:
    """Give each row, in the order of beginnings, and its track: the first of its name that nothing occupies. Calls
    have one, as they enclose each other."""
    ends: dict[str, list[int]] = {}
    for row in rows:
        track, begin, end = row[0], row[2], row[3]
        if track == "calls":
            yield (track, 0), row
            continue
        lanes = ends.setdefault(track, [])
        lane = next((number for number, until in enumerate(lanes) if until <= begin), len(lanes))
        lanes[lane : lane + 1] = [end]
        yield (track, lane), row
