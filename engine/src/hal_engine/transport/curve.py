"""Keys for tcp: CurveZMQ encrypts both directions, and each side authenticates the other by its public key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import zmq
from hal_core import InvalidValue, Unavailable

from hal_engine.transport.urls import scheme_of

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

_LENGTH = 40  #: characters of a key in Z85


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One side's keys in Z85, 40 characters each, and the public keys of its peers.

    A sender names one key, its reader's. A reader names every sender that it admits, or has a ``gate`` that decides.
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
        """Return a new key pair for one side."""
        _needs_curve()
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode(), peers, gate)

    @classmethod
    def shared(cls, secret: str) -> CurveKeys:
        """Return the keys of either side if both share one secret key. Raises ValueError for an invalid key."""
        public = zmq.curve_public(secret.encode()).decode()
        return cls(public, secret, (public,))

    def knowing(self, *peers: str) -> CurveKeys:
        """Return the same keys with these peers."""
        return CurveKeys(self.public, self.secret, peers)

    def callback(self, domain: str, key: bytes) -> bool:
        """Tell ZeroMQ's authenticator whether the sender with this public key is one of the peers."""
        return key.decode() in self.peers


def secure_sender(socket: zmq.Socket[bytes], url: str, keys: CurveKeys) -> None:
    """Let the sender's socket, not yet connected, talk only to the reader with that key."""
    _check(url, keys)
    if len(keys.peers) != 1:
        raise InvalidValue(f"{len(keys.peers)} peers", cure="name the reader's public key", argument="curve")
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.curve_serverkey = keys.peers[0].encode()


class Gate(Protocol):
    """Decides which peers are admitted; it is asked in its own thread."""

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the peer with this public key is admitted."""


def secure_reader(
    socket: zmq.Socket[bytes], url: str, keys: CurveKeys, gate: Gate | None = None
) -> ThreadAuthenticator:
    """Let the reader's socket, not yet bound, admit the peers that ``gate`` accepts; without a gate, only the keys'
    peers. Return the authenticator; the caller calls its ``stop()``."""
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
