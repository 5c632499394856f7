"""The connection over which engine and ranks talk: the engine binds, each rank connects (:mod:`hal.transport`).

A rank is known by the number that its first word says. Nothing is repeated: what is lost is noticed by the numbers of
steps, and a connection that breaks is the end of the rank, or of the engine.
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

from hal.timeouts import TIMEOUTS
from hal.transport.connection import Connection
from hal.transport.curve import CurveKeys
from hal.transport.parts import joined
from hal.transport.sockets import Bound
from hal.transport.urls import private_ipc_url, release_folder, socket_of

from .steps import StepOrder, decode_step, encode_step
from .words import Beat, Hello, Stop, Verdict, Word, decode_word, encode_word


class EngineLine:
    """The engine's end. One thread uses it."""

    def __init__(self, url: str | None = None, curve: CurveKeys | None = None) -> None:
        """Without a url a private ipc one is made. Raises :class:`InvalidValue` for an address that is taken."""
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
        self._parts = False  # the last word was said
        self.unsaid: set[int] = set()  #: ranks to which a word could not be said that is not said again

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """What a poll may wait for."""
        return self._bound.socket

    def receive(self, timeout: float) -> Iterator[tuple[int, Word]]:
        """What ranks have said meanwhile; waits up to ``timeout`` seconds for the first word. Strangers are skipped."""
        socket = self._bound.socket
        if not socket.poll(int(1000 * timeout)):
            return
        with contextlib.suppress(zmq.Again):
            while True:
                who, *parts = socket.recv_multipart(zmq.DONTWAIT, copy=False)
                identity = who.bytes
                with contextlib.suppress(FrameError, zmq.ZMQError):  # not from a rank of ours
                    for header, frame in split(joined(parts)):
                        word = decode_word(header, frame)
                        self._bound.know(parts[0])
                        if isinstance(word, Hello):
                            self._ranks.setdefault(word.rank, identity)
                            self._numbers.setdefault(identity, word.rank)
                        if identity in self._numbers:
                            yield self._numbers[identity], word

    def say(self, word: Word, *ranks: int) -> list[int]:
        """Say a word to some ranks, or to all that are known; those that cannot be reached."""
        self._parts = self._parts or isinstance(word, Stop | Verdict)
        missed = self._send(encode_word(word, session=self.session), ranks or tuple(self._ranks))
        if not isinstance(word, Beat):
            self.unsaid.update(missed)
        return missed

    def offer(self, words: Iterable[Word], rank: int) -> bool:
        """Send words to a rank as one message unless its queue is full; return whether they were sent."""
        return not self._send(b"".join(encode_word(word, session=self.session) for word in words), (rank,))

    def order(self, order: StepOrder, *ranks: int) -> list[int]:
        """Give ranks a step; those that cannot be reached."""
        return self._send(encode_step(order, session=self.session), ranks)

    def beat(self, word: Word) -> None:
        """Say the word to all if it is time."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + TIMEOUTS.heartbeat_engine
            self._missed = {rank: self._missed.get(rank, now) for rank in self.say(word)}

    def gone(self) -> list[int]:
        """The ranks that were known and have not been reached by a beat for a while: their connections are closed."""
        now = time.monotonic()
        return sorted(rank for rank, since in self._missed.items() if now - since > TIMEOUTS.broken)

    def _send(self, message: bytes, ranks: tuple[int, ...]) -> list[int]:
        missed = []
        for rank in ranks:
            try:
                self._bound.send(self._ranks[rank], message)
            except (zmq.ZMQError, KeyError):  # it is gone, takes nothing any more, or was never there
                missed.append(rank)
        return missed

    def _see_off(self, end: float) -> None:
        """Wait until no rank is reached any more, or for the time."""
        while len(self.say(Beat())) < len(self._ranks) and time.monotonic() < end:
            for _ in self.receive(TIMEOUTS.pause):
                pass

    def close(self) -> None:
        """Close, and give the address back. Ranks to which the last word was said have a while to take it: an end that
        is closed before is an engine that was lost, to them."""
        if self._parts:
            self._see_off(time.monotonic() + TIMEOUTS.parting)
        self._bound.close()
        self._bound.release()
        if self._owned:
            release_folder(self.url)


class RankLine:
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
        self._patience = TIMEOUTS.silence  # until the engine was heard, it may be starting
        self._is_made = self._is_heard = self._broke = False
        self._received: list[Word | StepOrder] = []

    @property
    def patience(self) -> float:
        """Seconds without a connection after which the engine counts as lost."""
        return self._patience

    def watch(self, sockets: Iterable[Any]) -> None:
        """Have :meth:`receive` return None as soon as one of these can be read, too."""
        self._connection.watch(sockets)

    def receive(self, timeout: float) -> Word | StepOrder | None:
        """The next word or step; None after ``timeout`` seconds, or when one of the watched sockets can be read.

        Raises :class:`GroupLost` when the engine is gone, or the connection to it broke, also where another was made
        since; :class:`FrameError` for a step that is none.
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

    def say(self, word: Word, patience: float | None = None) -> bool:
        """Say a word; waits up to ``patience`` seconds (``TIMEOUTS.message``) for a connection. Whether it was said."""
        end = time.monotonic() + (TIMEOUTS.message if patience is None else patience)
        message = encode_word(word, session=1, sender=self.rank)
        self._note()
        while not self._connection.send(message):
            if time.monotonic() >= end:
                return False
            self._connection.wait(min(end, time.monotonic() + TIMEOUTS.pause), due=self._connection.is_open)
            self._note()
        return True

    def close(self) -> None:
        """Close; what was said last has a second more."""
        self._connection.close(round(1000 * TIMEOUTS.last_message))
        self._connection.end()
        os.close(self._wake)
        os.close(self._wake_end)

    def _note(self) -> None:
        """Take note of what became of the connection: a new one, behind one over which the engine was heard, means that
        what was said meanwhile may never come, of either side."""
        if self._connection.follow():
            self._broke = self._broke or (self._is_made and self._is_heard)
            self._is_made = True

    def _follow(self) -> None:
        self._note()
        if self._broke:
            raise GroupLost(
                f"rank {self.rank}: the connection to the engine broke, and what was said meanwhile may be lost",
                cure="see what became of the network between them, and run the requests again",
                argument="engine",
            )

    def _take(self) -> bool:
        """Take what has come. Whether anything has."""
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
                self._received.append(decode_word(header, frame))
        return True

    def _check_engine(self, now: float) -> None:
        if self._connection.is_open:
            self._down = now
        if now - (self._down if self._local else self._heard) > self._patience:
            raise GroupLost(
                f"rank {self.rank} hears nothing of the engine",
                cure="see what became of the process that started the ranks",
                argument="engine",
            )
