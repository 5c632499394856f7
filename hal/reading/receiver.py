"""The reader's socket and its sessions: bytes in, records and events out, in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import zmq
from hal_core.errors import FrameError
from hal_core.frames import Frame, FrameHeader, FrameKind, decode_frame, split
from zmq.utils.monitor import recv_monitor_message

from hal.reading.events import Event, FrameSkipped, SessionEnded, SessionLost
from hal.reading.session import Session, Verdict
from hal.transport.protocol import Cursor, Empty, State, control, read_control
from hal.transport.sockets import bound

#: Sessions that ended or were lost are remembered, so that a late word of theirs is not taken for a new one.
_REMEMBERED = 4096


class Receiver:
    """One bound socket. ``ready`` holds what was received and not yet given to the caller."""

    def __init__(self, url: str, after: Mapping[int, int], lost_after: float, grace: float) -> None:
        now = time.monotonic()
        self._lost_after, self._grace = lost_after, grace
        self.sessions = {number: Session(number, now, sequence) for number, sequence in after.items()}
        self.ready: deque[tuple[Session, Frame] | Event] = deque()
        self.duplicates = self.skipped = self.frames = 0
        self._gone: dict[int, bool] = {}  # sessions that are over -> whether they were lost
        self._context = zmq.Context()
        self.socket = bound(self._context, url)
        self.url = bytes(self.socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._connected: set[int] = set()  # descriptors
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self.monitor, zmq.POLLIN)

    def receive(self) -> bool:
        """Take messages that are here, without waiting, until something is ready. Return whether something is."""
        while not self.ready and int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            identity, message = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)[:2]
            self._take_message(identity.bytes, message)
        return bool(self.ready)

    def wait(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for a message, a broken connection, or the time a session counts as lost."""
        self._poller.poll(int(1000 * max(0.0, min(timeout, self.seconds_to_next_loss()))) + 1)
        self.look_for_losses()

    def seconds_to_next_loss(self) -> float:
        """How long until a session will count as lost if nothing is heard."""
        now = time.monotonic()
        return min((self._lost_at(session) - now for session in self.sessions.values()), default=3600.0)

    def look_for_losses(self) -> None:
        """Declare sessions lost whose time is over, unless there are messages that were not looked at yet."""
        self._watch_connections()
        if int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            return
        now = time.monotonic()
        for session in [session for session in self.sessions.values() if self._lost_at(session) <= now]:
            self._lose(session, "its connection broke" if session.broken is not None else "it fell silent")

    def acknowledge(self, session: Session, sequence: int) -> None:
        """Tell the sender that it may forget everything up to ``sequence``."""
        session.acknowledged = max(session.acknowledged, sequence)
        self._say(session, FrameKind.ACKNOWLEDGE, session.acknowledged)

    def close(self) -> None:
        """Close the socket, giving the last acknowledgements a moment to leave."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=500)
        self._context.term()

    # Messages ----------------------------------------------------------------------------------------------------

    def _take_message(self, identity: bytes, message: zmq.Frame) -> None:
        descriptor = message.get(zmq.SRCFD)
        try:
            for header, frame in split(message.buffer):
                session = self._session_of(header, identity, int(descriptor))
                if session is not None:
                    self._take_frame(session, header, frame)
        except FrameError as error:  # what follows in this message cannot be found; if it was output, a hole shows it
            self._skip(error)

    def _session_of(self, header: FrameHeader, identity: bytes, descriptor: int) -> Session | None:
        """Return the session that the frame belongs to, getting to know it; None if it is over."""
        session = self.sessions.get(header.session)
        if session is None:
            if header.session in self._gone:
                self._answer_the_gone(header, identity)
                return None
            session = self.sessions[header.session] = Session(header.session, time.monotonic())
        if session.identity is None:
            session.identity, session.sender = identity, header.sender
            self._ask(session)
        if session.descriptor != descriptor:
            self._watch_connections()  # what broke before this connection was made concerns the former one
            if descriptor not in self._connected:
                session.breaks(time.monotonic())
            session.descriptor = descriptor
            if session.broken is not None and not session.is_asking:
                self._ask(session)  # words of the dead may still be in the queue, but only the living answer
            self._lose_predecessors(session)
        session.heard = time.monotonic()
        return session

    def _take_frame(self, session: Session, header: FrameHeader, frame: memoryview) -> None:
        if header.kind == FrameKind.OUTPUT:
            self._take_output(session, header, frame)
        elif header.kind == FrameKind.STATE:
            self._take_state(session, header, frame)
        elif header.kind == FrameKind.BYE:
            read_control(header, frame, Empty)
            self._forget(session, lost=False)
            self.ready.append(SessionEnded(session.number, session.sender, header.sequence))
        # other kinds are of a later revision, or not for readers

    def _take_output(self, session: Session, header: FrameHeader, frame: memoryview) -> None:
        verdict = session.judge(header.sequence)
        if verdict is Verdict.DUPLICATE:
            self.duplicates += 1
        elif verdict is Verdict.TAKE:
            try:
                decoded = decode_frame(header, frame)
            except FrameError as error:
                self._skip(error)
                gap = session.unreadable(header.sequence, str(error))
                if gap is None:
                    self._ask(session)
                else:
                    self.ready.append(gap)
                return
            session.take(decoded.record)
            self.frames += 1
            self.ready.append((session, decoded))
        elif not session.is_asking:
            self._ask(session)

    def _take_state(self, session: Session, header: FrameHeader, frame: memoryview) -> None:
        try:
            state = read_control(header, frame, State)
        except FrameError as error:
            self._skip(error)
            return
        if event := session.hear(header.sequence, state):
            self.ready.append(event)
        if session.must_ask(header.sequence, session.heard):
            self._ask(session)
        elif state.oldest <= session.acknowledged:  # the last acknowledgement may not have arrived
            self._say(session, FrameKind.ACKNOWLEDGE, session.acknowledged)

    def _skip(self, error: FrameError) -> None:
        self.skipped += 1
        self.ready.append(FrameSkipped(str(error)))

    def _ask(self, session: Session) -> None:
        sequence, cursor = session.ask(time.monotonic())
        self._say(session, FrameKind.CURSOR, sequence, cursor)

    def _say(self, session: Session, kind: FrameKind, sequence: int, body: Cursor | Empty | None = None) -> None:
        if session.identity is not None:
            frame = control(kind, sequence, session=session.number, body=body or Empty())
            self._send(session.identity, frame)

    def _send(self, identity: bytes, frame: bytes) -> None:
        try:
            self.socket.send_multipart([identity, frame], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):  # else it is repeated when the sender is heard of
                raise

    # Losses ------------------------------------------------------------------------------------------------------

    def _watch_connections(self) -> None:
        """Note which connections came and went. Descriptors are reused, so the order of these events counts."""
        while int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self.monitor, zmq.DONTWAIT)
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connected.add(descriptor)
                continue
            self._connected.discard(descriptor)
            for session in self.sessions.values():
                if session.descriptor == descriptor:
                    session.breaks(time.monotonic())

    def _lost_at(self, session: Session) -> float:
        silent = session.heard + self._lost_after
        return silent if session.broken is None else min(silent, session.broken + self._grace)

    def _lose_predecessors(self, session: Session) -> None:
        """A worker that is there again will not come back in its former session."""
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
        """A lost session's requests run elsewhere by now: taking more of it would deliver tokens twice."""
        if self._gone[header.session]:
            self._send(identity, control(FrameKind.REFUSE, 0, session=header.session))
