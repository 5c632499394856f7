"""What a sink and its reader say to each other (:mod:`hal.transport.protocol` has the words). Its thread's alone.

The sink makes frames and puts them into the window. Here they are sent to whoever has given a cursor, and what that
reader says about them is heard.
"""

from __future__ import annotations

import time

import zmq
from hal_core import FrameError
from hal_core.frames import FrameKind, split

from hal.transport.connection import Connection
from hal.transport.protocol import MESSAGE_BYTES, Bye, Cursor, State, control, read_control
from hal.transport.window import Window

_DONTWAIT = int(zmq.DONTWAIT)  # enums cost a call
#: Heartbeats after which a reader that has said nothing meanwhile gets no more: what waits for one that does not read
#: would grow without end. It answers each of those it reads.
_MOST_UNANSWERED = 8
#: Messages that are taken before the sink looks after its own again.
_TAKE_WORDS = 256


class Wire:
    """One session's end of the wire: the frames that ``window`` holds go over ``connection``."""

    def __init__(
        self, connection: Connection, window: Window, *, session: int, sender: int, capacity: int, heartbeat: float
    ) -> None:
        """``heartbeat``: seconds between two words of a sender that has nothing else to say."""
        self._connection, self._window = connection, window
        self._session, self._sender = session, sender
        self._capacity, self._heartbeat = capacity, heartbeat
        self.is_granted = False  #: whether a reader has given its cursor
        self.is_refused = False  #: whether it has declared the session lost
        self._owed: int | None = 0  # the token of the cursor to answer with a STATE; 0 is the greeting
        self._next_beat = 0.0
        self._unanswered = 0  # heartbeats since the reader was heard of

    def follow_connection(self) -> None:
        """Greet whoever is at the other end of a new connection."""
        if self._connection.follow():
            self._unanswered = 0
            self._owed = self._owed or 0

    def transmit(self) -> None:
        """Send what is due: answer or heartbeat first, then unsent frames, until ZeroMQ takes no more."""
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
        """Hear what the reader says. Return whether the window forgot frames, so that there is room."""
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
            except FrameError:  # not from a reader of ours; if it was, its next word repeats what it wants
                continue
        return self._window.first > before

    def wait(self) -> bool:
        """Wait for a word of the reader, room in ZeroMQ if something is due, the wake end, or the next heartbeat.

        Return whether it was the wake end.
        """
        due = self._owed is not None or (self.is_granted and not self._window.is_sent)
        until = self._next_beat if self._owed is None else time.monotonic() + self._heartbeat
        return self._connection.wait(until, due=due)

    def say_good_bye(self, *, again: bool) -> None:
        """Tell a reader that this was all; ``again``: until the worker is started again.

        A reader that was greeted may not have answered yet: without frames nothing has waited for its answer.
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
