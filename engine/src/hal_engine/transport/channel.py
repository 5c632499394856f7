"""An ordered stream of frames between two processes: one connection, over a Unix socket or over tcp.

A frame on the wire is u32 (little-endian), how many bytes follow; u8, its kind; and its content. With keys
(:mod:`hal_engine.transport.curve`) kind and content are encrypted and authenticated together, and frames wait until the
peer has shown its key by its first one, a beat. The kernel keeps the order and repeats nothing. A connection that has
ended is not made again: a new one is a new channel, and frames that were under way on the old one may be lost. Anybody
on the way can end a connection, so its end says nothing of what was sent: last messages do.

No call waits unless a time is given. What the kernel does not take stays in the channel and leaves with later calls.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from hal_core import InvalidValue, Unavailable

from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.urls import check_named_port, socket_of

if TYPE_CHECKING:
    from hal_engine.transport.curve import CurveKeys, Handshake, Sealer

Buffer: TypeAlias = "bytes | bytearray | memoryview"
MOST_BYTES = 1 << 30
"""Bytes of a frame; a peer that announces more is cut off."""
_STRANGER_BYTES = 4096
"""The same until the peer has shown its key."""
_HEAD, _LENGTH, _NUMBER = struct.Struct("<IB"), struct.Struct("<I"), struct.Struct("<q")
_MESSAGE, _BEAT = 0, 1
_SPACE = 1 << 16
"""Bytes that one read takes; a larger frame is read into memory of its own."""
_GROWS = 1 << 20
"""Bytes of that memory before the peer has sent more: a peer may announce a large frame and send no byte of it."""
_TURN = 1 << 20
"""Bytes that one call reads, so that a thread serves its other peers beside a busy one."""
_PROBES = 3
"""Probes without an answer after which the kernel takes the other host for lost."""
_FORMER = b"\xff\0\0\0\0\0\0\0\1\x7f"
"""ZeroMQ's greeting, by which the peers of earlier versions begin."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as SO_PEERCRED gives them."""


class Channel:
    """One end. One thread receives; any thread may send.

    - ``pending``: bytes that the kernel has not taken yet.
    - ``ended``: how the connection ended, once all that came before was received; "" while there is one.
    - ``heard``: when bytes came last (monotonic seconds); ``number``: of the peer's last beat.
    - ``key``: the peer's public key, "" without keys. ``is_trusted``: whether it has shown that it owns that key.
    """

    def __init__(self, sock: socket.socket, handshake: Handshake | None = None, *, connecting: bool = False) -> None:
        """``handshake``: seals the channel after the peer's greeting. ``connecting``: tcp has not connected yet."""
        sock.setblocking(False)
        self._sock, self._handshake, self._connecting = sock, handshake, connecting
        self._sealer: Sealer | None = None
        self._lock = threading.RLock()
        self._outbox, self.pending = deque[memoryview](), 0
        self._held = deque[tuple[int, tuple[Buffer, ...]]]()  # frames that wait until the peer is trusted
        self._deaf = False  # the peer no longer reads; its earlier bytes are still received
        self._space = memoryview(bytearray(_SPACE))
        self._start = self._end = 0  # of the bytes there that are no whole frame yet
        self._large: bytearray | None = None
        self._filled = self._length = 0  # of the large frame
        self._early: list[memoryview] = []
        self._is_first = True  # no frame has come yet
        self.key, self.ended, self.number = "", "", 0
        self.heard = time.monotonic()
        self.is_trusted = handshake is None
        if handshake is not None and handshake.greeting:
            self._append(_LENGTH.pack(len(handshake.greeting)), handshake.greeting)

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return both ends of a channel without an address."""
        one, other = socket.socketpair()
        return cls(one), cls(other)

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 once closed."""
        return self._sock.fileno()

    @property
    def is_read(self) -> bool:
        """Whether the peer may still read."""
        return not self._deaf

    @property
    def wants_room(self) -> bool:
        """Whether to poll for room to write, too."""
        return self._connecting or bool(self._outbox)

    # -- sending --------------------------------------------------------------------------------------------------

    def send(self, *parts: Buffer, wait: float = 0.0) -> bool:
        """Send one frame made of ``parts``, which must not change any more.

        Without ``wait`` return whether the peer still reads. Else wait up to so many seconds for the kernel to take
        the frame, and return whether it did; if it did not, the frame leaves later.
        """
        self._put(_MESSAGE, parts)
        return self.flush(wait) if wait else not self._deaf

    def beat(self, number: int = 0) -> None:
        """Send a sign of life with a number, unless the peer has not read the earlier bytes, or has not shown its
        key."""
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
            if done or self._deaf or left <= 0:
                return done and not self._deaf
            if self._connecting or not self.is_trusted:  # another thread receives what shows the peer's key
                time.sleep(min(left, TIMEOUTS.pause))
            else:
                _poll(self._sock, select.POLLOUT, left)

    def _put(self, kind: int, parts: tuple[Buffer, ...]) -> None:
        with self._lock:
            if self._deaf:
                return
            if self.is_trusted:
                self._append(*self._framed(kind, parts))
            else:
                self._held.append((kind, parts))
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
        while self._outbox and not self._connecting:
            try:
                taken = self._sock.sendmsg(list(islice(self._outbox, 64)))
            except BlockingIOError:
                return
            except OSError:
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
            self._deaf, self.pending = True, 0
            self._outbox.clear()
            self._held.clear()

    # -- receiving ------------------------------------------------------------------------------------------------

    def receive(self) -> list[memoryview]:
        """Return the messages that have come, in order, each in memory of its own. When there are no more and the
        connection has ended, :attr:`ended` says how."""
        messages, self._early = self._early, []
        if self._connecting and not self._has_connected():
            return messages
        with self._lock:
            self._write()
        taken = 0
        while not self.ended and taken < _TURN:
            space = self._space[self._end :] if self._large is None else memoryview(self._large)[self._filled :]
            wanted = len(space)
            try:
                count = self._sock.recv_into(space)
            except BlockingIOError:
                break
            except OSError as error:
                self._stop(error.strerror or str(error))
                break
            finally:
                space.release()
            if not count:  # it sends no more, and may still read
                self.ended = "its process has ended" if self.is_trusted else "the other side refused this side's key"
                break
            self.heard, taken = time.monotonic(), taken + count
            try:
                self._take(count, messages)
            except ValueError as error:
                self._stop(str(error))
            if count < wanted:
                break
        return messages

    def _take(self, count: int, messages: list[memoryview]) -> None:
        """Split the bytes that were read into frames. Raises ValueError for bytes that are no frame."""
        if self._large is not None:
            self._filled += count
            if self._filled == self._length:
                frame, self._large = self._large, None
                self._open(memoryview(frame), messages)
            elif self._filled == len(self._large):
                self._large += bytes(min(self._filled, self._length - self._filled))
            return
        self._end += count
        if self._is_first and self._space[: len(_FORMER)] == _FORMER:
            raise ValueError("it is of hal 1.1 or before, whose connections were ZeroMQ's: install one version")
        while self._end - self._start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._space, self._start)
            begin = self._start + _LENGTH.size
            if not 0 < length <= (MOST_BYTES if self.is_trusted else _STRANGER_BYTES):
                raise ValueError(f"it announced a frame of {length} bytes")
            if self._end - begin >= length:
                self._start = begin + length
                self._open(memoryview(bytes(self._space[begin : self._start])), messages)
            elif length + _LENGTH.size <= _SPACE:
                break
            else:
                self._length, self._filled = length, self._end - begin
                self._large = bytearray(max(self._filled, min(length, _GROWS)))
                self._large[: self._filled] = self._space[begin : self._end]
                self._start = self._end
        left = self._end - self._start
        if self._start:
            self._space[:left] = bytes(self._space[self._start : self._end])
            self._start, self._end = 0, left

    def _open(self, frame: memoryview, messages: list[memoryview]) -> None:
        self._is_first = False
        if self._handshake is not None:
            self._meet(self._handshake, bytes(frame))
            return
        if self._sealer is not None:
            frame = memoryview(self._sealer.open(frame))
            if not self.is_trusted:
                self._trust()
        kind = frame[0] if len(frame) else None
        if kind == _MESSAGE:
            messages.append(frame[1:])
        elif kind == _BEAT and len(frame) == 1 + _NUMBER.size:
            (self.number,) = _NUMBER.unpack_from(frame, 1)
        else:
            raise ValueError(f"it sent a frame of kind {kind}")

    def _meet(self, handshake: Handshake, greeting: bytes) -> None:
        """Take the peer's greeting, and seal from here on."""
        answer, sealer, key = handshake.take(greeting)
        with self._lock:
            self._sealer, self.key, self._handshake = sealer, key, None
            if answer:
                self._append(_LENGTH.pack(len(answer)), answer)
            self._append(*self._framed(_BEAT, (_NUMBER.pack(0),)))  # shows the peer at once that the keys fit
            self._write()

    def _trust(self) -> None:
        """The peer has shown that it owns its key: what waited for that leaves now."""
        with self._lock:
            self.is_trusted = True
            while self._held:
                kind, parts = self._held.popleft()
                self.pending -= sum(map(len, parts))
                self._append(*self._framed(kind, parts))
            self._write()

    def _has_connected(self) -> bool:
        if not _poll(self._sock, select.POLLOUT, 0.0):
            return False
        self._connecting = False
        if number := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._stop(os.strerror(number))
        return not self.ended

    # -- begin and end --------------------------------------------------------------------------------------------

    def establish(self, wait: float) -> bool:
        """Wait up to ``wait`` seconds until the connection is made and, with keys, both sides have shown theirs. Return
        whether that is so. :meth:`receive` returns messages that came meanwhile."""
        end = time.monotonic() + wait
        while not self.ended and (self._connecting or not self.is_trusted):
            left = end - time.monotonic()
            _poll(self._sock, select.POLLIN | (select.POLLOUT if self.wants_room else 0), max(0.0, left))
            self._early = self.receive()
            if left <= 0:
                break
        return not (self.ended or self._connecting) and self.is_trusted

    def finish(self) -> None:
        """End the sending. The peer receives the earlier frames, and then the end."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def part(self, wait: float) -> None:
        """Close after what was sent has left and the peer has closed, too, or after ``wait`` seconds. Bytes that a
        closed end has not read could cost the peer some of those on the way to it."""
        end = time.monotonic() + wait
        self.flush(wait)
        self.finish()
        while not self.ended and (left := end - time.monotonic()) > 0:
            _poll(self._sock, select.POLLIN, left)
            self.receive()
        self.close()

    def close(self) -> None:
        """Close at once; idempotent. What the kernel has taken still arrives, unless unread bytes are left here."""
        self._stop("it was closed here")
        self._sock.close()

    def _stop(self, why: str) -> None:
        self.ended = self.ended or why
        self._send_no_more()


def connect(url: str, keys: CurveKeys | None = None) -> Channel:
    """Connect to the listener at ``url``; ``keys``: this side's, which name the listener's, for tcp.

    Over tcp the connection is made later: see :meth:`Channel.establish`. Raises :class:`InvalidValue` for an invalid
    address, OSError if nobody listens there, :class:`Unavailable` for a Unix socket of another user.
    """
    check_named_port(url)
    if (path := socket_of(url)) is None:
        from hal_engine.transport.curve import Handshake  # within a host frames are not sealed

        host, _, port = url.removeprefix("tcp://").rpartition(":")
        with _undone(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as sock:
            tune(sock)
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect((host, int(port)))
        return Channel(sock, None if keys is None else Handshake(keys, calls=True), connecting=True)
    if keys is not None:
        raise InvalidValue(f"{url!r} is no tcp address", cure="ipc is private by its folder", argument="curve")
    with _undone(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as sock:
        sock.setblocking(False)
        sock.connect(os.fspath(path))
        user = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
        if user != os.geteuid():
            raise Unavailable(
                f"on {path} listens user {user}, not {os.geteuid()}: nothing is sent there",
                cure="run both as one user, or choose a folder that others cannot write to (private_ipc_url())",
                argument="url",
            )
    return Channel(sock)


def tune(sock: socket.socket) -> None:
    """Have the kernel send at once over tcp, and end a connection whose other host does not answer any more."""
    silence = TIMEOUTS.silence
    every = max(1, round(silence / (1 + _PROBES)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, every),
        (socket.TCP_KEEPINTVL, every),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, round(1000 * silence)),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Beats:
    """A thread that sends signs of life on ``channels()``, whatever this process's other threads do, and what waits
    there. ``number``: is sent along. ``every``: so many seconds (``TIMEOUTS.beat``)."""

    def __init__(
        self,
        channels: Callable[[], Iterable[Channel]],
        number: Callable[[], int] = lambda: 0,
        every: float | None = None,
    ) -> None:
        self._channels, self._number, self._every, self._over = channels, number, every, threading.Event()
        self._thread = threading.Thread(target=self._run, name="hal-beat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(TIMEOUTS.beat if self._every is None else self._every):
            for channel in self._channels():
                channel.beat(self._number())
                channel.flush(0.0)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def _undone(sock: socket.socket) -> Iterator[socket.socket]:
    """Close the socket if the block raises."""
    try:
        yield sock
    except BaseException:
        sock.close()
        raise


def _poll(sock: socket.socket, events: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(sock, events)
    return bool(poller.poll(math.ceil(1000 * seconds)))
