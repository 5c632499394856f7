"""A sender's connection to the reader's address, which it takes only where the reader is of its own user.

Of a tcp address ZeroMQ connects, and connects again, by itself. Of an ipc address that would be to whoever listens
there by then: so each connection is made here, after a look at the owner of the socket, and nothing of hal's is sent
before the kernel has said who is at the other end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zmq
from hal_core import InvalidValue, Unavailable
from zmq.utils.monitor import recv_monitor_message

from hal.timeouts import TIMEOUTS
from hal.transport.addresses import check_is_socket
from hal.transport.curve import CurveKeys, secure_sender
from hal.transport.parts import PART_BYTES, joined, limit_parts, parts_of
from hal.transport.sockets import dealer
from hal.transport.urls import check_named_port, socket_of

_IN, _IN_OUT = int(zmq.POLLIN), int(zmq.POLLIN | zmq.POLLOUT)  # enums cost a call
_WATCHED = int(zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
_WATCHED |= int(zmq.EVENT_CONNECT_RETRIED)
_DONTWAIT = int(zmq.DONTWAIT)
#: From this size on ZeroMQ sends from the bytes themselves instead of copying them; frames never change.
_NO_COPY_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")  #: process, user and group, as SO_PEERCRED gives them
_CURE = "run worker and reader as one user, or choose a folder that others cannot write to (private_ipc_url())"
_log = logging.getLogger("hal.transport")


class Connection:
    """The socket of a session, of a context of its own. All but the constructor is for the sink's thread alone."""

    def __init__(self, url: str, session: int, curve: CurveKeys | None, wake_end: int) -> None:
        """Raises InvalidValue for an address that makes no sense, Unavailable for another user's socket.

        ``wake_end`` is a descriptor that ends :meth:`wait` when it can be read.
        """
        self._url, self._session, self._curve, self._wake_end = url, session, curve, wake_end
        self._path = socket_of(url)
        if self._path is None:
            check_named_port(url)
        else:
            _check_path(url, self._path)
        self.stranger = ""  #: in words, whose socket lies there in place of one of this user's
        self.is_open = self._path is None  #: whether words may be sent; if there is nobody, ZeroMQ says so
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._number = 0
        self._is_used = False  # the socket was connected before, and may have something left of that
        self._polls_out = False
        self._others: tuple[Any, ...] = ()
        self.others_came = False  #: whether the last wait ended with one of them
        self._pause = TIMEOUTS.reconnect
        self._next_look: float | None = None  # None: a connection is there, or ZeroMQ sees to it
        try:
            self._open()
            if self._path is None:
                self._connect()
            else:
                self._next_look = 0.0
        except BaseException:
            self.close(0)
            self.end()
            raise

    def follow(self) -> bool:
        """Take note of what became of the connection, and make one if it is time. Return whether there is a new one."""
        new = False
        while int(self._monitor.get(zmq.EVENTS)) & _IN:
            event = recv_monitor_message(self._monitor, zmq.DONTWAIT)
            kind = event["event"]
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                new, self._pause = True, TIMEOUTS.reconnect
            elif self._path is None:  # ZeroMQ tries again, but not after a broken protocol or a key that was refused
                self._next_look = time.monotonic() + TIMEOUTS.reconnect_most if kind == zmq.EVENT_DISCONNECTED else None
            else:
                self.is_open = kind == zmq.EVENT_CONNECTED and self._knows(int(event["value"]))
                self._next_look = None if self.is_open else time.monotonic() + self._pause
        if self._next_look is not None and time.monotonic() >= self._next_look:  # it may have been made meanwhile
            self._look_for_reader()
        return new and self.is_open

    def wait(self, until: float, *, due: bool) -> bool:
        """Wait for a word, a change, with ``due`` for room to send, or the time. Return whether it was the wake end."""
        if due is not self._polls_out:
            self._polls_out = due
            self._poller.register(self.socket, _IN_OUT if due else _IN)
        if self._next_look is not None:
            until = min(until, self._next_look)
        events: dict[Any, int] = dict(self._poller.poll(int(1000 * max(0.0, until - time.monotonic())) + 1))
        self.others_came = any(other in events for other in self._others)
        return self._wake_end in events

    @property
    def watched(self) -> tuple[zmq.Socket[bytes], int]:
        """What a poll of another's may wait for; then :meth:`follow`, and look whether a word has come."""
        return self.socket, int(self._monitor.get(zmq.FD))

    def watch(self, others: Iterable[Any]) -> None:
        """End each wait also when one of these sockets or descriptors can be read, in place of those named before."""
        if (wanted := tuple(others)) == self._others:
            return
        for former in self._others:
            self._poller.unregister(former)
        self._others = wanted
        for other in wanted:
            self._poller.register(other, _IN)

    def send(self, message: bytes) -> bool:
        """Send a message. False: there is no connection, or the reader does not keep up."""
        if not self.is_open:
            return False
        try:
            if self._curve is None or len(message) <= PART_BYTES:
                self.socket.send(message, _DONTWAIT, copy=len(message) < _NO_COPY_BYTES)
            else:
                self.socket.send_multipart(parts_of(message), _DONTWAIT)
        except zmq.Again:
            return False
        return True

    def receive(self) -> memoryview:
        """Return the next message. Raises zmq.Again if none is there."""
        return joined(self.socket.recv_multipart(_DONTWAIT, copy=False))

    def close(self, linger: int) -> None:
        """Close; what is to be sent has ``linger`` ms more."""
        self._close_sockets(linger)

    def end(self) -> None:
        """Wait for that, and give everything back."""
        self._context.term()

    def _open(self) -> None:
        """Make socket and monitor, in place of those that are there."""
        self._close_sockets(0)
        self.socket = self._made(dealer(self._context, self._session, self._number))
        if self._curve is not None:
            limit_parts(self.socket)
            secure_sender(self.socket, self._url, self._curve)
        self._number += 1
        name = f"inproc://connection-{self._number}"  # a former one is given back late
        self.socket.monitor(name, _WATCHED)
        self._monitor = self._made(self._context.socket(zmq.PAIR))
        self._monitor.rcvhwm = 0  # full, it would hold up the thread that serves the connection
        self._monitor.connect(name)
        self._poller = zmq.Poller()
        for known in (self._wake_end, self.socket, int(self._monitor.get(zmq.FD)), *self._others):
            self._poller.register(known, _IN)
        self._polls_out = self._is_used = False

    def _made(self, made: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        self._sockets.append(made)
        return made

    def _close_sockets(self, linger: int) -> None:
        for made in self._sockets:
            made.disable_monitor()
            made.close(linger=linger)
        self._sockets.clear()

    def _connect(self) -> None:
        try:
            self._is_used = True
            self.socket.connect(self._url)
        except zmq.ZMQError as error:
            what = f"cannot connect to {self._url!r}: {error}"
            raise InvalidValue(what, cure="check host and port", argument="url") from error

    def _look_for_reader(self) -> None:
        """Connect: over tcp on a new socket, over ipc if a socket of this user's lies there.

        That nobody listens on it ZeroMQ tells, or the time does.
        """
        if self._path is None:
            self._next_look = None
            self._open()
            self._connect()
            return
        now = time.monotonic()
        self._pause = min(2 * self._pause, TIMEOUTS.reconnect_most)
        self._next_look = now + self._pause
        stranger = _stranger_at(self._path)
        if stranger is not None:
            self._refuse(stranger)
        elif self._path.is_socket():
            self.stranger, self._next_look = "", now + TIMEOUTS.connection
            if self._is_used:
                self._open()
            self._connect()

    def _knows(self, descriptor: int) -> bool:
        """Whether the other end of a new connection is of this user."""
        try:
            with socket.socket(fileno=os.dup(descriptor)) as peer:
                told = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:  # it is closed again
            return False
        user = int(_CREDENTIALS.unpack(told)[1])
        if user == os.geteuid():
            return True
        self._refuse(f"on {self._path} listens {_name_of(user)}")
        self._open()  # what ZeroMQ was about to say there is dropped
        return False

    def _refuse(self, stranger: str) -> None:
        if stranger != self.stranger:
            self.stranger = stranger
            _log.warning("%s: nothing is sent there (%s)", stranger, _CURE)


def _check_path(url: str, path: Path) -> None:
    with contextlib.suppress(OSError):  # there is nothing yet, or it may not be looked at: readers may come
        check_is_socket(url, path.stat().st_mode)
    if (stranger := _stranger_at(path)) is not None:
        raise Unavailable(f"{stranger}: nothing is sent there", cure=_CURE, argument="url")


def _stranger_at(path: Path) -> str | None:
    """Say whose socket lies there; None if it is this user's, or there is none."""
    with contextlib.suppress(OSError):
        found = path.stat()
        if path.is_socket() and found.st_uid != os.geteuid():
            return f"{path} is a socket of {_name_of(found.st_uid)}"
    return None


def _name_of(user: int) -> str:
    with contextlib.suppress(KeyError):
        return f"user {user} ({pwd.getpwuid(user).pw_name}), not of {os.geteuid()}"
    return f"user {user}, not of {os.geteuid()}"
