"""Control channel between engine and ranks: the engine binds, each rank connects (:mod:`hal_engine.transport`).

A rank is identified by the number in its first message. Messages are not repeated. Losses are detected by the numbers
of steps, and a broken connection counts as the end of the rank or of the engine.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import zmq
from hal_core import FrameError, GroupLost
from hal_core.frames import FrameKind, new_session, split

from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.connection import Connection
from hal_engine.transport.curve import CurveKeys
from hal_engine.transport.parts import joined
from hal_engine.transport.sockets import Bound
from hal_engine.transport.urls import private_ipc_url, release_folder, socket_of

from .control_messages import Agreed, Beat, Hello, Message, Stop, Verdict, decode_message, encode_message
from .steps import StepOrder, decode_step, encode_step


class EngineChannel:
    """The engine's end. One thread uses it."""

    def __init__(self, url: str | None = None, curve: CurveKeys | None = None) -> None:
        """Bind ``url``, or a private ipc address. Raises :class:`InvalidValue` for an address in use."""
        self._owned = url is None
        address = private_ipc_url() if url is None else url
        try:
            self._bound = Bound(address, curve)
        except BaseException:
            if self._owned:
                release_folder(address)
            raise
        self.session = new_session()
        self.url = address
        if socket_of(address) is None:  # a port wildcard is resolved
            self.url = bytes(self._bound.socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self._ranks: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}
        self._next_beat = 0.0
        self._missed: dict[int, float] = {}
        self._parts = False  # the last message was sent
        self.unsent: set[int] = set()  #: ranks to which sending a message that is not repeated failed

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """Return the sockets to poll."""
        return self._bound.socket

    def receive(self, timeout: float) -> Iterator[tuple[int, Message]]:
        """Return the messages of ranks; wait up to ``timeout`` seconds for the first. Messages of strangers are
        skipped."""
        socket = self._bound.socket
        if not socket.poll(int(1000 * timeout)):
            return
        with contextlib.suppress(zmq.Again):
            while True:
                who, *parts = socket.recv_multipart(zmq.DONTWAIT, copy=False)
                identity = who.bytes
                with contextlib.suppress(FrameError, zmq.ZMQError):  # not from one of these ranks
                    for header, frame in split(joined(parts)):
                        message = decode_message(header, frame)
                        self._bound.know(parts[0])
                        if isinstance(message, Hello):
                            self._ranks.setdefault(message.rank, identity)
                            self._numbers.setdefault(identity, message.rank)
                        if identity in self._numbers:
                            yield self._numbers[identity], message

    def send(self, message: Message, *ranks: int) -> list[int]:
        """Send a message to some ranks, or to all known ranks. Return those that cannot be reached."""
        ranks = ranks or tuple(self._ranks)
        missed = self._send(encode_message(message, session=self.session), ranks)
        self._parts = self._parts or (isinstance(message, Stop | Verdict) and len(missed) < len(ranks))
        if not isinstance(message, Beat):
            self.unsent.update(missed)
        return missed

    def offer(self, messages: Iterable[Message], rank: int) -> bool:
        """Send several messages to a rank at once unless its queue is full; return whether they were sent."""
        return not self._send(b"".join(encode_message(message, session=self.session) for message in messages), (rank,))

    def order(self, order: StepOrder, *ranks: int) -> list[int]:
        """Send ranks a step. Return those that cannot be reached."""
        return self._send(encode_step(order, session=self.session), ranks)

    def beat(self, message: Message) -> None:
        """Send all ranks a heartbeat if it is due."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + TIMEOUTS.heartbeat_engine
            self._missed = {rank: self._missed.get(rank, now) for rank in self.send(message)}

    def gone(self) -> list[int]:
        """Return known ranks that no heartbeat has reached for a while: their connections are closed."""
        now = time.monotonic()
        return sorted(rank for rank, since in self._missed.items() if now - since > TIMEOUTS.broken)

    def _send(self, message: bytes, ranks: tuple[int, ...]) -> list[int]:
        missed = []
        for rank in ranks:
            try:
                self._bound.send(self._ranks[rank], message)
            except (zmq.ZMQError, KeyError):  # it has gone, reads no more, or never connected
                missed.append(rank)
        return missed

    def last_messages(self) -> Iterator[tuple[int, Message]]:
        """Return the messages of ranks that are ending, until none of them is connected, or for ``TIMEOUTS.parting``.

        A rank's end may be seen before the messages that it sent first.
        """
        gone, end = False, time.monotonic() + TIMEOUTS.parting
        while not gone and time.monotonic() < end:
            gone = len(self.send(Beat())) == len(self._ranks)
            yield from self.receive(0.0 if gone else TIMEOUTS.pause)

    def close(self) -> None:
        """Close, and release the address; idempotent. First give ranks time to read the last message: to them, an end
        that closes earlier is a lost engine."""
        if self._parts and not self._bound.socket.closed:
            for _ in self.last_messages():
                pass
            self._parts = False
        self._bound.close()
        self._bound.release()
        if self._owned:
            release_folder(self.url)


class RankChannel:
    """A rank's end. One thread uses it."""

    def __init__(self, url: str, rank: int, curve: CurveKeys | None = None) -> None:
        self.rank, self._local = rank, socket_of(url) is not None
        self._wake_end, self._wake = os.pipe()
        try:
            self._connection = Connection(url, new_session(), curve, self._wake_end)
        except BaseException:
            os.close(self._wake)
            os.close(self._wake_end)
            raise
        self._heard = self._down = time.monotonic()
        self._patience = TIMEOUTS.silence  # until the engine's first message, it may be starting
        self._is_made = self._is_heard = self._broke = False
        self._received: list[Message | StepOrder] = []

    @property
    def patience(self) -> float:
        """Seconds without a connection after which the engine counts as lost."""
        return self._patience

    def watch(self, sockets: Iterable[Any]) -> None:
        """Make :meth:`receive` return None as soon as one of these sockets is readable, too."""
        self._connection.watch(sockets)

    def receive(self, timeout: float) -> Message | StepOrder | None:
        """Return the next message or step; None after ``timeout`` seconds, or if a watched socket is readable.

        Raises :class:`GroupLost` if the engine has gone or the connection to it broke, even if a new one was made
        since; :class:`FrameError` for an invalid step.
        """
        end = time.monotonic() + timeout
        while not self._received:
            self._follow()
            if not self._take():
                now = time.monotonic()
                self._check_engine(now)
                if now >= end:
                    return None
                self._connection.wait(min(end, now + TIMEOUTS.heartbeat_engine), due=False)
                if self._connection.others_came:
                    self._follow()
                    if not self._take():
                        return None
        return self._received.pop(0)

    def answer(self, timeout: float) -> Agreed | Verdict | None:
        """Return the engine's answer to :class:`Raised`, or None after ``timeout`` seconds. :meth:`receive` returns the
        messages before it later. Raises as :meth:`receive`."""
        self.watch(())
        end, earlier = time.monotonic() + timeout, list[Message | StepOrder]()
        try:
            while (left := end - time.monotonic()) > 0:
                message = self.receive(left)
                if isinstance(message, Agreed | Verdict):
                    return message
                if message is not None:
                    earlier.append(message)
            return None
        finally:
            self._received[:0] = earlier

    def send(self, message: Message, patience: float | None = None) -> bool:
        """Send a message; wait up to ``patience`` seconds (``TIMEOUTS.message``) for a connection. Return whether it
        was sent."""
        end = time.monotonic() + (TIMEOUTS.message if patience is None else patience)
        frame = encode_message(message, session=1, sender=self.rank)
        self._note()
        while not self._connection.send(frame):
            if time.monotonic() >= end:
                return False
            self._connection.wait(min(end, time.monotonic() + TIMEOUTS.pause), due=self._connection.is_open)
            self._note()
        return True

    def close(self) -> None:
        """Close; the last message gets one more second."""
        self._connection.close(round(1000 * TIMEOUTS.last_message))
        self._connection.end()
        os.close(self._wake)
        os.close(self._wake_end)

    def _note(self) -> None:
        """Note connection events. A new connection after one that carried messages means that messages of either side
        may be lost."""
        if self._connection.follow():
            self._broke = self._broke or (self._is_made and self._is_heard)
            self._is_made = True

    def _follow(self) -> None:
        self._note()
        if self._broke:
            raise GroupLost(
                f"rank {self.rank}: the connection to the engine broke, and messages may be lost",
                cure="check the network between them, and run the requests again",
                argument="engine",
            )

    def _take(self) -> bool:
        """Read available messages. Return whether there were any."""
        try:
            message = self._connection.receive()
        except zmq.Again:
            return False
        self._heard, self._is_heard = time.monotonic(), True
        self._patience = TIMEOUTS.broken if self._local else TIMEOUTS.silence
        for header, frame in split(message):
            if header.kind == FrameKind.STEP:
                self._received.append(decode_step(header, frame))
            elif header.kind == FrameKind.WORD:
                self._received.append(decode_message(header, frame))
        return True

    def _check_engine(self, now: float) -> None:
        if self._connection.is_open:
            self._down = now
        if now - (self._down if self._local else self._heard) > self._patience:
            raise GroupLost(
                f"rank {self.rank} gets no messages from the engine",
                cure="see the output of the process that started the ranks",
                argument="engine",
            )
