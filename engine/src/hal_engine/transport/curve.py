"""The greeting of a channel: its purpose; and over tcp the keys, by which everything after it is encrypted and
authenticated.

The side that connects names the purpose of the channel, and a listener takes only its own: a connection for one purpose
cannot be used for another. Without keys that is all.

Both sides know, or decide on, the other's public key (X25519). The caller sends its public key and a fresh one, the
answering side a fresh one. Three Diffie-Hellman results, of the fresh keys and of each side's own key with the other's
fresh key, give one key for each direction (BLAKE2b over the purpose, these results and all public keys). So only the
owners of both own keys can compute them, a recording is of no use later, and a key that is lost later opens no
recording. Frames are sealed with ChaCha20-Poly1305, numbered from 0 in each direction.

These are the messages and results of the Noise framework's pattern KK1, with one hash in the place of its chain. Other
than there the caller names its key in the open, since a listener has several peers: who listens on the way learns which
keys meet. Each side shows its key by its first sealed frame. An owner of one key that many share is not known from the
others.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, TypeAlias

from hal_core import InvalidValue

Purpose: TypeAlias = Literal["control", "records", "blocks"]
"""The contents of a channel: control messages, steps and records between engine and rank; records to a reader; blocks
of keys and values between workers."""
_MAGIC, _PURPOSE = b"hal 3 ", 8
"""Version of the greeting; another one is refused. Bytes of the purpose after it."""
_KEY = 32
_NONCE = struct.Struct("<4xQ")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
"""Of Z85 (ZeroMQ's RFC 32), in which keys are written."""
_LENGTH = 40

Admits = Callable[[str], bool]
"""Whether the owner of this public key is let in."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One side's pair of keys, and the public keys of its peers, each as 40 characters (Z85).

    A sender names one key, its reader's. A reader names every sender that it admits, or has ``admits`` decide.
    """

    public: str
    secret: str = field(repr=False)
    peers: tuple[str, ...] = ()
    admits: Admits | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for key in (self.public, self.secret, *self.peers):
            if not isinstance(key, str) or _decoded(key) is None:
                raise InvalidValue(
                    f"a key is no text of {_LENGTH} characters", cure="CurveKeys.new()", argument="curve"
                )
        if _public_of(_bytes_of(self.secret)) != _bytes_of(self.public):
            raise InvalidValue("the public key is not the secret one's", cure="CurveKeys.new()", argument="curve")

    @classmethod
    def new(cls, *peers: str, admits: Admits | None = None) -> CurveKeys:
        """Return a new pair of keys for one side."""
        secret = _new_secret()
        return cls(_encoded(_public_of(secret)), _encoded(secret), peers, admits)

    @classmethod
    def shared(cls, secret: str) -> CurveKeys:
        """Return the keys of either side if both share one secret key. Raises ValueError for an invalid key."""
        if _decoded(secret) is None:
            raise ValueError(f"it has no {_LENGTH} characters of a key")
        public = _encoded(_public_of(_bytes_of(secret)))
        return cls(public, secret, (public,))

    def knowing(self, *peers: str) -> CurveKeys:
        """Return the same keys with these peers."""
        return CurveKeys(self.public, self.secret, peers)

    def admitting(self, key: str) -> bool:
        """Return whether the owner of this public key is one of the peers."""
        return key in self.peers if self.admits is None else self.admits(key)


class Sealer:
    """One end of a sealed stream. Frames must be opened in the order in which they were sealed."""

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        self._wrong = InvalidTag
        self._encrypt, self._decrypt = ChaCha20Poly1305(send_key).encrypt, ChaCha20Poly1305(receive_key).decrypt
        self._sent = self._received = 0

    def seal(self, frame: bytes) -> bytes:
        """Return the next frame, sealed."""
        nonce, self._sent = _NONCE.pack(self._sent), self._sent + 1
        return self._encrypt(nonce, frame, None)

    def open(self, sealed: memoryview) -> bytes:
        """Return the frame that was sealed. Raises ValueError if it is not the next one of this stream."""
        nonce, self._received = _NONCE.pack(self._received), self._received + 1
        try:
            return self._decrypt(nonce, sealed, None)
        except (self._wrong, ValueError) as error:
            raise ValueError("it uses another key") from error


class Handshake:
    """One side's part, for a channel of this ``purpose``. ``greeting``: its first bytes; none on the side that
    answers. ``has_answer``: whether the peer sends something for :meth:`take`."""

    def __init__(self, purpose: Purpose, keys: CurveKeys | None = None, *, calls: bool) -> None:
        """``calls``: this side has connected, to the one peer that ``keys`` name."""
        self.purpose, self._keys, self._calls = purpose, keys, calls
        self._head = _MAGIC + purpose.encode().ljust(_PURPOSE)
        self.greeting, self.has_answer = self._head if calls else b"", keys is not None or not calls
        if keys is not None:
            self._fresh_secret = _new_secret()
            self._fresh_public = _public_of(self._fresh_secret)
            self.greeting += _bytes_of(keys.public) + self._fresh_public if calls else b""

    def take(self, greeting: bytes) -> tuple[bytes, Sealer | None, str]:
        """Take the peer's greeting. Return the answer, or nothing; what seals from here on; and the peer's key.

        Raises ValueError for bytes that are no greeting of this version, for another purpose, for a peer with keys
        where this side has none or the other way round, and for a key that is not let in.
        """
        keys = greeting[len(self._head) :]
        if not greeting.startswith(_MAGIC):
            raise ValueError("it sends no greeting of this version of hal")
        if not greeting.startswith(self._head):
            named = greeting[len(_MAGIC) : len(self._head)].decode("ascii", "replace").rstrip()
            raise ValueError(f"it is a connection for {named!r}, and this one is for {self.purpose!r}")
        if self._keys is None:
            if keys:
                raise ValueError("it has a key, and this side has none")
            return b"", None, ""
        if len(keys) != _KEY * (1 if self._calls else 2):
            raise ValueError("it sends no greeting of a peer with keys")
        if self._calls:
            (peer,), answer = self._keys.peers, b""
        else:
            peer, answer = _encoded(keys[:_KEY]), self._head + self._fresh_public
            if not self._keys.admitting(peer):
                raise ValueError("its key is not let in")
        return answer, self._sealer(self._keys, _bytes_of(peer), keys[-_KEY:]), peer

    def _sealer(self, keys: CurveKeys, peer: bytes, fresh: bytes) -> Sealer:
        own = _bytes_of(keys.secret)
        both_fresh = _shared(self._fresh_secret, fresh)
        own_with_fresh, fresh_with_own = _shared(own, fresh), _shared(self._fresh_secret, peer)
        mine, theirs = (_bytes_of(keys.public), self._fresh_public), (peer, fresh)
        caller, answerer = (mine, theirs) if self._calls else (theirs, mine)
        of_caller, of_answerer = (own_with_fresh, fresh_with_own) if self._calls else (fresh_with_own, own_with_fresh)
        mixed = blake2b(self._head, digest_size=64)
        for part in (both_fresh, of_caller, of_answerer, *caller, *answerer):
            mixed.update(part)
        one, other = mixed.digest()[:_KEY], mixed.digest()[_KEY:]
        return Sealer(one, other) if self._calls else Sealer(other, one)


def _new_secret() -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate().private_bytes_raw()


def _public_of(secret: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def _shared(secret: bytes, public: bytes) -> bytes:
    """Return the Diffie-Hellman result. Raises ValueError for a key of small order, which anybody could compute."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    return X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))


def _bytes_of(key: str) -> bytes:
    found = _decoded(key)
    assert found is not None  # checked where the key was given
    return found


def _decoded(key: str) -> bytes | None:
    """Return the 32 bytes of a key in Z85; None for text that is none."""
    if len(key) != _LENGTH or any(digit not in _DIGITS for digit in key):
        return None
    found = b""
    for at in range(0, _LENGTH, 5):
        number = 0
        for digit in key[at : at + 5]:
            number = 85 * number + _DIGITS.index(digit)
        if number >> 32:
            return None
        found += number.to_bytes(4, "big")
    return found


def _encoded(key: bytes) -> str:
    found = ""
    for at in range(0, _KEY, 4):
        number = int.from_bytes(key[at : at + 4], "big")
        found += "".join(_DIGITS[number // 85**place % 85] for place in range(4, -1, -1))
    return found
