"""The two ZeroMQ sockets, with all their options in one place: a sender connects, the reader binds."""

from __future__ import annotations

import contextlib
import errno
import math
import os
from typing import Any

import zmq
from hal_core import InvalidValue

from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.addresses import Address
from hal_engine.transport.curve import CurveKeys, Gate, secure_reader
from hal_engine.transport.descriptors import GATE, READER, check_descriptors
from hal_engine.transport.parts import limit_parts, parts_of
from hal_engine.transport.strangers import end_strangers, name_of
from hal_engine.transport.urls import scheme_of, socket_of

#: Outgoing messages that ZeroMQ itself may hold; the rest waits in the sender's window, where it is counted.
HIGH_WATER_MARK = 64
#: The same for incoming messages: no limit. With a limit, ZeroMQ stops reading a connection. If that connection then
#: ends while a message is due on it (ZeroMQ's heartbeat, or the answer to the peer's), libzmq 4.3 aborts the process.
#: The senders' windows limit what arrives (:mod:`hal_engine.transport.protocol`).
_UNBOUNDED = 0
#: Probes by which the kernel checks the other host, until all are lost. They need no thread of ours and, unlike
#: ZeroMQ's heartbeat, no message on the connection.
_KEEPALIVE_PROBES = 4
#: The error of the kernel or ZeroMQ for an address that cannot be bound, in words, and the cure.
_NO_ADDRESS = "that is no address of this host", "name one that it has, by number or by a name that it knows"
_REFUSED = {
    errno.EADDRINUSE: ("another program listens there", "choose a free port"),
    errno.EACCES: ("this user may not", "choose a port above 1023, or a folder that this user can write to"),
    errno.ENODEV: _NO_ADDRESS,
    errno.EADDRNOTAVAIL: _NO_ADDRESS,
    errno.EINVAL: _NO_ADDRESS,
}


#: bytes; frames, and the objects they are built from, are smaller
_KEPT_BLOCK = 16 << 20


def _keep_freed_memory() -> None:
    """Make the C library keep freed blocks of up to 16 MiB, 32 MiB in all, for the next large frame.

    It returns blocks larger than the largest block freed so far, and the kernel then clears every page again. That took
    four fifths of the time of encoding 500 KB. glibc raises its threshold when one untouched block is freed.
    """
    bytes(_KEPT_BLOCK)


def linger_ms() -> int:
    """Return the milliseconds in which unsent messages are sent when a socket closes."""
    return round(1000 * TIMEOUTS.linger)


def _set_up(socket: zmq.Socket[bytes]) -> None:
    """Set the options that both sides share."""
    # Set before the socket is bound, since accepted connections keep the value of that moment. Without a limit, close()
    # waits forever for messages to a sender that has reconnected: they are queued on its former connection, which has
    # ended (docs/decisions/18).
    socket.linger = linger_ms()
    socket.sndhwm, socket.rcvhwm = HIGH_WATER_MARK, _UNBOUNDED
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = math.ceil(TIMEOUTS.keepalive)
    socket.tcp_keepalive_cnt = _KEEPALIVE_PROBES


def dealer(context: zmq.Context[zmq.Socket[bytes]], session: int, number: int) -> zmq.Socket[bytes]:
    """Return a sender's socket, not yet connected, the ``number``-th of its session.

    Each has a different name. A connection that is abandoned during its handshake may finish that after its successor
    has. With one name for both, the reader's socket would take it for the newer one and drop the successor, whose
    connection stays open and is never read (libzmq 4.3, router_handover).
    """
    _keep_freed_memory()
    made = context.socket(zmq.DEALER)
    _set_up(made)
    made.routing_id = b"h" + session.to_bytes(8, "little") + number.to_bytes(4, "little")
    made.immediate = True  # for an absent reader frames stay in the window
    made.reconnect_ivl, made.reconnect_ivl_max = 10, 200  # ms; for tcp
    return made


class Bound:
    """The reader's socket, with its own context; with keys also the gate, and for an ipc address the lock."""

    def __init__(self, url: str, curve: CurveKeys | None = None, gate: Gate | None = None) -> None:
        """Raise InvalidValue for an address that cannot be bound, or already has a reader.

        ``gate``: decides which senders to admit when the keys' peers are not all the senders.
        """
        scheme_of(url)
        count = READER + (GATE if curve is not None else 0)
        check_descriptors(count, f"a reader of {url}", argument="url")
        path = socket_of(url)
        self._gate: Any = None
        self.has_keys = curve is not None  #: whether messages come in parts
        self._address: Address | None = None
        _keep_freed_memory()
        self._context = zmq.Context()
        try:
            if path is not None:
                self._address = Address(url, path)
            self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
            _set_up(self.socket)
            self.socket.router_handover = True  # over tcp a sender reconnects by itself, and takes over its own name
            self.socket.router_mandatory = True  # a message to a sender that is gone raises an error
            if curve is not None:
                limit_parts(self.socket)
                self._gate = secure_reader(self.socket, url, curve, gate)
            if self._address is not None:  # ZeroMQ would apply the umask, and remove any socket
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
        """Note the connection on which the message came: it belongs to a peer and not to a stranger.

        Raises ZMQError if ZeroMQ does not know it: for senders that do not speak ZMTP 3.
        """
        self.know_descriptor(int(message.get(zmq.SRCFD)))

    def know_descriptor(self, descriptor: int) -> None:
        """Note a connection by its descriptor."""
        with contextlib.suppress(OSError):  # it has just been closed
            self._known[descriptor] = os.fstat(descriptor).st_ino

    def send(self, to: bytes, message: bytes) -> None:
        """Send a message to the peer of that name. Raises ZMQError if it is gone or too slow."""
        self.socket.send_multipart([to, *(parts_of(message) if self.has_keys else [message])], zmq.DONTWAIT)

    def close(self) -> None:
        """Close, so that the address cannot be found any more; messages to known peers have 100 ms more."""
        if self._address is not None:
            self._address.remove_socket()
        end_strangers(name_of(self._endpoint), self._known.values())
        self.socket.close(linger=linger_ms())
        if self._gate is not None:
            self._gate.stop()
        self._context.term()

    def release(self) -> None:
        """Release the address, last of all."""
        if self._address is not None:
            self._address.release()

    def give_up(self) -> None:
        """Close everything at once, after an error."""
        if self._gate is not None:
            self._gate.stop()
        if self._address is not None:
            self._address.remove_socket()
        self._context.destroy(linger=0)
        self.release()
