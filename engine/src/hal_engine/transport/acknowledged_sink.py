"""The sink whose frames a reader acknowledges, in a bounded window (:mod:`hal_engine.transport.protocol`).

``put`` only queues. One thread resolves the outputs in order and encodes them. It holds each frame until the reader has
acknowledged it. It sleeps in one poll on its connection and on a pipe by which ``put`` wakes it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING

from hal_core.frames import PendingOutput, complete_with, encode, is_ready

from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.delivery import Delivery, hello_of
from hal_engine.transport.descriptors import SENDER, check_descriptors
from hal_engine.transport.protocol import Bye
from hal_engine.transport.queued_sink import Deliveries, QueuedSink, closed
from hal_engine.transport.window import Window

if TYPE_CHECKING:
    from hal_engine.transport.curve import CurveKeys

#: Bytes that are encoded before they are sent while outputs wait: then each poll serves many frames.
_TAKE_BYTES = 1 << 18
#: write(2) that keeps the interpreter's lock: ``os.write`` would pass it to the woken thread. The caller of ``put``
#: would then wait until that thread has built and encoded the record.
_write = ctypes.PyDLL(None).write
_write.argtypes, _write.restype = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_ssize_t


class AcknowledgedSink(QueuedSink):
    """See :func:`hal_engine.transport.open_sink`."""

    detects_loss = True
    full_cure = "start the reader, have it acknowledge, or raise capacity and deadline"

    def __init__(
        self,
        url: str,
        *,
        capacity: int,
        capacity_bytes: int,
        deadline: float,
        heartbeat: float,
        sender: int,
        curve: CurveKeys | None,
    ) -> None:
        super().__init__(capacity, deadline)
        self.sender, self.url = sender, url
        self.again = False  #: set before ``close``: the worker restarts, and readers are to wait for it
        self._capacity_bytes, self._has_key = capacity_bytes, curve is not None
        self._window = Window()
        self._is_reported = False  # close() has named the undelivered outputs and those being resolved
        self._sleeping = False
        self._abandoned: Deliveries = []  # outputs that the thread abandoned when it failed
        self._wake_end, self._wake = _pipe(url)
        try:
            hello = hello_of(self.session, sender, capacity)
            self._delivery = Delivery(url, curve, self._window, hello, heartbeat)
            self._thread = threading.Thread(target=self._run, name=f"hal-sink-{sender}", daemon=True)
            self._thread.start()
        except BaseException:  # also where the process may start no more threads
            if hasattr(self, "_delivery"):
                self._delivery.part(0.0, None)
            self._close_pipe()
            raise

    def close(self, timeout: float) -> None:
        """See :class:`hal_core.output.sinks.Sink`."""
        backlog = self._backlog()
        if not self._begin_close():
            return
        self._thread.join(min(timeout, threading.TIMEOUT_MAX))
        if self._thread.is_alive():
            self._stop = True
            self._wake_thread()
            self._thread.join(TIMEOUTS.parting)
        self._report_undelivered(timeout, backlog)

    def counters(self) -> dict[str, int]:
        """Return frames made, waiting for their copy-out, not acknowledged, sent again; bytes not acknowledged."""
        window = self._window
        return {
            "frames": window.next - 1,
            "queued": len(self._outputs),
            "unacknowledged": len(window),
            "unacknowledged_bytes": window.nbytes,
            "resent": window.resent,
        }

    # The caller's side -------------------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        return len(self._outputs) + len(self._window) >= self._capacity or self._window.nbytes >= self._capacity_bytes

    def _wake_for_output(self) -> None:
        if self._sleeping:
            self._sleeping = False  # one wake-up is enough
            self._wake_thread()

    def _backlog(self) -> str:
        counts = self.counters()
        trouble = self._delivery.trouble
        nobody = f"; no reader answers on {self.url}{' with this key' * self._has_key}"
        silent = "" if self._delivery.is_granted else f"{nobody}: {trouble}" if trouble else nobody
        return f"{counts['queued']} queued, {counts['unacknowledged']} unacknowledged{silent}"

    def _close_pipe(self) -> None:
        os.close(self._wake)
        os.close(self._wake_end)

    def _wake_thread(self) -> None:
        _write(self._wake, b"w", 1)  # full: it is being woken; closed: it has left

    def _report_undelivered(self, timeout: float, backlog: str) -> None:
        """Complete the outputs that the thread left, and name all that no reader has acknowledged."""
        with self._room:
            self._is_reported = True
            names = self._window.deliveries() + self._abandoned + self._in_hand_names()
        self._abandon_outputs(names)
        self._raise_undelivered(names, f"not within {timeout} s ({backlog})", "not acknowledged by a reader: ")

    # The thread's side -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop and not (self._closing and self._is_drained()):
                self._take_outputs()
                self._follow()
                self._sleep()
        except BaseException as error:  # noqa: BLE001  # whatever it was, callers must learn that nothing leaves now
            self._failure = self._failure or closed(f"the sender thread failed: {error!r}")
        finally:
            self._leave()

    def _leave(self) -> None:
        """Close everything, and wake the callers that wait for room: there will be none."""
        is_over = self._stop or self._failure is not None
        bye = None if is_over else Bye(self._window.next - 1, self.again)
        self._delivery.part(0.0 if is_over else TIMEOUTS.parting / 2, bye)  # close() waits twice as long
        with self._room:
            self._sleeping = False
            try:
                if self._failure is not None:
                    self._abandon_outputs(self._abandoned)
            finally:
                os.close(self._wake)
                self._wake = -1
                self._room.notify_all()
        os.close(self._wake_end)

    def _is_drained(self) -> bool:
        return self._failure is not None or not (self._outputs or len(self._window))

    def _take_outputs(self) -> None:
        """Resolve and encode outputs, up to a few messages, as long as they are ready."""
        size = 0
        while self._outputs and size < _TAKE_BYTES and not self._stop:
            with self._room:  # close() finds it here or there
                if not self._outputs:
                    return
                self._in_hand = pending = self._outputs.popleft()
            size += self._take(pending)
            self._in_hand = None
            if not (self._outputs and is_ready(self._outputs[0])):
                return

    def _take(self, pending: PendingOutput) -> int:
        record = complete_with(pending)
        if record is None:
            return 0
        try:
            frame = encode(record, session=self.session, sender=self.sender, sequence=self._window.next)
        except Exception as error:  # noqa: BLE001  # handed on to the ticket, which raises it
            pending.complete(error)
            return 0
        with self._room:  # it is named once: as the output being resolved or, from here on, as part of the window
            is_named = self._is_reported
            if not is_named:
                self._window.add(frame)
                self._in_hand = None
        pending.complete(closed("the sink was closed first") if is_named else None)
        return len(frame)

    def _follow(self) -> None:
        """Exchange messages with the reader, and tell the waiting callers that there is room."""
        if self._delivery.follow():
            with self._room:
                self._room.notify_all()
        if self._delivery.refused:
            self._failure = closed(f"the reader takes nothing more: {self._delivery.refused}")
            self._stop = True

    def _sleep(self) -> None:
        """Wait for an output, or for an event of the connection."""
        self._sleeping = True  # from here on put() wakes this thread; outputs queued before are seen below
        try:
            is_over = self._stop or (self._closing and self._is_drained())
            if not self._outputs and not is_over and self._delivery.wait(self._wake_end):
                os.read(self._wake_end, 4096)
        finally:
            self._sleeping = False


def _pipe(url: str) -> tuple[int, int]:
    """Return both ends of a pipe, neither of which blocks. Raises Unavailable if too few descriptors are free for a
    sink."""
    check_descriptors(SENDER, f"a sink for {url}", argument="url")
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends
