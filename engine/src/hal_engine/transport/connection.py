"""A sender's connection to the reader's address. It connects only if the reader runs as the same user.

For a tcp address ZeroMQ connects and reconnects by itself. For an ipc address ZeroMQ would connect to any process that
listens there by then. So this module creates each ipc connection itself, after it has checked the owner of the socket.
It sends only after the kernel has named the user at the other end.
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

from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.addresses import check_is_socket
from hal_engine.transport.curve import CurveKeys, secure_sender
from hal_engine.transport.parts import PART_BYTES, joined, limit_parts, parts_of
from hal_engine.transport.sockets import dealer
from hal_engine.transport.urls import check_named_port, socket_of

_IN, _IN_OUT = int(zmq.POLLIN), int(zmq.POLLIN | zmq.POLLOUT)  # converted once: an enum costs a call
_WATCHED = int(zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
_WATCHED |= int(zmq.EVENT_CONNECT_RETRIED)
_DONTWAIT = int(zmq.DONTWAIT)
#: From this size on ZeroMQ sends the bytes without a copy; frames never change.
_NO_COPY_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")  #: process, user and group, in the format of SO_PEERCRED
_CURE = "run worker and reader as one user, or choose a folder that others cannot write to (private_ipc_url())"
_log = logging.getLogger("hal_engine.transport")


class Connection:
    """The socket of a session, with its own context. Only the sink's thread calls it after the constructor."""

    def __init__(self, url: str, session: int, curve: CurveKeys | None, wake_end: int) -> None:
        """Raise InvalidValue for an invalid address, Unavailable for a socket of another user.

        ``wake_end`` is a descriptor that ends :meth:`wait` when it becomes readable.
        """
        self._url, self._session, self._curve, self._wake_end = url, session, curve, wake_end
        self._path = socket_of(url)
        if self._path is None:
            check_named_port(url)
        else:
            _check_path(url, self._path)
        self.stranger = ""  #: the owner of the socket there, in words, if it is another user
        self.is_open = self._path is None  #: whether messages may be sent; over tcp ZeroMQ decides
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._number = 0
        self._is_used = False  # the socket was connected before, and may still hold messages of that connection
        self._polls_out = False
        self._others: tuple[Any, ...] = ()
        self.others_came = False  #: whether one of the watched sockets ended the last wait
        self._pause = TIMEOUTS.reconnect
        self._next_look: float | None = None  # None: there is a connection, or ZeroMQ reconnects
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
        """Read the connection's events, and connect if it is time. Return whether there is a new connection."""
        new = False
        while int(self._monitor.get(zmq.EVENTS)) & _IN:
            event = recv_monitor_message(self._monitor, zmq.DONTWAIT)
            kind = event["event"]
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                new, self._pause = True, TIMEOUTS.reconnect
            elif self._path is None:  # ZeroMQ reconnects, but not after a protocol error or a refused key
                self._next_look = time.monotonic() + TIMEOUTS.reconnect_most if kind == zmq.EVENT_DISCONNECTED else None
            else:
                self.is_open = kind == zmq.EVENT_CONNECTED and self._knows(int(event["value"]))
                self._next_look = None if self.is_open else time.monotonic() + self._pause
        if self._next_look is not None and time.monotonic() >= self._next_look:  # a socket may exist there by now
            self._look_for_reader()
        return new and self.is_open

    def wait(self, until: float, *, due: bool) -> bool:
        """Wait for a message, a change, the time, or with ``due`` for room to send. Return whether the wake end ended
        the wait."""
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
        """Return what another poll may wait for. After it, call :meth:`follow` and check for a message."""
        return self.socket, int(self._monitor.get(zmq.FD))

    def watch(self, others: Iterable[Any]) -> None:
        """End each wait also when one of these sockets or descriptors becomes readable. They replace the former
        ones."""
        if (wanted := tuple(others)) == self._others:
            return
        for former in self._others:
            self._poller.unregister(former)
        self._others = wanted
        for other in wanted:
            self._poller.register(other, _IN)

    def send(self, message: bytes) -> bool:
        """Send a message. Return False if there is no connection or the reader is too slow."""
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
        """Return the next message. Raises zmq.Again if there is none."""
        return joined(self.socket.recv_multipart(_DONTWAIT, copy=False))

    def close(self, linger: int) -> None:
        """Close the socket; unsent messages get ``linger`` ms more."""
        self._close_sockets(linger)

    def end(self) -> None:
        """Wait for the unsent messages, and release everything."""
        self._context.term()

    def _open(self) -> None:
        """Create the socket and its monitor, and replace the former ones."""
        self._close_sockets(0)
        self.socket = self._made(dealer(self._context, self._session, self._number))
        if self._curve is not None:
            limit_parts(self.socket)
            secure_sender(self.socket, self._url, self._curve)
        self._number += 1
        name = f"inproc://connection-{self._number}"  # a former name is released late
        self.socket.monitor(name, _WATCHED)
        self._monitor = self._made(self._context.socket(zmq.PAIR))
        self._monitor.rcvhwm = 0  # a full monitor would block the thread that serves the connection
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
        """Connect: over tcp on a new socket, over ipc if a socket of this user is there.

        If nobody listens on it, ZeroMQ reports that, or the time runs out.
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
        """Return whether the other end of a new connection runs as this user."""
        try:
            with socket.socket(fileno=os.dup(descriptor)) as peer:
                told = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:  # it is already closed
            return False
        user = int(_CREDENTIALS.unpack(told)[1])
        if user == os.geteuid():
            return True
        self._refuse(f"on {self._path} listens {_name_of(user)}")
        self._open()  # this drops the unread events of the former socket
        return False

    def _refuse(self, stranger: str) -> None:
        if stranger != self.stranger:
            self.stranger = stranger
            _log.warning("%s: nothing is sent there (%s)", stranger, _CURE)


def _check_path(url: str, path: Path) -> None:
    with contextlib.suppress(OSError):  # it is missing, or cannot be examined: a reader may come
        check_is_socket(url, path.stat().st_mode)
    if (stranger := _stranger_at(path)) is not None:
        raise Unavailable(f"{stranger}: nothing is sent there", cure=_CURE, argument="url")


def _stranger_at(path: Path) -> str | None:
    """Name the owner of the socket there; None if it is this user, or there is no socket."""
    with contextlib.suppress(OSError):
        found = path.stat()
        if path.is_socket() and found.st_uid != os.geteuid():
            return f"{path} is a socket of {_name_of(found.st_uid)}"
    return None


def _name_of(user: int) -> str:
    with contextlib.suppress(KeyError):
        return f"user {user} ({pwd.getpwuid(user).pw_name}), not of {os.geteuid()}"
    return f"user {user}, not of {os.geteuid()}"
