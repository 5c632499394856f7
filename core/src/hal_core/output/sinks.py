"""The contract between the save_output policy and a transport, and a sink that needs none.

The policy makes a :class:`PendingOutput` for each step and puts it into a :class:`Sink`. From then on the sink
owns it: it resolves it, in order, on a thread of its own, encodes the record, queues it for the wire and completes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from queue import SimpleQueue
from typing import Protocol, runtime_checkable

from hal_core.errors import SinkClosed, Undelivered
from hal_core.output.records import OutputRecord

log = logging.getLogger("hal")


class PendingOutput(Protocol):
    """One step's output on its way to the host. Made by the policy, owned by the sink once ``put`` has taken it.

    It may have more, and the outputs of the hooks do:

    - ``request_ids: tuple[str, ...]``; a sink that is closed before the copy-out has ended names them in
      :class:`~hal_core.errors.Undelivered`, with position and count -1 because nobody knows those;
    - ``ready() -> bool``: the copy-out has ended, so ``resolve`` does not wait;
    - ``batch_ids: Sequence[int]`` and ``batch_size: int``, for sinks whose readers know batch ids instead of names: of
      each row of the resolved record, and of the step.
    """

    step: int

    def resolve(self) -> OutputRecord:
        """Wait for the copy-out, check bounds, build the record. Called once, in order, on the sink's thread."""

    def complete(self, error: BaseException | None) -> None:
        """Called once by the sink: the record is encoded and queued for the wire (None), or it failed."""


@runtime_checkable
class Sink(Protocol):
    """Where a step's output goes. ``put`` is called from one thread; ``close`` may be called from any.

    It may have ``entries: int``: its readers know a request by its batch id alone, which is below this number. A worker
    then gives a request the same batch id, its slot, in every step. 0 or missing: readers know requests by name.
    """

    session: int  #: random 64-bit number of this sink's life; frames carry it

    def put(self, pending: PendingOutput) -> None:
        """Take the pending output, keeping the order of the calls.

        A full queue is waited for up to the sink's deadline. Then ``SinkFull`` is raised, and the record is kept all
        the same and sent when there is room. ``SinkClosed``: the record was not taken, and not completed either.
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
    """Resolve the output and, if that fails, complete it with the error and return None.

    The record is lost then; the ticket behind ``complete`` says so, and the thread that serves the others goes on.
    """
    try:
        return pending.resolve()
    except Exception as error:  # noqa: BLE001  # handed on to the ticket, which raises it
        pending.complete(error)
        return None
    except BaseException as error:  # an interrupt: the ticket must know, the caller too
        pending.complete(error)
        raise


def unresolved(pending: PendingOutput) -> list[tuple[str, int, int]]:
    """Name an output that will not be sent, for ``Undelivered``, once the sink's thread no longer resolves any.

    By request, position and count if its copy-out has ended; else by request alone, with -1 for what nobody knows.
    """
    if is_ready(pending):
        with contextlib.suppress(Exception):  # then its rows are unknown; the ticket is completed with the sink's error
            return pending.resolve().deliveries()
    return unknown(pending)


def unknown(pending: PendingOutput) -> list[tuple[str, int, int]]:
    """Name an output whose record nobody can have: by request alone, with position and count -1."""
    names = getattr(pending, "request_ids", ()) or (f"<step {pending.step}>",)
    return [(name, -1, -1) for name in names]


def is_ready(pending: PendingOutput) -> bool:
    """Whether the output says, by an optional method ``ready()``, that resolving it does not wait."""
    ready = getattr(pending, "ready", None)
    return ready is not None and bool(ready())


class MemorySink:
    """Collects records in the list ``records``, for tests and for engines in the worker's own process.

    By default ``put`` resolves at once on the caller's thread, so the record is there when it returns. With
    ``threaded=True`` a thread does it, and the caller never waits for the device. Unbounded: whoever embeds it takes
    the records out.
    """

    def __init__(self, *, threaded: bool = False) -> None:
        self.session = new_session()
        self.records: list[OutputRecord] = []
        self._closed = self._given_up = False
        self._left: deque[PendingOutput] = deque()  # what the thread has not completed, the one it is at included
        self._queue: SimpleQueue[PendingOutput | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="hal-memory-sink", daemon=True) if threaded else None
        self._lock = threading.Lock()

    def put(self, pending: PendingOutput) -> None:
        """Resolve and keep the record, or have the thread do it.

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
        """Wait ``timeout`` seconds at most until every record is in the list.

        :raises Undelivered: naming the requests whose output did not come in time.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._thread is None or self._thread.ident is None:
            return
        self._queue.put(None)
        self._thread.join(timeout)
        with self._lock:
            self._given_up = True
            late = tuple(self._left)
        for pending in late[1:]:  # the first is the thread's, which waits for it
            pending.complete(SinkClosed("the sink was closed first", hook="save_output", argument="sink"))
        if late:
            names = [name for pending in late for name in unresolved(pending)]
            raise Undelivered(f"{len(late)} record(s) not copied out within {timeout} s", names, cure="wait longer")

    def _serve(self) -> None:
        """The thread: complete what comes, in order, until the sink is closed or gives up."""
        while (pending := self._queue.get()) is not None:
            try:
                self._keep(pending, complete_with(pending))
            except Exception:  # the output's own complete() failed: those after it are still to be served
                log.exception("a memory sink could not complete the output of step %d", pending.step)
            with self._lock:
                if self._given_up:
                    return
                self._left.popleft()

    def _keep(self, pending: PendingOutput, record: OutputRecord | None) -> None:
        if record is not None:
            self.records.append(record)
            pending.complete(None)
