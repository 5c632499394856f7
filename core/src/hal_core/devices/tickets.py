"""Tickets of asynchronous work and copies out, and the copies that later writes must wait for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from ..memory.copies import Bytes, CopyTicket
from ..memory.views import ByteRange, Memory
from ..tickets import Mode, Ticket
from .blocks import Lease
from .events import AsyncStream, EndedEvent, RecordedEvent
from .retired_memory import SpanMemory


class AsyncTicket(Ticket):
    """A ticket of the work before an event. :meth:`wait` raises a failure of the device. ``keep``: objects that the
    work uses."""

    __slots__ = ("_error", "_event", "_looked", "keep")
    mode: Mode = "async"

    def __init__(self, event: RecordedEvent) -> None:
        self.observed = False
        self.keep: object = None
        self._event: RecordedEvent | EndedEvent = event
        self._error: BaseException | None = None
        self._looked = False

    @property
    def order(self) -> int:  # type: ignore[override]  # a constant of each ticket
        return self._event.stream_key

    def done(self) -> bool:
        try:
            return self._error is not None or self._event.done()
        except Exception as error:  # noqa: BLE001 (kept for wait() and the next hook: done() never raises)
            self._fail(error)
            return True

    def _block(self, timeout: float | None) -> bool:
        try:
            return self._error is not None or self._event.wait(timeout)
        except Exception as error:  # noqa: BLE001 (raised by wait(), which asks failure())
            self._fail(error)
            return True

    def failure(self) -> BaseException | None:
        event = self._event  # once: another thread that waits may put an EndedEvent in its place
        if self._looked or self._error is not None or not (event.passed or self.done()):
            return self._error
        if self._error is None and isinstance(event, RecordedEvent):  # done() has not set one
            self._looked = True
            error = self._find(event)
            if error is not None:
                self._fail(error)
            else:
                self._event = EndedEvent(event)
        return self._error

    def _find(self, event: RecordedEvent) -> Exception | None:
        """Return the error of the work before an event that has passed."""
        return event.pool.health.fault or event.pool.error(event.raw)

    def _fail(self, error: Exception) -> None:
        pool = self._event.pool
        self._error = pool.health.report(error, pool.primitives.spoils)


class QuietTicket(AsyncTicket):
    """A ticket of a device whose runtime itself raises a failure at its next call (as CUDA does)."""

    __slots__ = ()
    watched = False

    def failure(self) -> BaseException | None:
        error = super().failure()
        if error is not None:
            self._event.pool.health.note_reported(error)
        return error


class AsyncCopy(AsyncTicket, CopyTicket):
    """A copy in flight. The arrays of ``data`` lie in its host block and keep it."""

    __slots__ = ("_data", "_lease", "_places", "_read")

    def __init__(self, event: RecordedEvent, lease: Lease, places: Sequence[tuple[int, int]]) -> None:
        self.observed = self._looked = False  # as the base does, with one Python call less, for each output
        self.keep = self._error = None
        self._event, self._lease, self._places = event, lease, places
        self._data: list[Bytes] | None = None
        self._read = False

    @property
    def data(self) -> Sequence[Bytes]:
        if not self._read:
            block = self._lease.block
            self._event.pool.primitives.host_read(block.address, block.nbytes)
            self._read = True
        return self.ahead()

    def ahead(self) -> Sequence[Bytes]:
        if self._data is None:  # made by the reader, not by the step
            block = self._lease.array()
            self._data = [block[begin : begin + nbytes] for begin, nbytes in self._places]
        return self._data

    def first_bytes(self) -> bytes:
        (begin, nbytes), block = self._places[0], self._lease.block
        self._event.pool.primitives.host_read(block.address, block.nbytes)
        return block.buffer[begin : begin + nbytes].tobytes()


class QuietCopy(QuietTicket, AsyncCopy):
    """A copy of a device with :class:`QuietTicket`."""

    __slots__ = ()


MANY = 64
"""Number of copies in flight from which on finished ones are removed."""
LOOKS = 4
"""How many of them one call checks: more than it adds."""


class ReadsInFlight:
    """Copies out in flight; a stream waits for them before it writes what they read.

    ``under_way``: the event after the last copy of each range of addresses on each stream, and so after all earlier
    ones there.
    """

    def __init__(self) -> None:
        self.under_way: dict[tuple[int, int, int], RecordedEvent] = {}

    def add(self, memory: Memory, parts: Sequence[ByteRange], event: RecordedEvent) -> None:
        """Record that the copy up to ``event`` reads these parts; at least one."""
        if len(parts) == 1:
            begin, end = parts[0].offset, parts[0].end
        else:
            begin, end = min([part.offset for part in parts]), max([part.end for part in parts])
        self.note(memory.address + begin, memory.address + end, event)

    def note(self, begin: int, end: int, event: RecordedEvent) -> None:
        """Record the same for a range of addresses."""
        under_way = self.under_way
        under_way[event.stream_key, begin, end] = event
        if len(under_way) > MANY:
            for key in list(islice(under_way, LOOKS)):
                read = under_way.pop(key)
                if not read.done():
                    under_way[key] = read  # moved to the end; the next call checks others

    def order(self, memory: Memory | None, stream: AsyncStream) -> None:
        """Make ``stream`` wait for copies that still read ``memory`` (None: any memory); its own copies are earlier
        anyway.

        By address, since two views of one tensor are two memories. Copies of what lies between a span's parts are not
        waited for.
        """
        parts: Sequence[tuple[int, int]] = ()
        if memory is not None:
            parts = memory.parts if type(memory) is SpanMemory else [(memory.address, memory.address + memory.nbytes)]
        left = {}
        for key, event in self.under_way.items():
            stream_key, begin, end = key
            if event.done():
                continue
            left[key] = event
            if stream_key == stream.stream_key:
                continue
            if memory is None or any(begin < stop and start < end for start, stop in parts):
                stream.wait(event)
        self.under_way = left
