"""A sink's connections to its reader, one after another. Used only by the sink's thread.

It looks for a reader until there is one, sends what the window holds, and handles what the reader answers.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
from typing import TYPE_CHECKING

from hal_core import FrameError, HalError, Unavailable

from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.channel import Channel, connect
from hal_engine.transport.places import check_is_socket
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
from hal_engine.transport.urls import check_named_port, socket_of
from hal_engine.transport.window import Window

if TYPE_CHECKING:
    from hal_engine.transport.curve import CurveKeys

_ROOM = 1 << 18
"""Bytes in the channel before it takes no more frames: the rest waits in the window, where it is counted."""
_log = logging.getLogger("hal.transport")


class Delivery:
    """One session's way to the reader at ``url``.

    ``refused``: why the reader takes nothing more, "" while it does. ``trouble``: why no reader can be reached.
    """

    def __init__(self, url: str, keys: CurveKeys | None, window: Window, hello: Hello, heartbeat: float) -> None:
        """Raise InvalidValue for an invalid address, Unavailable for a socket of another user."""
        self._url, self._keys, self._window, self._hello, self._heartbeat = url, keys, window, hello, heartbeat
        self.refused = self.trouble = ""
        self.is_granted = False  #: whether a reader has answered
        self._channel: Channel | None = None
        self._pause, self._next_look, self._next_beat, self._made = TIMEOUTS.pause, 0.0, 0.0, 0.0
        check_named_port(url)
        if (path := socket_of(url)) is not None:
            with contextlib.suppress(OSError):  # it is missing, or cannot be examined: a reader may come
                check_is_socket(url, path.stat().st_mode)
        self._look()

    def follow(self) -> bool:
        """Connect if it is time, receive, and send what is due. Return whether the window dropped frames."""
        now = time.monotonic()
        if self._channel is None and now >= self._next_look:
            with contextlib.suppress(HalError):  # a stranger's socket: it may go away
                self._look()
        if (channel := self._channel) is None:
            return False
        before = self._window.first
        for message in channel.receive():
            self._take(message)
        if channel.ended or (not self.is_granted and now - self._made > TIMEOUTS.greeting):
            self._lose(channel.ended)
        else:
            self._transmit(channel, now)
        return self._window.first > before

    def wait(self, wake_end: int) -> bool:
        """Wait for the reader, room, the wake end, or the time of the next look or heartbeat. Return whether the wake
        end can be read."""
        poller, channel = select.poll(), self._channel
        poller.register(wake_end, select.POLLIN)
        until = self._next_look
        if channel is not None:
            poller.register(channel, select.POLLIN | (select.POLLOUT if channel.wants_room else 0))
            until = self._next_beat if self.is_granted else self._made + TIMEOUTS.greeting
        left = max(0.0, until - time.monotonic())
        return any(number == wake_end for number, _ in poller.poll(int(1000 * left) + 1))

    def part(self, wait: float, bye: Bye | None) -> None:
        """End the session: with ``bye`` in order; wait up to ``wait`` seconds for the reader's end."""
        if (channel := self._channel) is not None:
            self._channel = None
            if bye is not None:
                channel.send(encode_control(bye))
            channel.part(wait) if wait else channel.close()

    def _look(self) -> None:
        now = time.monotonic()
        self._next_look, self._pause = now + self._pause, min(2 * self._pause, TIMEOUTS.reconnect_most)
        try:
            channel = connect(self._url, "records", self._keys)
        except OSError:
            return
        except Unavailable as error:
            if error.what != self.trouble:
                self.trouble = error.what
                _log.warning("%s (%s)", error.what, error.cure)
            raise
        self._channel, self._made = channel, now
        self._hello.oldest = self._window.first
        channel.send(encode_control(self._hello))

    def _lose(self, why: str) -> None:
        assert self._channel is not None
        if not self.is_granted and why and why != self.trouble:  # a reader that ended is no trouble
            self.trouble = why
            _log.warning("%s: %s", self._url, why)
        self._channel.close()
        self._channel, self.is_granted = None, False
        self._next_look = time.monotonic() + self._pause

    def _take(self, frame: memoryview) -> None:
        try:
            if frame[:1] != CONTROL:
                raise FrameError("it is no reader's message")
            message = decode_control(frame[1:])
        except FrameError as error:
            if self._channel is not None:
                self._channel.ended = str(error)
            return
        if isinstance(message, Acknowledge):
            self._window.acknowledge(message.sequence)
            if not self.is_granted:
                self._window.rewind(message.after)
                self.is_granted, self.trouble, self._pause = True, "", TIMEOUTS.pause
        elif isinstance(message, Bye):
            self.refused = message.why or "it has said good-bye"

    def _transmit(self, channel: Channel, now: float) -> None:
        while self.is_granted and channel.pending < _ROOM and (frame := self._window.take()) is not None:
            channel.send(OUTPUT, frame)
            self._next_beat = now + self._heartbeat
        if now >= self._next_beat:
            self._next_beat = now + self._heartbeat
            channel.beat()


def hello_of(session: int, sender: int, capacity: int) -> Hello:
    """Return the first message of each connection."""
    return Hello(VERSION, session, sender, 1, capacity)
