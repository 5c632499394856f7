"""Keys for tcp: CurveZMQ encrypts both ways, and each side knows the other by its public key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import zmq
from hal_core import InvalidValue, Unavailable

from hal.transport.urls import scheme_of

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

_LENGTH = 40  #: characters of a key in Z85


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One side's keys in Z85, 40 characters each, and the public keys of those it talks to.

    A sender names its reader, one key; a reader names every sender that it lets in, or has a ``gate`` that knows them.
    """

    public: str
    secret: str = field(repr=False)
    peers: tuple[str, ...] = ()
    gate: Gate | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for key in (self.public, self.secret, *self.peers):
            if not isinstance(key, str) or len(key.encode()) != _LENGTH:
                raise InvalidValue(
                    f"a key is no text of {_LENGTH} characters", cure="CurveKeys.new()", argument="curve"
                )
        if _needs_curve() and zmq.curve_public(self.secret.encode()).decode() != self.public:
            raise InvalidValue("the public key is not the secret one's", cure="CurveKeys.new()", argument="curve")

    @classmethod
    def new(cls, *peers: str, gate: Gate | None = None) -> CurveKeys:
        """Return a new pair of keys for one side."""
        _needs_curve()
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode(), peers, gate)

    @classmethod
    def shared(cls, secret: str) -> CurveKeys:
        """Return the keys of either side where both have the same secret one. Raises ValueError for no key."""
        public = zmq.curve_public(secret.encode()).decode()
        return cls(public, secret, (public,))

    def knowing(self, *peers: str) -> CurveKeys:
        """Return the same keys for talking to these peers."""
        return CurveKeys(self.public, self.secret, peers)

    def callback(self, domain: str, key: bytes) -> bool:
        """Tell ZeroMQ's authenticator whether the sender with this public key is one of the peers."""
        return key.decode() in self.peers


def secure_sender(socket: zmq.Socket[bytes], url: str, keys: CurveKeys) -> None:
    """Have the sender's socket, not yet connected, talk to the reader with that key alone."""
    _check(url, keys)
    if len(keys.peers) != 1:
        raise InvalidValue(f"{len(keys.peers)} peers", cure="name the reader's public key", argument="curve")
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.curve_serverkey = keys.peers[0].encode()


class Gate(Protocol):
    """Says who may come in; it is asked in a thread of its own."""

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the peer with this public key may."""


def secure_reader(
    socket: zmq.Socket[bytes], url: str, keys: CurveKeys, gate: Gate | None = None
) -> ThreadAuthenticator:
    """Have the reader's socket, not yet bound, let in those that ``gate`` knows, without one the keys' peers alone.
    Return what to ``stop()``."""
    from zmq.auth.thread import ThreadAuthenticator

    _check(url, keys)
    gate = keys.gate if gate is None else gate
    if gate is None and not keys.peers:
        raise InvalidValue("no peers, so nobody is let in", cure="name the senders' public keys", argument="curve")
    asked = ThreadAuthenticator(socket.context)
    asked.start()
    asked.configure_curve_callback("*", keys if gate is None else gate)
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.curve_server = True
    return asked


def _check(url: str, keys: CurveKeys) -> None:
    if scheme_of(url) != "tcp":
        raise InvalidValue(f"{url!r} is no tcp address", cure="ipc is private by its folder", argument="curve")
    if not isinstance(keys, CurveKeys):
        raise InvalidValue(f"{type(keys).__name__} is no CurveKeys", cure="CurveKeys.new()", argument="curve")


def _needs_curve() -> bool:
    if not zmq.has("curve"):
        raise Unavailable("this ZeroMQ was built without CURVE", cure="install pyzmq's own wheel", argument="curve")
    return True
