"""A sink that hands each output to several: each delivers it for itself, as an engine and whoever reads along."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from hal_core import OutputRecord, Sink, SinkClosed, SinkFull, Undelivered
from hal_core.frames import PendingOutput, entries_of, is_ready, new_session


class Copies:
    """Puts what it is given into each of ``sinks``; closing these is their owner's affair.

    An output is complete when all have completed it, with the first error that any of them met.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.session, self._sinks = new_session(), tuple(sinks)
        self.entries = min(filter(None, map(entries_of, sinks)), default=0)

    def put(self, pending: PendingOutput) -> None:
        """Give the output to every sink, whatever one of them says; then raise what the first one did.

        One that is closed is the end for all: the output is not taken then, though the others may still send it.
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
        """Nothing of its own to drain."""


def close_all(sinks: Sequence[Sink], timeout: float, *, again: bool = False) -> None:
    """Close sinks one after the other, each with ``timeout`` seconds; then raise all that was undelivered.

    ``again``: the worker is started again, for which readers are to wait.
    """
    names: list[tuple[str, int, int]] = []
    why: list[str] = []
    for sink in sinks:
        if again and hasattr(sink, "again"):  # a queue's reader cannot be told
            sink.again = True
        try:
            sink.close(timeout)
        except Undelivered as error:
            names += error.records
            why.append(error.what)
    if why:
        raise Undelivered("; ".join(why), names, cure="run these requests again")


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
        """Of each row of the resolved record, the batch id."""
        found: Sequence[int] = getattr(self._pending, "batch_ids", ())
        return found

    @property
    def batch_size(self) -> int:
        """The batch ids of the step."""
        return int(getattr(self._pending, "batch_size", 0))

    def ready(self) -> bool:
        """Whether resolving it does not wait."""
        return is_ready(self._pending)

    def resolve(self) -> OutputRecord:
        """The record, which is built once."""
        with self._lock:
            if self._record is None:
                self._record = self._pending.resolve()
            return self._record

    def abandon(self) -> None:
        """Whoever put the output completes it."""
        with self._lock:
            self._left = 0

    def complete(self, error: BaseException | None) -> None:
        """One sink is done with it."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            over = self._left == 0
        if over:
            self._pending.complete(self._error)
