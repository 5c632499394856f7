"""A reader's connections and sessions: frames in, records and events out, in order."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping

from hal_core import FrameError
from hal_core.frames import Frame, decode_frame, split

from hal_engine.reading.events import Event, FrameSkipped, SessionEnded, SessionLost
from hal_engine.reading.session import Session
from hal_engine.timeouts import TIMEOUTS, UNBOUNDED
from hal_engine.transport.channel import CLOSED, Channel
from hal_engine.transport.curve import CurveKeys
from hal_engine.transport.hub import Hub
from hal_engine.transport.protocol import (
    CONTROL,
    OUTPUT,
    VERSION,
    Acknowledge,
    Bye,
    Hello,
    decode_control,
    encode_control,
)

#: Remembered sessions that ended or were lost, so that a late connection of theirs does not start a new one.
_REMEMBERED = 4096
_log = logging.getLogger("hal.reading")


class Receiver:
    """One listening address. ``ready`` holds received items that the caller has not taken yet."""

    def __init__(
        self, url: str, after: Mapping[int, int], lost_after: float, grace: float, keys: CurveKeys | None = None
    ) -> None:
        now = time.monotonic()
        self._lost_after, self._grace, self._look_seconds = lost_after, grace, TIMEOUTS.look
        self.sessions = {number: Session(number, now, sequence) for number, sequence in after.items()}
        self.ready: deque[tuple[Session, Frame] | Event] = deque()
        self.duplicates = self.skipped = self.frames = 0
        self._gone: dict[int, bool] = {}  # ended sessions -> whether they were lost
        self.hub = Hub("records", url, keys)
        self.url = self.hub.url
        self._of: dict[Channel, Session] = {}
        self._new: dict[Channel, float] = {}  # connections without a first message -> since when
        self._warned = 0

    def receive(self, timeout: float = 0.0) -> bool:
        """Take what comes until an item is ready, waiting up to ``timeout`` seconds. Return whether one is."""
        end = time.monotonic() + timeout
        while not self.ready:
            left = max(0.0, end - time.monotonic()) if timeout else 0.0
            self._receive(min(left, self._look_seconds))
            self._look_for_losses()
            if time.monotonic() >= end:
                break
        return bool(self.ready)

    def look_seconds(self) -> float:
        """Return how long a wait outside of :meth:`receive` may be."""
        return self._look_seconds if self.sessions else UNBOUNDED

    def acknowledge(self, session: Session, sequence: int) -> None:
        """Allow the sink to drop everything up to ``sequence``."""
        session.acknowledged = max(session.acknowledged, sequence)
        if session.channel is not None:
            session.channel.send(encode_control(Acknowledge(session.acknowledged)))

    def close(self) -> None:
        """Close after sinks that are alive have received the last acknowledgements."""
        try:
            self.hub.farewell(TIMEOUTS.parting)
        finally:
            self.hub.close()

    # Messages ----------------------------------------------------------------------------------------------------

    def _receive(self, timeout: float) -> None:
        for channel, frame in self.hub.receive(timeout):
            if frame is None:
                self._end(channel)
            elif channel.ended != CLOSED:  # over a frame before this one
                try:
                    self._take(channel, frame)
                except FrameError as error:
                    self._skip(channel, error)

    def _take(self, channel: Channel, frame: memoryview) -> None:
        session = self._of.get(channel)
        kind, body = bytes(frame[:1]), frame[1:]
        if session is not None and kind == OUTPUT:
            self._take_output(session, body)
            return
        if kind != CONTROL:
            raise FrameError("a frame that no sink sends", cure="connect hal's own sinks only")
        message = decode_control(body)
        if isinstance(message, Hello) and session is None:
            self._greet(channel, message)
        elif isinstance(message, Bye) and session is not None:
            self._forget(session, lost=False)
            self.ready.append(SessionEnded(session.number, session.sender, message.last, message.again))
            self.hub.drop(channel)

    def _greet(self, channel: Channel, hello: Hello) -> None:
        """Take a connection's first message, and answer where to continue."""
        if hello.version != VERSION:
            self._refuse(channel, f"its version is {hello.version}, the reader's {VERSION}: install one version")
            return
        if (lost := self._gone.get(hello.session)) is not None:
            if lost:  # its requests run elsewhere by now, and tokens would be delivered twice
                self._refuse(channel, "it has declared this session lost")
            else:
                self.hub.drop(channel)
            return
        session = self.sessions.setdefault(hello.session, Session(hello.session, time.monotonic()))
        if (former := session.channel) is not None:
            del self._of[former]
            self.hub.drop(former)
        self._of[channel] = session
        if (event := session.begin(hello, channel)) is not None:
            self.ready.append(event)
        channel.send(encode_control(Acknowledge(session.acknowledged, session.last)))
        self._lose_predecessors(session)

    def _take_output(self, session: Session, body: memoryview) -> None:
        expected, found = session.expected, list(split(body))
        if len(found) != 1 or found[0][0].session != session.number:
            raise FrameError("it is no frame of this session", cure="connect hal's own sinks only")
        (header, frame), number = found[0], found[0][0].sequence
        if expected is not None and number < expected:
            self.duplicates += 1
            return
        if number != expected:
            raise FrameError(f"frame {number} came in the place of {expected}", cure="connect hal's own sinks only")
        try:
            decoded = decode_frame(header, frame)
        except FrameError as error:
            if (gap := session.unreadable(number, str(error))) is None:
                raise
            self.skipped += 1
            self.ready.append(gap)
            return
        session.take(number, decoded.record)
        self.frames += 1
        self.ready.append((session, decoded))

    def _refuse(self, channel: Channel, why: str) -> None:
        channel.send(encode_control(Bye(why=why)))
        channel.finish()  # its end follows
        self._warn(f"a sink is refused: {why}")

    def _skip(self, channel: Channel, error: FrameError) -> None:
        """Close a connection that sent what is no frame; a sink sends again what is missing."""
        self.skipped += 1
        self.ready.append(FrameSkipped(str(error)))
        self._warn(f"bytes skipped that are no frame: {error}")
        self.hub.drop(channel)
        self._end(channel)

    def _warn(self, what: str) -> None:
        """Log it: the first occurrence, and then each that doubles their number."""
        self._warned += 1
        if self._warned & (self._warned - 1) == 0:
            _log.warning("%s: %s (%d so far)", self.url, what, self._warned)

    # Losses ------------------------------------------------------------------------------------------------------

    def _end(self, channel: Channel) -> None:
        if (session := self._of.pop(channel, None)) is None:
            self._warn(f"a connection that no sink has made: {channel.ended}")
        elif session.channel is channel:
            session.breaks(time.monotonic())

    def _look_for_losses(self) -> None:
        """Declare sessions lost whose time is over. All that had come was received before. If connections are among it
        whose first message has not come, one may be the session's: it came while this reader was away."""
        now = time.monotonic()
        self._new = {one: self._new.get(one, now) for one in self.hub.channels if one not in self._of}
        for channel in [one for one, since in self._new.items() if now - since > TIMEOUTS.greeting]:
            self.hub.drop(channel)
        for session in list(self.sessions.values()):
            if session.channel is not None:
                session.heard = session.channel.heard
            why = "its connection broke" if session.broken is not None and now - session.broken > self._grace else ""
            why = why or ("it fell silent" if now - session.heard > self._lost_after else "")
            session.overdue = (session.overdue or now) if why else 0.0
            if why and (not self._new or now - session.overdue > TIMEOUTS.greeting):
                self._lose(session, why)

    def _lose_predecessors(self, session: Session) -> None:
        """Lose a restarted worker's previous session, which will not come back."""
        for other in list(self.sessions.values()):
            if other is not session and other.sender == session.sender and other.broken is not None:
                self._lose(other, "its worker was started again")

    def _lose(self, session: Session, why: str) -> None:
        if (channel := session.channel) is not None:
            self.hub.drop(channel)
        self._forget(session, lost=True)
        self.ready.append(SessionLost(session.number, session.sender, session.last, list(session.requests), why))

    def _forget(self, session: Session, *, lost: bool) -> None:
        del self.sessions[session.number]
        if session.channel is not None:
            self._of.pop(session.channel, None)
        self._gone[session.number] = lost
        while len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]
