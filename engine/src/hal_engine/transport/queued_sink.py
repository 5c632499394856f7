"""Base of sinks whose ``put`` only queues: outputs that one thread resolves in order and sends."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import ClassVar

from hal_core import HalError, SinkClosed, SinkFull, Undelivered
from hal_core.frames import PendingOutput, new_session, unknown, unresolved

Deliveries = list[tuple[str, int, int]]


class QueuedSink(ABC):
    """The caller's side of such a sink: a bounded queue, a deadline for room in it, and an end that names what is lost.

    The thread takes from ``_outputs`` under ``_room``, keeps the output that it resolves in ``_in_hand``, and puts its
    error into ``_failure``. Used by one process: a forked copy refuses ``put`` and ignores ``close``.
    """

    full_cure: ClassVar[str]
    """Cure of the error that the queue is full."""

    def __init__(self, capacity: int, deadline: float) -> None:
        self.session = new_session()
        self._capacity, self._deadline = capacity, deadline
        self._outputs: deque[PendingOutput] = deque()
        self._in_hand: PendingOutput | None = None  # being resolved
        self._room = threading.Condition()  # notified when there may be room; guards what follows
        self._closing = self._stop = False
        self._failure: HalError | None = None
        self._pid = os.getpid()

    def put(self, pending: PendingOutput) -> None:
        """See :class:`hal_core.output.sinks.Sink`."""
        if os.getpid() != self._pid:  # before the lock, which another thread may have held when this process forked
            raise closed("the sink belongs to the process that this one forked from")
        with self._room:
            self._refuse_if_closed()
            full = self._is_full() and not self._room.wait_for(self._has_room_or_ended, self._deadline)
            self._refuse_if_closed()
            self._outputs.append(pending)
            self._wake_for_output()
        if full:
            raise SinkFull(
                f"no room for {self._deadline} s, step {pending.step} is kept all the same: {self._backlog()}",
                cure=self.full_cure,
                hook="save_output",
                argument="sink",
            )

    @abstractmethod
    def _is_full(self) -> bool: ...

    @abstractmethod
    def _wake_thread(self) -> None:
        """Wake the thread; called with ``_room`` held."""

    def _wake_for_output(self) -> None:
        """Wake the thread if it waits for an output; called with ``_room`` held."""
        self._wake_thread()

    @abstractmethod
    def _backlog(self) -> str:
        """Describe the outputs that have not left."""

    def _has_room_or_ended(self) -> bool:
        return not self._is_full() or self._closing or self._failure is not None

    def _refuse_if_closed(self) -> None:
        if self._failure is not None:
            raise closed(self._failure.what, self._failure.cure)
        if self._closing:
            raise closed("the sink is closed")

    def _begin_close(self) -> bool:
        """Refuse further outputs. Return False if the sink is closed already, and in a forked process."""
        if os.getpid() != self._pid:
            return False
        with self._room:
            if self._closing:
                return False
            self._closing = True
            self._wake_thread()
            self._room.notify_all()
        return True

    def _abandon_outputs(self, names: Deliveries) -> None:
        """Complete the outputs that were never resolved, and add their deliveries to ``names``."""
        error = self._failure or closed("the sink was closed first")
        while self._outputs:
            pending = self._outputs.popleft()
            names += unresolved(pending)
            pending.complete(error)

    def _in_hand_names(self) -> Deliveries:
        """Return the deliveries of the output that the thread still resolves."""
        return [] if (in_hand := self._in_hand) is None else list(unknown(in_hand))

    def _raise_undelivered(self, names: Deliveries, why: str, where: str = "") -> None:
        """Raise :class:`Undelivered` if there are ``names``; the thread's error takes the place of ``why``."""
        if names:
            listed = ", ".join(f"{name} at {position} ({count} tokens)" for name, position, count in names[:8])
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            why = why if self._failure is None else self._failure.what
            cure = "check that its reader runs, and run these requests again"
            raise Undelivered(f"{where}{listed}{more}: {why}", names, cure=cure)


def closed(what: str, cure: str = "open a new one") -> SinkClosed:
    """Return the error of a sink that takes no outputs."""
    return SinkClosed(what, cure=cure, hook="save_output", argument="sink")
