"""Messages between a sink and its reader (:mod:`hal_engine.transport.protocol` defines them). Used only by the sink's
thread.

The sink puts encoded frames into the window. This module sends them to the reader that has sent a cursor, and handles
the reader's messages about them.
"""

from __future__ import annotations

import time

import zmq
from hal_core import FrameError
from hal_core.frames import FrameKind, split

from hal_engine.transport.connection import Connection
from hal_engine.transport.protocol import MESSAGE_BYTES, Bye, Cursor, State, control, read_control
from hal_engine.transport.window import Window

_DONTWAIT = int(zmq.DONTWAIT)  # converted once: an enum costs a call
#: Heartbeats without an answer after which the reader gets no more: for a reader that does not read, the queue would
#: grow without limit. A reader answers each heartbeat that it reads.
_MOST_UNANSWERED = 8
#: Messages that are received before the sink continues with its own work.
_TAKE_WORDS = 256


class Sender:
    """One session's end of the connection: the frames that ``window`` holds go over ``connection``."""

    def __init__(
        self, connection: Connection, window: Window, *, session: int, sender: int, capacity: int, heartbeat: float
    ) -> None:
        """``heartbeat``: seconds between two messages of a sender that is otherwise idle."""
        self._connection, self._window = connection, window
        self._session, self._sender = session, sender
        self._capacity, self._heartbeat = capacity, heartbeat
        self.is_granted = False  #: whether a reader has sent its cursor
        self.is_refused = False  #: whether it has declared the session lost
        self._owed: int | None = 0  # the token of the cursor to answer with a STATE; 0 is the greeting
        self._next_beat = 0.0
        self._unanswered = 0  # heartbeats since the reader's last message

    def follow_connection(self) -> None:
        """Greet the peer of a new connection."""
        if self._connection.follow():
            self._unanswered = 0
            self._owed = self._owed or 0

    def transmit(self) -> None:
        """Send the due messages: answer or heartbeat first, then unsent frames, until ZeroMQ accepts no more."""
        now = time.monotonic()
        if self._owed is None and now >= self._next_beat:
            self._next_beat = now + self._heartbeat
            if self._unanswered < _MOST_UNANSWERED:
                self._owed = 0
        if self._owed is not None:
            if not self._connection.send(self._state(self._owed)):
                return
            self._unanswered += self._owed == 0
            self._owed, self._next_beat = None, now + self._heartbeat
        window = self._window
        while self.is_granted and not window.is_sent:
            message, count = window.message(MESSAGE_BYTES)
            if not self._connection.send(message):
                return
            window.sent(count)

    def receive(self) -> bool:
        """Handle the reader's messages. Return whether the window dropped frames, so that there is room."""
        before = self._window.first
        for _ in range(_TAKE_WORDS):
            try:
                message = self._connection.socket.recv(_DONTWAIT)
            except zmq.Again:
                break
            try:
                for header, frame in split(message):
                    if header.session == self._session:
                        self._unanswered = 0
                        self._obey(header.kind, header.sequence, frame)
            except FrameError:  # not from a reader of ours; a reader of ours repeats its request in its next message
                continue
        return self._window.first > before

    def wait(self) -> bool:
        """Wait for a message of the reader, room in ZeroMQ if something is due, the wake end, or the next heartbeat.

        Return whether the wake end ended the wait.
        """
        due = self._owed is not None or (self.is_granted and not self._window.is_sent)
        until = self._next_beat if self._owed is None else time.monotonic() + self._heartbeat
        return self._connection.wait(until, due=due)

    def say_good_bye(self, *, again: bool) -> None:
        """Tell the reader that the session has ended; ``again``: until the worker restarts.

        A reader that was greeted may not have answered yet: without frames the sender has not waited for its answer.
        """
        if self.is_granted or self._window.next == 1:
            last, numbers = self._window.next - 1, {"session": self._session, "sender": self._sender}
            self._connection.send(control(FrameKind.BYE, last, **numbers, body=Bye(again)))

    def _obey(self, kind: int, sequence: int, frame: memoryview) -> None:
        if kind == FrameKind.ACKNOWLEDGE:
            self._window.acknowledge(sequence)
        elif kind == FrameKind.CURSOR:
            cursor = read_control(next(split(frame))[0], frame, Cursor)
            self._window.rewind(sequence if cursor.explicit else 0)
            self.is_granted, self._owed = not cursor.leaving, cursor.token
        elif kind == FrameKind.REFUSE:
            self.is_refused = True

    def _state(self, echo: int) -> bytes:
        window = self._window
        body = State(window.first, self._capacity, echo)
        return control(FrameKind.STATE, window.next - 1, session=self._session, sender=self._sender, body=body)
