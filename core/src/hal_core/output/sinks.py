"""The contract between the save_output policy and a transport, and a sink in memory.

A device's ``save_output`` makes a :class:`PendingOutput` for each step; the policy puts it into the worker's
:class:`Sink`, which then owns it. The sink resolves outputs in order on a thread of its own, encodes each record,
queues it for the wire and completes the output.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Protocol, runtime_checkable

from hal_core.errors import SinkClosed, Undelivered
from hal_core.output.records import OutputRecord

log = logging.getLogger("hal")


class PendingOutput(Protocol):
    """One step's output on its way to the host. Made by the device's ``save_output``, owned by the sink once
    ``put`` has taken it.

    It may have further members, and the outputs of the hooks have them:

    - ``request_ids: tuple[str, ...]``: a sink that is closed before the copy-out has ended names them in
      :class:`~hal_core.errors.Undelivered`, with position and count -1 as these are unknown;
    - ``ready() -> bool``: the copy-out has ended, so ``resolve`` does not wait;
    - ``batch_ids: Sequence[int]`` and ``batch_size: int``, for sinks whose readers use batch ids instead of names: the
      batch id of each row of the resolved record, and the size of the step's batch.
    """

    step: int

    def resolve(self) -> OutputRecord:
        """Wait for the copy-out, check bounds, build the record. Called once, in order, on the sink's thread."""

    def complete(self, error: BaseException | None) -> None:
        """Called once by the sink: the record is encoded and queued for the wire (None), or it failed."""


@runtime_checkable
class Sink(Protocol):
    """The destination of a step's output. ``put`` is called from one thread; ``close`` may be called from any.

    It may have ``entries: int`` if its readers identify a request only by its batch id, which is below this number. A
    worker then gives a request the same batch id, its slot, in every step. 0 or missing: readers identify requests by
    name.
    """

    session: int  #: random 64-bit number, new for each sink; frames carry it

    def put(self, pending: PendingOutput) -> None:
        """Take the pending output, keeping the order of the calls.

        If the queue is full, the call waits up to the sink's deadline. Then it raises ``SinkFull``; the record is kept
        and sent when there is room. ``SinkClosed``: the record was neither taken nor completed.
        """

    def close(self, timeout: float) -> None:
        """Drain within ``timeout`` seconds, or raise ``Undelivered`` naming request, position and count. Idempotent."""


def entries_of(sink: Sink) -> int:
    """Return the sink's ``entries``, 0 if it has none."""
    return int(getattr(sink, "entries", 0))


def new_session() -> int:
    """Return a random session number, 1 to 2**64 - 1."""
    return int.from_bytes(os.urandom(8), "little") or 1


def complete_with(pending: PendingOutput) -> OutputRecord | None:
    """Resolve the output. If that fails, complete it with the error and return None.

    The record is lost then. Its ticket raises the error, and the sink's thread continues with the next output.
    """
    try:
        return pending.resolve()
    except Exception as error:  # noqa: BLE001  # handed on to the ticket, which raises it
        pending.complete(error)
        return None
    except BaseException as error:  # an interrupt: the ticket and the caller both receive it
        pending.complete(error)
        raise


def unresolved(pending: PendingOutput) -> list[tuple[str, int, int]]:
    """Return the names of an output that will not be sent, for ``Undelivered``, once the sink's thread resolves no
    more.

    They come with position and count if the copy-out has ended; else these are unknown and given as -1.
    """
    if is_ready(pending):
        # If that fails, its rows are unknown; the ticket is completed with the sink's error.
        with contextlib.suppress(Exception):
            return pending.resolve().deliveries()
    return unknown(pending)


def unknown(pending: PendingOutput) -> list[tuple[str, int, int]]:
    """Return the names of an output whose record cannot be read: requests with position and count -1."""
    names = getattr(pending, "request_ids", ()) or (f"<step {pending.step}>",)
    return [(name, -1, -1) for name in names]


def is_ready(pending: PendingOutput) -> bool:
    """Return whether the output has a method ``ready()`` that returns true, so that resolving it does not wait."""
    ready = getattr(pending, "ready", None)
    return ready is not None and bool(ready())


def _closed_first() -> SinkClosed:
    return SinkClosed("the sink was closed first", hook="save_output", argument="sink")


@contextlib.contextmanager
def _logged(step: int) -> Iterator[None]:
    """Log an error of the output's own ``complete()``; the later outputs follow."""
    try:
        yield
    except Exception:
        log.exception("a memory sink could not complete the output of step %d", step)


class MemorySink:
    """Collects records in the list ``records``, for tests and for engines in the worker's own process.

    By default ``put`` resolves at once on the caller's thread, so the record is there when it returns. With
    ``threaded=True`` a thread does it, and the caller never waits for the device. Unbounded: the embedding program must
    remove the records.
    """

    def __init__(self, *, threaded: bool = False) -> None:
        self.session = new_session()
        self.records: list[OutputRecord] = []
        self._closed = self._given_up = False
        # Outputs that the thread has not completed, including its current one.
        self._left: deque[PendingOutput] = deque()
        self._queue: SimpleQueue[PendingOutput | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="hal-memory-sink", daemon=True) if threaded else None
        self._lock = threading.Lock()

    def put(self, pending: PendingOutput) -> None:
        """Resolve and keep the record, or let the thread do it.

        :raises SinkClosed: when the sink is closed; the record was not taken.
        """
        with self._lock:  # so that close() misses no record
            if self._closed:
                raise SinkClosed("the sink is closed", cure="open a new one", hook="save_output", argument="sink")
            if self._thread is not None:
                if self._thread.ident is None:
                    self._thread.start()
                self._left.append(pending)
                self._queue.put(pending)
                return
        self._keep(pending, complete_with(pending))

    def close(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until every record is in the list.

        :raises Undelivered: naming the requests whose output did not come in time.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._thread is None or self._thread.ident is None:
            return
        self._queue.put(None)
        self._thread.join(min(timeout, threading.TIMEOUT_MAX))
        with self._lock:
            self._given_up = True
            late = tuple(self._left)
        for pending in late[1:]:  # The first belongs to the thread, which waits for it.
            pending.complete(_closed_first())
        if late:
            names = [name for pending in late for name in unresolved(pending)]
            raise Undelivered(f"{len(late)} record(s) not copied out within {timeout} s", names, cure="wait longer")

    def _serve(self) -> None:
        """Complete outputs in order until the sink is closed or gives up. The thread's main loop."""
        while (pending := self._queue.get()) is not None and self._resolved(pending):
            del pending  # else the last output would keep its state and device while the thread waits

    def _resolved(self, pending: PendingOutput) -> bool:
        """Resolve the first output that is left, and keep its record; False if :meth:`close` has reported it lost.

        One lock decides which: an output is never both in the list and reported (G19).
        """
        record: OutputRecord | None = None
        with _logged(pending.step):
            record = complete_with(pending)
        with self._lock:
            kept = not self._given_up
            if kept:
                self._left.popleft()
                if record is not None:
                    self.records.append(record)
        if record is not None:
            with _logged(pending.step):
                pending.complete(None if kept else _closed_first())
        return kept

    def _keep(self, pending: PendingOutput, record: OutputRecord | None) -> None:
        if record is not None:
            self.records.append(record)
            pending.complete(None)
