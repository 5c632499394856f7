"""The wire of a transfer over ZeroMQ: ``ipc`` within a host, ``tcp`` with CURVE between hosts.

Each transfer listens at its own address, as a reader does, and connects to its receivers, as a sender does
(:mod:`hal_engine.transport`), under the number of its session.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import zmq
from hal_core import InvalidValue
from hal_core.frames import new_session
from hal_core.handover import BlockCache, BlockTransfer, Description, Patience

from hal_engine.transport.connection import Connection
from hal_engine.transport.curve import CurveKeys
from hal_engine.transport.parts import joined
from hal_engine.transport.sockets import Bound, linger_ms
from hal_engine.transport.urls import private_ipc_url, release_folder, socket_of

_DONTWAIT = int(zmq.DONTWAIT)
_SESSION = slice(24, 32)  # of a frame's header
MOST_ADMITTED = 1024
"""Most admitted peers' keys; the oldest is dropped first."""


def open_transfer(
    cache: BlockCache, url: str | None = None, curve: CurveKeys | None = None, patience: Patience | None = None
) -> BlockTransfer:
    """Return the transfer of a cache, listening at ``url``, by default at a private ipc address.

    ``curve``: the own pair of keys, for tcp; the peers' keys are in their descriptions.

    :raises InvalidValue: for an invalid address, one that cannot be bound or is in use, or keys for ipc.
    :raises Unavailable: if there are no descriptors left, or no private folder.
    """
    return BlockTransfer(cache, SocketWire(url, curve), patience)


class Admitted:
    """The admitted public keys; queried by ZeroMQ's authenticator, in its thread."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()

    def add(self, key: str) -> None:
        """Admit the owner of that key."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > MOST_ADMITTED:
            self._keys.popitem(last=False)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the peer with this public key is admitted."""
        return key.decode() in self._keys


class SocketWire:
    """See :class:`hal_core.handover.Wire`."""

    def __init__(self, url: str | None = None, curve: CurveKeys | None = None) -> None:
        self._curve, self._owned = curve, url is None
        self._admitted = Admitted()
        address = private_ipc_url() if url is None else url
        try:
            self._bound = Bound(address, curve, gate=self._admitted)
        except BaseException:
            if self._owned:
                release_folder(address)
            raise
        self.url, self.session = address, new_session()
        if socket_of(address) is None:  # a port wildcard is resolved
            self.url = bytes(self._bound.socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self.public_key = "" if curve is None else curve.public
        self._connections: dict[int, Connection] = {}
        self._heard: dict[int, bytes] = {}  # peer to the connection name of its last message
        self._made: set[int] = set()  # sessions that were connected once
        self._renewed: set[int] = set()
        self._never, self._pipe = os.pipe()  # a connection needs a descriptor that can end its wait
        self._closed = False

    def admit(self, peer: Description) -> None:
        """See :class:`hal_core.handover.Wire`."""
        if self._curve is not None:
            self._admitted.add(peer.public_key)

    def connect(self, peer: Description) -> None:
        """See :class:`hal_core.handover.Wire`. Raises Unavailable for another user's ipc socket."""
        if bool(peer.public_key) is not (self._curve is not None):
            has = "a key" if peer.public_key else "no key"
            raise InvalidValue(
                f"{peer.url} has {has}, and this side has {'one' if self._curve is not None else 'none'}",
                cure="give both sides keys, or neither",
                argument="to",
            )
        curve = None if self._curve is None else self._curve.knowing(peer.public_key)
        self._connections[peer.session] = Connection(peer.url, self.session, curve, self._never)
        self._follow(peer.session)

    def disconnect(self, peer: int) -> None:
        """See :class:`hal_core.handover.Wire`."""
        self._made.discard(peer)
        self._renewed.discard(peer)
        if (connection := self._connections.pop(peer, None)) is not None:
            connection.close(0)
            connection.end()

    def renewed(self) -> Iterable[int]:
        """See :class:`hal_core.handover.Wire`."""
        for session in self._connections:
            self._follow(session)
        renewed, self._renewed = self._renewed, set()
        return renewed

    def send(self, peer: int, message: bytes) -> bool:
        """See :class:`hal_core.handover.Wire`."""
        if peer not in self._connections:
            return False
        self._follow(peer)
        return self._connections[peer].send(message)

    def reply(self, peer: int, message: bytes) -> bool:
        """See :class:`hal_core.handover.Wire`."""
        try:
            self._bound.send(self._heard[peer], message)
        except (KeyError, zmq.ZMQError):  # it never connected, is gone, or does not keep up
            return False
        return True

    def receive(self) -> Iterable[memoryview]:
        """See :class:`hal_core.handover.Wire`."""
        with contextlib.suppress(zmq.Again):
            while True:
                who, *parts = self._bound.socket.recv_multipart(_DONTWAIT, copy=False)
                message = joined(parts)
                session = bytes(message[_SESSION])
                if session and who.bytes.startswith(b"h" + session):  # otherwise it is not from a transfer
                    self._heard[int.from_bytes(session, "little")] = who.bytes
                    with contextlib.suppress(zmq.ZMQError):  # it does not speak ZMTP 3, and only names a session
                        self._bound.know(parts[0])
                    yield message
        for connection in list(self._connections.values()):
            with contextlib.suppress(zmq.Again):
                while True:
                    yield connection.receive()

    @property
    def sockets(self) -> Sequence[Any]:
        """See :class:`hal_core.handover.Wire`."""
        watched = [one for connection in self._connections.values() for one in connection.watched]
        return [self._bound.socket, *watched]

    def close(self) -> None:
        """See :class:`hal_core.handover.Wire`. The last messages get 100 ms more."""
        if self._closed:
            return
        self._closed = True
        for connection in self._connections.values():
            connection.close(linger_ms())
        for connection in self._connections.values():
            connection.end()
        self._bound.close()
        self._bound.release()
        os.close(self._pipe)
        os.close(self._never)
        if self._owned:
            release_folder(self.url)

    def _follow(self, session: int) -> None:
        """Check a connection; its first establishment does not count as renewed."""
        if self._connections[session].follow():
            (self._renewed if session in self._made else self._made).add(session)
