"""The reader's socket and its sessions: bytes in, records and events out, in order."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping

import zmq
from hal_core import FrameError
from hal_core.frames import Frame, FrameHeader, FrameKind, decode_frame, split

from hal_engine.reading.connections import Connections
from hal_engine.reading.events import Event, FrameSkipped, SessionEnded, SessionLost
from hal_engine.reading.session import Session
from hal_engine.timeouts import TIMEOUTS, UNBOUNDED
from hal_engine.transport.curve import CurveKeys
from hal_engine.transport.parts import joined
from hal_engine.transport.protocol import Bye, Cursor, Empty, State, control, read_control
from hal_engine.transport.sockets import Bound
from hal_engine.transport.urls import socket_of

_OUTPUT = int(FrameKind.OUTPUT)  # reading an enum's member costs a call
#: Remembered sessions that ended or were lost, so that a late message of theirs does not start a new one.
_REMEMBERED = 4096
#: ZeroMQ checks the connections' events at least once in so many messages (100), while messages are available.
_COMMANDS_EVERY = 128
_log = logging.getLogger("hal_engine.reading")


class Receiver:
    """One bound socket. ``ready`` holds received items that the caller has not taken yet."""

    def __init__(
        self, url: str, after: Mapping[int, int], lost_after: float, grace: float, curve: CurveKeys | None = None
    ) -> None:
        now = time.monotonic()
        self._lost_after, self._grace, self._look_seconds = lost_after, grace, TIMEOUTS.reader_look
        self.sessions = {number: Session(number, now, sequence) for number, sequence in after.items()}
        self.ready: deque[tuple[Session, Frame] | Event] = deque()
        self.duplicates = self.skipped = self.frames = 0
        self._gone: dict[int, bool] = {}  # ended sessions -> whether they were lost
        self._bound = Bound(url, curve)
        self.socket = self._bound.socket
        try:
            self.connections = Connections(self.socket)
            endpoint = bytes(self.socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
            self.url = endpoint if socket_of(url) is None else url
        except BaseException:
            self._bound.give_up()
            raise
        self._leaving = False
        self.messages = self._warned = 0
        self._looked, self._patience = now, -1

    def receive(self, timeout: float = 0.0) -> bool:
        """Take messages until an item is ready, waiting up to ``timeout`` seconds. Return whether one is."""
        end = time.monotonic() + timeout
        while not self.ready:
            left = max(0.0, end - time.monotonic()) if timeout else 0.0
            if not self._receive_one(min(left, self._look_seconds)):
                self.look_for_losses(drained=True)
                if time.monotonic() >= end:
                    break
        return bool(self.ready)

    def _receive_one(self, timeout: float) -> bool:
        """Take one message, if one comes within ``timeout`` seconds."""
        milliseconds = 0 if timeout <= 0 else int(1000 * timeout) + 1
        if milliseconds != self._patience:
            self._patience = self.socket.rcvtimeo = milliseconds
        try:
            identity = self.socket.recv(copy=False)
        except zmq.Again:
            return False
        if not identity.more:  # the rest of a message that an interrupt split; its contents are requested again
            return True
        message = self.socket.recv(copy=False)  # parts of a message arrive together
        self.messages += 1
        parts = [message]
        while parts[-1].more:
            parts.append(self.socket.recv(copy=False))
        if len(parts) == 1 or self._bound.has_keys:
            self._take_message(identity.bytes, parts)
        else:
            self._skip(FrameError("a message in several parts", cure="connect hal's own sinks only"))
        return True

    def look_for_losses(self, *, drained: bool) -> None:
        """Declare sessions lost whose time is over, unless a message of theirs may be unread.

        Without ``drained`` that holds until enough messages of other sessions were read: ZeroMQ serves connections in
        turn.
        """
        self._watch_connections()
        self._looked = now = time.monotonic()
        turn = _COMMANDS_EVERY + 2 * (len(self.connections.there) + len(self.sessions))
        for session in list(self.sessions.values()):
            if self._lost_at(session) > now:
                session.overdue = None
            elif session.overdue is None:
                session.overdue = self.messages
            if session.overdue is not None and (drained or self.messages - max(session.overdue, session.met) > turn):
                self._lose(session, "its connection broke" if session.broken is not None else "it fell silent")

    def look_seconds(self) -> float:
        """Return how long a wait outside of :meth:`receive` may be."""
        return self._look_seconds if self.sessions else UNBOUNDED

    def acknowledge(self, session: Session, sequence: int) -> None:
        """Allow the sender to drop everything up to ``sequence``."""
        session.acknowledged = max(session.acknowledged, sequence)
        self._say(session, FrameKind.ACKNOWLEDGE, session.acknowledged)

    def close(self) -> None:
        """Wait for confirmation of the last acknowledgements from senders that are alive, and close."""
        try:
            self._take_leave(time.monotonic() + TIMEOUTS.reader_leave)
            self._close_sockets()
        finally:
            self._bound.release()

    def _close_sockets(self) -> None:
        self.connections.close()
        self._bound.close()

    def _take_leave(self, end: float) -> None:
        self._leaving = True
        there = {s.number: s for s in self.sessions.values() if s.expected is not None and s.broken is None}
        for session in there.values():
            self.acknowledge(session, session.acknowledged)
            self._ask(session)
        while there and (left := end - time.monotonic()) > 0:
            self.ready.clear()
            self._receive_one(min(left, TIMEOUTS.reader_slice))
            self._watch_connections()
            there = {n: s for n, s in there.items() if n in self.sessions and s.is_asking and s.broken is None}

    # Messages ----------------------------------------------------------------------------------------------------

    def _take_message(self, identity: bytes, parts: list[zmq.Frame]) -> None:
        """Take the frames of a message."""
        try:
            descriptor = int(parts[0].get(zmq.SRCFD))
        except zmq.ZMQError:  # a peer that greets as ZeroMQ 2 did, or whose first bytes look like it
            what = "a message of a peer that does not speak ZMTP 3"
            self._skip(FrameError(what, cure="connect hal's own sinks only"))
            return
        session: Session | None = None
        heard: Session | None = None
        try:
            for header, frame in split(joined(parts)):
                if session is None or session.number != header.session:
                    session = self._session_of(header, identity, descriptor)
                if session is None:
                    continue
                heard = session
                if header.kind == _OUTPUT:
                    self._take_output(session, header, frame)
                else:
                    self._take_word(session, header, frame)
                    session = None  # it may have ended
        except FrameError as error:  # the rest of this message cannot be found; if it was output, a gap will show it
            self._skip(error)
        if heard is not None and heard.heard - self._looked > self._look_seconds:
            self.look_for_losses(drained=False)

    def _session_of(self, header: FrameHeader, identity: bytes, descriptor: int) -> Session | None:
        """Return the session of the frame, creating it if it is new; None if it has ended."""
        session = self.sessions.get(header.session)
        if session is None:
            if header.session in self._gone:
                self._answer_the_gone(header, identity)
                return None
            session = self.sessions[header.session] = Session(header.session, time.monotonic())
        is_new, session.identity = session.identity is None, identity  # each connection has its own
        if is_new:
            session.sender = header.sender
            self._ask(session)
        if session.descriptor != descriptor:
            self._watch_connections()  # breaks before this connection concern the previous one
            if descriptor not in self.connections.there:
                session.breaks(time.monotonic())
            session.descriptor = descriptor
            self._bound.know_descriptor(descriptor)
            if session.broken is not None and not session.is_asking:
                self._ask(session)  # Messages of a dead sender may still be queued, but only a live one answers.
            self._lose_predecessors(session)
        session.heard, session.met = time.monotonic(), self.messages
        return session

    def _take_word(self, session: Session, header: FrameHeader, frame: memoryview) -> None:
        if header.kind == FrameKind.STATE:
            self._take_state(session, header, frame)
        elif header.kind == FrameKind.BYE:
            bye = read_control(header, frame, Bye)
            self._forget(session, lost=False)
            self.ready.append(SessionEnded(session.number, session.sender, header.sequence, bye.again))
        # other kinds are of a later revision, or not for readers

    def _take_output(self, session: Session, header: FrameHeader, frame: memoryview) -> None:
        if header.sequence == session.expected:
            try:
                decoded = decode_frame(header, frame)
            except FrameError as error:
                self._give_up_or_ask(session, header.sequence, error)
                return
            session.take(header.sequence, decoded.record)
            self.frames += 1
            self.ready.append((session, decoded))
        elif session.expected is not None and header.sequence < session.expected:
            self.duplicates += 1
        elif not session.is_asking:  # an earlier frame is missing
            self._ask(session)

    def _give_up_or_ask(self, session: Session, sequence: int, error: FrameError) -> None:
        self._skip(error)
        gap = session.unreadable(sequence, str(error))
        if gap is None:
            self._ask(session)
        else:
            self.ready.append(gap)

    def _take_state(self, session: Session, header: FrameHeader, frame: memoryview) -> None:
        try:
            state = read_control(header, frame, State)
        except FrameError as error:
            self._skip(error)
            return
        if event := session.hear(header.sequence, state):
            self.ready.append(event)
        if session.must_ask(header.sequence, session.heard):
            self._ask(session, anew=False)
        else:  # The last acknowledgement may be lost, and a sender continues only while it gets answers.
            self._say(session, FrameKind.ACKNOWLEDGE, session.acknowledged)

    def _skip(self, error: FrameError) -> None:
        self.skipped += 1
        self.ready.append(FrameSkipped(str(error)))
        self._warn(f"bytes skipped that are no frame: {error}")

    def _tell_refused(self) -> None:
        reasons, self.connections.refused = self.connections.refused, []
        for reason in reasons:
            self._warn(f"a connection that no sender has made: {reason}")

    def _warn(self, what: str) -> None:
        """Log it: the first occurrence, and then each that doubles their number."""
        self._warned += 1
        if self._warned & (self._warned - 1) == 0:
            _log.warning("%s: %s (%d so far)", self.url, what, self._warned)

    def _ask(self, session: Session, *, anew: bool = True) -> None:
        sequence, cursor = session.ask(time.monotonic(), anew=anew)
        cursor.leaving = self._leaving
        self._say(session, FrameKind.CURSOR, sequence, cursor)

    def _say(self, session: Session, kind: FrameKind, sequence: int, body: Cursor | Empty | None = None) -> None:
        if session.identity is not None:
            frame = control(kind, sequence, session=session.number, body=body or Empty())
            self._send(session.identity, frame)

    def _send(self, identity: bytes, frame: bytes) -> None:
        try:
            self._bound.send(identity, frame)
        except zmq.ZMQError as error:
            if error.errno not in (
                zmq.EAGAIN,
                zmq.EHOSTUNREACH,
            ):  # otherwise it is repeated at the sender's next message
                raise

    # Losses ------------------------------------------------------------------------------------------------------

    def _watch_connections(self) -> None:
        for descriptor in self.connections.broken():
            for session in self.sessions.values():
                if session.descriptor == descriptor:
                    session.breaks(time.monotonic())
        if self.connections.refused:
            self._tell_refused()

    def _lost_at(self, session: Session) -> float:
        silent = session.heard + self._lost_after
        return silent if session.broken is None else min(silent, session.broken + self._grace)

    def _lose_predecessors(self, session: Session) -> None:
        """Lose a restarted worker's previous session, which will not come back."""
        for other in list(self.sessions.values()):
            if other is not session and other.sender == session.sender and other.broken is not None:
                self._lose(other, "its worker was started again")

    def _lose(self, session: Session, why: str) -> None:
        self._forget(session, lost=True)
        self.ready.append(SessionLost(session.number, session.sender, session.last, list(session.requests), why))

    def _forget(self, session: Session, *, lost: bool) -> None:
        del self.sessions[session.number]
        self._gone[session.number] = lost
        while len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def _answer_the_gone(self, header: FrameHeader, identity: bytes) -> None:
        """Refuse frames of a lost session: its requests run elsewhere by now, and tokens would be delivered twice."""
        if self._gone[header.session]:
            self._send(identity, control(FrameKind.REFUSE, 0, session=header.session))
