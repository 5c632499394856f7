"""The two ZeroMQ sockets, with all their options in one place: a sender connects, the reader binds."""

from __future__ import annotations

import contextlib
import errno
import math
import os
from typing import Any

import zmq
from hal_core import InvalidValue

from hal.timeouts import TIMEOUTS
from hal.transport.addresses import Address
from hal.transport.curve import CurveKeys, Gate, secure_reader
from hal.transport.descriptors import GATE, READER, check_descriptors
from hal.transport.parts import limit_parts, parts_of
from hal.transport.strangers import end_strangers, name_of
from hal.transport.urls import scheme_of, socket_of

#: Messages that ZeroMQ itself may hold on their way out; the rest waits in the sender's window, where it is counted.
HIGH_WATER_MARK = 64
#: The same on their way in: no mark. Where there is one, ZeroMQ stops reading a connection; should that connection end,
#: and anything be due on it (ZeroMQ's own heartbeat, or the answer to the peer's), libzmq 4.3 aborts the process. What
#: comes in is bounded by the senders' windows (:mod:`hal.transport.protocol`).
_UNBOUNDED = 0
#: The kernel's own look whether the other host is still there: so many probes, until all are lost. It needs no thread
#: of ours and, unlike ZeroMQ's heartbeat, no word on the connection.
_KEEPALIVE_PROBES = 4
#: What the kernel or ZeroMQ says of an address that cannot be bound, in words, and the cure.
_NO_ADDRESS = "that is no address of this host", "name one that it has, by number or by a name that it knows"
_REFUSED = {
    errno.EADDRINUSE: ("another program listens there", "choose a free port"),
    errno.EACCES: ("this user may not", "choose a port above 1023, or a folder that this user can write to"),
    errno.ENODEV: _NO_ADDRESS,
    errno.EADDRNOTAVAIL: _NO_ADDRESS,
    errno.EINVAL: _NO_ADDRESS,
}


#: bytes; frames, and what they are made of, are smaller
_KEPT_BLOCK = 16 << 20


def _keep_freed_memory() -> None:
    """Have the C library keep freed blocks of up to 16 MiB, 32 MiB in all, for the next large frame.

    It gives back what is larger than the largest block that was freed so far, and the kernel then clears every page
    anew: that was four fifths of the time of encoding 500 KB. Freeing one block, untouched, is how glibc learns.
    """
    bytes(_KEPT_BLOCK)


def linger_ms() -> int:
    """Return the milliseconds in which what is left is sent when a socket closes."""
    return round(1000 * TIMEOUTS.linger)


def _set_up(socket: zmq.Socket[bytes]) -> None:
    """Set what both sides have in common."""
    # Set before the socket is bound, since connections that are taken there keep the value of that moment. Without one,
    # what was to be sent to a sender that came anew, on its former connection which has ended, is waited for without
    # end by whoever closes (docs/decisions/0049).
    socket.linger = linger_ms()
    socket.sndhwm, socket.rcvhwm = HIGH_WATER_MARK, _UNBOUNDED
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = math.ceil(TIMEOUTS.keepalive)
    socket.tcp_keepalive_cnt = _KEEPALIVE_PROBES


def dealer(context: zmq.Context[zmq.Socket[bytes]], session: int, number: int) -> zmq.Socket[bytes]:
    """Return a sender's socket, not yet connected, the ``number``-th of its session.

    Each has a name of its own. One that is given up in the middle of its handshake may end that after its successor
    has; with one name for both, the reader's socket would take it for the newer one and drop the successor, whose
    connection stays open and is never read (libzmq 4.3, router_handover).
    """
    _keep_freed_memory()
    made = context.socket(zmq.DEALER)
    _set_up(made)
    made.routing_id = b"h" + session.to_bytes(8, "little") + number.to_bytes(4, "little")
    made.immediate = True  # nothing is queued for a reader that is not there: it stays in the window
    made.reconnect_ivl, made.reconnect_ivl_max = 10, 200  # ms; of tcp
    return made


class Bound:
    """The reader's socket, of a context of its own; with keys also the gate, and of an ipc address the lock."""

    def __init__(self, url: str, curve: CurveKeys | None = None, gate: Gate | None = None) -> None:
        """Raises InvalidValue for an address that cannot be bound, or has a reader already.

        ``gate``: says whom to let in where the keys' peers are not all that will come.
        """
        scheme_of(url)
        count = READER + (GATE if curve is not None else 0)
        check_descriptors(count, f"a reader of {url}", argument="url")
        path = socket_of(url)
        self._gate: Any = None
        self.has_keys = curve is not None  #: so that messages come in parts
        self._address: Address | None = None
        _keep_freed_memory()
        self._context = zmq.Context()
        try:
            if path is not None:
                self._address = Address(url, path)
            self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
            _set_up(self.socket)
            self.socket.router_handover = True  # over tcp a sender connects anew by itself, and takes over its own name
            self.socket.router_mandatory = True  # a word to a sender that is gone is an error, not a silence
            if curve is not None:
                limit_parts(self.socket)
                self._gate = secure_reader(self.socket, url, curve, gate)
            if self._address is not None:  # ZeroMQ would make the socket as the umask says, and remove others'
                self.socket.setsockopt(zmq.USE_FD, self._address.hand_over())
            self.socket.bind(url)
            self._endpoint = bytes(self.socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
            self._known: dict[int, int] = {}  # descriptors of peers' connections -> their inodes, as numbers are reused
        except BaseException as error:
            self.give_up()
            if not isinstance(error, zmq.ZMQError):
                raise
            why, cure = _REFUSED.get(error.errno or 0, (str(error), "choose a folder that exists and can be written"))
            raise InvalidValue(f"cannot bind {url!r}: {why}", cure=cure, argument="url") from error

    def know(self, message: zmq.Frame) -> None:
        """Take note of the connection on which the message came: it is a peer's, and no stranger's.

        Raises ZMQError where ZeroMQ cannot tell it: of those that do not speak ZMTP 3.
        """
        self.know_descriptor(int(message.get(zmq.SRCFD)))

    def know_descriptor(self, descriptor: int) -> None:
        """The same, by the connection's descriptor."""
        with contextlib.suppress(OSError):  # it has just been closed
            self._known[descriptor] = os.fstat(descriptor).st_ino

    def send(self, to: bytes, message: bytes) -> None:
        """Send a message to the peer of that name. Raises ZMQError where it is gone or does not keep up."""
        self.socket.send_multipart([to, *(parts_of(message) if self.has_keys else [message])], zmq.DONTWAIT)

    def close(self) -> None:
        """Close, nobody finds it any more; what is to be sent to peers that were heard has 100 ms more."""
        if self._address is not None:
            self._address.remove_socket()
        end_strangers(name_of(self._endpoint), self._known.values())
        self.socket.close(linger=linger_ms())
        if self._gate is not None:
            self._gate.stop()
        self._context.term()

    def release(self) -> None:
        """Give the address back, last of all."""
        if self._address is not None:
            self._address.release()

    def give_up(self) -> None:
        """Close at once, after an error; nothing is left."""
        if self._gate is not None:
            self._gate.stop()
        if self._address is not None:
            self._address.remove_socket()
        self._context.destroy(linger=0)
        self.release()
