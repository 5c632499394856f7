"""The sink of a group's first rank: its records go to the engine over the control channel."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from hal_core.frames import PendingOutput, complete_with, is_ready

from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.queued_sink import Deliveries, QueuedSink, closed

if TYPE_CHECKING:
    from .control_channel import ControlEnd

CAPACITY = 1024
"""Outputs that wait at most before ``put`` waits."""


class RecordSink(QueuedSink):
    """``put`` sends an output itself if nothing is to be waited for: a thread would cost two wakes. Else one thread
    resolves the outputs in order and sends them."""

    full_cure = "see why the engine does not read"

    def __init__(self, end: ControlEnd, deadline: float = TIMEOUTS.deadline) -> None:
        super().__init__(CAPACITY, deadline)
        self._end = end
        self._thread = threading.Thread(target=self._run, name="hal-records", daemon=True)
        self._thread.start()

    def put(self, pending: PendingOutput) -> None:
        """See :class:`hal_core.output.sinks.Sink`."""
        if os.getpid() == self._pid and is_ready(pending) and not self._end.channel.pending:
            with self._room:
                self._refuse_if_closed()
                if at_once := not self._outputs and self._in_hand is None:
                    self._in_hand = pending
            if at_once:
                self._send(pending)
                self._in_hand = None
                return
        super().put(pending)

    def close(self, timeout: float) -> None:
        """See :class:`hal_core.output.sinks.Sink`."""
        if not self._begin_close():
            return
        backlog = self._backlog()
        self._thread.join(min(timeout, threading.TIMEOUT_MAX))
        with self._room:
            self._stop = True
            names: Deliveries = self._in_hand_names()
        self._abandon_outputs(names)
        self._raise_undelivered(names, f"not within {timeout} s ({backlog})", "not sent to the engine: ")

    def _is_full(self) -> bool:
        return len(self._outputs) >= self._capacity

    def _wake_thread(self) -> None:
        self._room.notify_all()

    def _backlog(self) -> str:
        return f"{len(self._outputs)} queued"

    def _run(self) -> None:
        try:
            while (pending := self._next()) is not None:
                self._take(pending)
                self._in_hand = None
        except BaseException as error:  # noqa: BLE001 (whatever it was, callers must learn that nothing leaves now)
            self._failure = self._failure or closed(f"the sender thread failed: {error!r}")
        with self._room:
            if self._failure is not None:
                self._abandon_outputs([])
            self._room.notify_all()

    def _next(self) -> PendingOutput | None:
        with self._room:
            while not (self._outputs or self._closing or self._stop):
                self._room.wait()
            if self._stop or not self._outputs:
                return None
            self._in_hand = self._outputs.popleft()
            self._room.notify_all()
            return self._in_hand

    def _take(self, pending: PendingOutput) -> None:
        self._send(pending)
        channel = self._end.channel
        while channel.pending and not self._stop:  # an engine that is stopped for a while reads later
            channel.flush(TIMEOUTS.look)
        if self._failure is not None:
            raise self._failure

    def _send(self, pending: PendingOutput) -> None:
        if (record := complete_with(pending)) is None:
            return
        try:
            self._end.send_record(record)
        except Exception as error:  # noqa: BLE001 (handed on to the ticket, which raises it)
            pending.complete(error)
            return
        pending.complete(None)
        if not self._end.channel.is_read:
            self._failure = closed("the engine takes no records any more")
