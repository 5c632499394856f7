"""A sink that passes each output to several sinks: each delivers it by itself, as to an engine and to a second
reader."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from hal_core import OutputRecord, Sink, SinkClosed, SinkFull, Undelivered
from hal_core.frames import PendingOutput, entries_of, is_ready, new_session


class FanoutSink:
    """Sink that puts each output into each of ``sinks``. Their owner closes them.

    An output is complete when all sinks have completed it, with the first error of any of them.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.session, self._sinks = new_session(), tuple(sinks)
        self.entries = min(filter(None, map(entries_of, sinks)), default=0)

    def put(self, pending: PendingOutput) -> None:
        """Give the output to every sink even if one of them raises; then raise the first error.

        If one sink is closed, all count as closed: the output is refused, though the others may still send it.
        """
        shared = _Shared(pending, len(self._sinks))
        full: SinkFull | None = None
        closed: SinkClosed | None = None
        for sink in self._sinks:
            try:
                sink.put(shared)
            except SinkFull as error:
                full = full or error
            except SinkClosed as error:
                closed = closed or error
        if closed is not None:
            shared.abandon()
            raise closed
        if full is not None:
            raise full

    def close(self, timeout: float) -> None:
        """Do nothing: this sink has no queue."""


def close_all(sinks: Sequence[Sink], timeout: float, *, again: bool = False) -> None:
    """Close sinks one after the other, each with ``timeout`` seconds; then raise one error with everything undelivered.

    ``again``: the worker restarts, and readers are to wait for it.
    """
    names: list[tuple[str, int, int]] = []
    why: list[str] = []
    for sink in sinks:
        if again and hasattr(sink, "again"):  # the reader of a queue cannot be told
            sink.again = True
        try:
            sink.close(timeout)
        except Undelivered as error:
            names += error.records
            why.append(error.what)
    if why:
        raise Undelivered("; ".join(why), names, cure="check that its reader runs, and run these requests again")


class _Shared:
    """One output for several sinks."""

    def __init__(self, pending: PendingOutput, count: int) -> None:
        self.step, self._pending = pending.step, pending
        self._left = count
        self._error: BaseException | None = None
        self._record: OutputRecord | None = None
        self._lock = Lock()
        self.request_ids: tuple[str, ...] = getattr(pending, "request_ids", ())

    @property
    def batch_ids(self) -> Sequence[int]:
        """Return the batch id of each row of the resolved record."""
        found: Sequence[int] = getattr(self._pending, "batch_ids", ())
        return found

    @property
    def batch_size(self) -> int:
        """Return the number of batch ids of the step."""
        return int(getattr(self._pending, "batch_size", 0))

    def ready(self) -> bool:
        """Return whether :meth:`resolve` returns without waiting."""
        return is_ready(self._pending)

    def resolve(self) -> OutputRecord:
        """Return the record, which is built once."""
        with self._lock:
            if self._record is None:
                self._record = self._pending.resolve()
            return self._record

    def abandon(self) -> None:
        """Do nothing more with the output: the caller of ``put`` completes it."""
        with self._lock:
            self._left = 0

    def complete(self, error: BaseException | None) -> None:
        """Note that one sink is done with the output; complete it after the last."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            over = self._left == 0
        if over:
            self._pending.complete(self._error)
