"""An ordered stream of frames between two processes: one connection, over a Unix socket or over tcp.

A frame on the wire is u32 (little-endian), how many bytes follow; u8, its kind; and its content. The first frame is the
greeting of the side that connects, which names the channel's purpose (:mod:`hal_engine.transport.curve`): a listener
takes only its own. With keys, kind and content of the later ones are encrypted and authenticated together, and frames
wait until the peer has shown its key by its first one, a beat. The kernel keeps the order and repeats nothing. A
connection that has ended is not made again: a new one is a new channel, and frames that were under way on the old one
may be lost. Anybody on the way can end a connection, so its end does not show what arrived: last messages do.

No call waits unless a time is given. Bytes that the kernel refuses stay in the channel and leave with later calls.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TypeAlias

from hal_core import InvalidValue

from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.curve import CurveKeys, Handshake, Purpose, Sealer
from hal_engine.transport.places import dial
from hal_engine.transport.urls import check_named_port, socket_of

Buffer: TypeAlias = "bytes | bytearray | memoryview"
MOST_BYTES = 1 << 30
"""Bytes of a frame; a peer that announces more is cut off."""
_STRANGER_BYTES = 4096
"""The same until the peer is trusted."""
_HEAD, _LENGTH, _NUMBER = struct.Struct("<IB"), struct.Struct("<I"), struct.Struct("<q")
_MESSAGE, _BEAT = 0, 1
_SPACE = 1 << 16
"""Bytes that one read takes; a larger frame is read into memory of its own."""
_GROWS = 1 << 20
"""Bytes of that memory before the peer has sent more: a peer may announce a large frame and send no byte of it."""
_TURN = 1 << 20
"""Bytes that one call reads, so that a thread serves its other peers beside a busy one."""
_ENDED = "its process has ended"
CLOSED = "it was closed here"
"""How a channel ended that this side closed first: frames that were received with the last one do not count any more.
(Those of a peer that has ended do.)"""
_PARTS = 64
"""Parts that the kernel is given at once."""
_FORMER = b"\xff\0\0\0\0\0\0\0\1\x7f"
"""ZeroMQ's greeting, by which the peers of earlier versions begin."""


class Channel:
    """One end. One thread receives; any thread may send.

    - ``pending``: bytes that the kernel has not taken yet. ``is_read``: whether the peer may still read; if not, its
      earlier bytes are received all the same.
    - ``ended``: how the connection ended, once all that came before was received; "" while there is one.
    - ``heard``: when bytes came last (monotonic seconds); ``number``: of the peer's last beat.
    - ``key``: the peer's public key, "" without keys. ``is_trusted``: whether it has named this channel's purpose and,
      with keys, shown that it owns its key.
    """

    def __init__(self, sock: socket.socket, handshake: Handshake | None = None) -> None:
        """``handshake``: this side's part; without one both ends were made together."""
        sock.setblocking(False)
        self._sock, self._handshake = sock, handshake
        self._sealer: Sealer | None = None
        self._lock = threading.RLock()
        self._waiting = deque[tuple[int, tuple[Buffer, ...]]]()  # frames that are not sealed yet
        self._outbox, self.pending = deque[memoryview](), 0
        self.is_read = True
        self._small = self._space = memoryview(bytearray(_SPACE))
        self._end = 0  # of the bytes there, which are no whole frame yet
        self._early, self._is_first = list[memoryview](), True  # no frame has come yet
        self.key, self.ended, self.number, self._why = "", "", 0, ""
        self.heard = time.monotonic()
        self.is_trusted = handshake is None
        self._end_of_peer = _ENDED if handshake is None else "it left before it showed what it is"
        if handshake is not None and handshake.greeting:
            what = f"it is no listener for {handshake.purpose!r}, its keys differ, or its process has ended"
            self._end_of_peer = f"it sent nothing: {what}"
            self._append(_LENGTH.pack(len(handshake.greeting)), handshake.greeting)
            if not handshake.has_answer:
                self._handshake, self.is_trusted = None, True

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return both ends of a channel without an address."""
        one, other = socket.socketpair()
        return cls(one), cls(other)

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 once closed."""
        return self._sock.fileno()

    @property
    def wants_room(self) -> bool:
        """Whether to poll for room to write, too; also while tcp connects."""
        return bool(self._outbox)

    # -- sending --------------------------------------------------------------------------------------------------

    def send(self, *parts: Buffer, wait: float = 0.0) -> bool:
        """Send one frame made of ``parts``, which must not change any more.

        Without ``wait`` return whether the peer still reads. Else wait up to so many seconds for the kernel to take
        the frame, and return whether it did; if it did not, the frame leaves later.
        """
        self._put(_MESSAGE, parts)
        return self.flush(wait) if wait else self.is_read

    def beat(self, number: int = 0) -> None:
        """Send a sign of life with a number, unless the peer has not read the earlier bytes, or is not trusted."""
        if self.is_trusted and not self.pending:
            self._put(_BEAT, (_NUMBER.pack(number),))

    def flush(self, wait: float) -> bool:
        """Wait up to ``wait`` seconds until the kernel has taken everything. Return whether it has."""
        end = time.monotonic() + wait
        while True:
            with self._lock:
                self._write()
                done = not self.pending
            left = end - time.monotonic()
            if done or not self.is_read or left <= 0:
                return done and self.is_read
            if self.is_trusted:
                _poll(self._sock, select.POLLOUT, left)
            else:  # another thread receives what shows the peer's key
                time.sleep(min(left, TIMEOUTS.pause))

    def _put(self, kind: int, parts: tuple[Buffer, ...]) -> None:
        with self._lock:
            if self.is_read:
                self._waiting.append((kind, parts))
                self.pending += sum(map(len, parts))
                self._write()

    def _framed(self, kind: int, parts: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        if self._sealer is None:
            return _HEAD.pack(1 + sum(map(len, parts)), kind), *parts
        sealed = self._sealer.seal(b"".join((bytes((kind,)), *parts)))
        return _LENGTH.pack(len(sealed)), sealed

    def _append(self, *parts: Buffer) -> None:
        for part in parts:
            if len(part):
                self._outbox.append(view := memoryview(part).cast("B"))
                self.pending += len(view)

    def _write(self) -> None:
        """Give the kernel as much as it takes: first the bytes that are left, then the frames that wait."""
        while True:
            while self.is_trusted and self._waiting and len(self._outbox) < _PARTS:
                kind, parts = self._waiting.popleft()
                self.pending -= sum(map(len, parts))
                self._append(*self._framed(kind, parts))
            if not self._outbox:
                return
            try:
                taken = self._sock.sendmsg(list(islice(self._outbox, _PARTS)))
            except BlockingIOError:
                return
            except OSError as error:
                if not isinstance(error, BrokenPipeError | ConnectionResetError):  # there was no connection
                    self._why = error.strerror or str(error)
                self._send_no_more()
                return
            self.pending -= taken
            while taken:
                if taken < len(first := self._outbox[0]):
                    self._outbox[0] = first[taken:]
                    return
                taken -= len(self._outbox.popleft())

    def _send_no_more(self) -> None:
        with self._lock:
            self.is_read, self.pending = False, 0
            self._outbox.clear()
            self._waiting.clear()

    # -- receiving ------------------------------------------------------------------------------------------------

    def receive(self) -> list[memoryview]:
        """Return the messages that have come, in order, each in memory of its own. When there are no more and the
        connection has ended, :attr:`ended` has the reason."""
        messages, self._early = self._early, []
        with self._lock:
            self._write()
        taken, is_full = 0, True
        while is_full and not self.ended and taken < _TURN:
            try:
                count = self._sock.recv_into(self._space[self._end :])
            except BlockingIOError:
                break
            except OSError as error:
                is_refused = self._is_first and isinstance(error, ConnectionResetError)
                self._stop(self._end_of_peer if is_refused else error.strerror or str(error))
                break
            if not count:  # it sends no more, and may still read
                self.ended = self._why or self._end_of_peer
                break
            self.heard, taken, self._end = time.monotonic(), taken + count, self._end + count
            is_full = self._end == len(self._space)
            try:
                self._take(messages)
            except ValueError as error:
                self._stop(str(error))
        return messages

    def _take(self, messages: list[memoryview]) -> None:
        """Split the bytes that were read into frames. Raises ValueError for bytes that are no frame."""
        space, start = self._space, 0
        if self._is_first and space[: len(_FORMER)] == _FORMER:
            raise ValueError("it is of hal 1.1 or before, whose connections were ZeroMQ's: install one version")
        wanted = 0
        while self._end - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(space, start)
            if not 0 < length <= (MOST_BYTES if self.is_trusted else _STRANGER_BYTES):
                raise ValueError(f"it announced a frame of {length} bytes")
            wanted = _LENGTH.size + length
            if self._end - start < wanted:
                break
            frame = space[start + _LENGTH.size : start + wanted]
            if space is not self._small:  # all of it is this frame
                self._space, self._end = self._small, 0
                self._open(frame, messages)
                return
            self._open(memoryview(bytes(frame)), messages)
            start += wanted
        left = self._end - start
        if wanted > len(space) and (space is self._small or left == len(space)):
            self._space = memoryview(bytearray(min(wanted, max(2 * left, _GROWS))))
        elif not start:
            return
        self._space[:left] = space[start : self._end]
        self._end = left

    def _open(self, frame: memoryview, messages: list[memoryview]) -> None:
        self._is_first = False
        if self._handshake is not None:
            self._meet(self._handshake, bytes(frame))
            return
        if self._sealer is not None:
            frame = memoryview(self._sealer.open(frame))
        self._trust()
        kind = frame[0] if len(frame) else None
        if kind == _MESSAGE:
            messages.append(frame[1:])
        elif kind == _BEAT and len(frame) == 1 + _NUMBER.size:
            (self.number,) = _NUMBER.unpack_from(frame, 1)
        else:
            raise ValueError(f"it sent a frame of kind {kind}")

    def _meet(self, handshake: Handshake, greeting: bytes) -> None:
        """Take the peer's greeting, and seal from here on if there are keys."""
        answer, self._sealer, self.key = handshake.take(greeting)
        self._handshake = None
        if self._sealer is None:
            self._trust()
            return
        with self._lock:
            if answer:
                self._append(_LENGTH.pack(len(answer)), answer)
            self._append(*self._framed(_BEAT, (_NUMBER.pack(0),)))  # shows the peer at once that the keys fit
            self._write()

    def _trust(self) -> None:
        """The peer has shown its purpose: the frames that waited for that leave now."""
        self._end_of_peer = _ENDED
        if not self.is_trusted:
            self.is_trusted = True
            with self._lock:
                self._write()

    # -- begin and end --------------------------------------------------------------------------------------------

    def establish(self, wait: float) -> bool:
        """Wait up to ``wait`` seconds until the connection is made and, with keys, both sides have shown theirs. Return
        whether that is so."""
        self._work(wait, lambda: self.is_trusted and not self._outbox)
        return self.is_trusted and not (self._outbox or self.ended)

    def finish(self) -> None:
        """End the sending. The peer receives the earlier frames, and then the end."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def part(self, wait: float) -> None:
        """Close after all sent bytes have left and the peer has closed, too, or after ``wait`` seconds. Bytes that a
        closed end has not read could cost the peer some of those on the way to it."""
        end = time.monotonic() + wait
        self._work(wait, lambda: self.is_trusted)  # else nothing leaves
        if self.is_trusted:
            self.flush(end - time.monotonic())
        self.finish()
        self._work(end - time.monotonic(), lambda: False)
        self.close()

    def _work(self, wait: float, done: Callable[[], bool]) -> None:
        """Send and receive until ``done()`` or the end, or for ``wait`` seconds. :meth:`receive` returns messages that
        came meanwhile."""
        end = time.monotonic() + wait
        while not (self.ended or done()):
            left = end - time.monotonic()
            _poll(self._sock, select.POLLIN | (select.POLLOUT if self.wants_room else 0), max(0.0, left))
            self._early = self.receive()
            if left <= 0:
                return

    def close(self) -> None:
        """Close at once; idempotent. Bytes that the kernel has taken still arrive, unless unread ones are left here."""
        self._stop(CLOSED)
        self._sock.close()

    def leave_to_parent(self) -> None:
        """Close the descriptor alone, in a forked child: a thread of the parent may have held the lock."""
        self._sock.close()

    def _stop(self, why: str) -> None:
        self.ended = self.ended or why
        self._send_no_more()


def connect(url: str, purpose: Purpose, keys: CurveKeys | None = None) -> Channel:
    """Connect to the listener at ``url``; ``keys``: this side's, which name the listener's, for tcp.

    Over tcp the connection is made later: see :meth:`Channel.establish`. Raises :class:`InvalidValue` for an invalid
    address, OSError without a listener there, :class:`Unavailable` for a Unix socket of another user.
    """
    check_named_port(url)
    if (path := socket_of(url)) is not None and keys is not None:
        raise InvalidValue(f"{url!r} is no tcp address", cure="ipc is private by its folder", argument="curve")
    return Channel(dial(url, path), Handshake(purpose, keys, calls=True))


def _poll(sock: socket.socket, events: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(sock, events)
    return bool(poller.poll(math.ceil(1000 * seconds)))
