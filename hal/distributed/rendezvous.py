"""Rendezvous of ranks that the user's own launcher started: it gives them the engine's address.

Rank 0 serves a store of Paddle's at its endpoint. The other ranks write their public keys there; rank 0 starts the
engine and writes its address. Every peer that reaches the store can read and overwrite it, so each message carries an
HMAC with ``HAL_RANKS_SECRET``. Messages with a wrong HMAC are ignored, and each side writes its own again until it has
read the other's. Only public keys and addresses are written.

Without a secret, ranks must be on one host. They connect to the loopback address, and accept only an engine at an ipc
folder that belongs to their user alone.
"""

from __future__ import annotations

import hmac
import os
import queue
import socket
import stat
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from hal_core import GroupLost, InvalidValue, Unavailable

from hal.timeouts import TIMEOUTS
from hal.transport.urls import socket_of

SECRET = "HAL_RANKS_SECRET"
"""Variable with the secret of a job on several hosts, equal on all ranks."""
_LEAST = 16
"""Least characters of a secret."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Launched:
    """The settings that Paddle's launcher passed to this process: its rank, and the endpoints of all."""

    rank: int
    endpoints: tuple[str, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launched | None:
        """Read the variables ``PADDLE_TRAINER…``. Return None in a process that is not one of several ranks."""
        endpoints = tuple(filter(None, environment.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")))
        size = environment.get("PADDLE_TRAINERS_NUM", "1")
        if not size.isdigit() or int(size) < 2 or len(endpoints) != int(size):
            return None
        return cls(int(environment["PADDLE_TRAINER_ID"]), endpoints)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.endpoints)

    @property
    def hosts(self) -> list[str]:
        """Hosts of the ranks, each once, rank 0's first."""
        return list(dict.fromkeys(endpoint.rpartition(":")[0] for endpoint in self.endpoints))

    @property
    def rank_zero(self) -> tuple[str, int]:
        """Host and port of rank 0."""
        host, _, port = self.endpoints[0].rpartition(":")
        return host, int(port)

    def check_size(self, wanted: int) -> None:
        """Raise :class:`InvalidValue`, the same on every rank, unless there are ``wanted`` ranks."""
        if wanted != self.size:
            raise InvalidValue(
                f"--tp times --dp is {wanted}, and the launcher has started {self.size} ranks",
                cure="make --tp times --dp the number of ranks, or start hal run without a launcher",
                argument="--tp",
            )

    def secret(self, environment: Mapping[str, str]) -> str:
        """Return the job's secret; "" on one host without one. Raises :class:`InvalidValue` if several hosts lack
        it."""
        given = environment.get(SECRET, "")
        cure = "set it to the same random text on all ranks, as of openssl rand -hex 32"
        if not given and len(self.hosts) > 1:
            what = f"the ranks are on {len(self.hosts)} hosts ({', '.join(self.hosts)}), and it is not set"
            raise InvalidValue(what, cure=cure, argument=SECRET)
        if 0 < len(given) < _LEAST:
            raise InvalidValue(f"it has fewer than {_LEAST} characters", cure=cure, argument=SECRET)
        return given


class Present(msgspec.Struct):
    """A rank is up. ``key``: its public key, "" if all ranks are on one host."""

    rank: int
    key: str


class Where(msgspec.Struct):
    """The engine's address and public key."""

    url: str
    key: str


class Read(msgspec.Struct):
    """A rank has read the engine's address."""

    rank: int


_Message = TypeVar("_Message", Present, Where, Read)


class Store(Protocol):
    """The part of Paddle's store that is used. ``get`` waits until the place has been written once."""

    def set(self, place: str, value: str, /) -> None:
        """Write a value."""

    def get(self, place: str, /) -> bytes:
        """Read a value."""


class Seal:
    """Makes and checks messages of one job. The HMAC covers the ranks' endpoints, the place and ``about``."""

    def __init__(self, secret: str, launched: Launched) -> None:
        self._secret, self._job = secret.encode(), ",".join(launched.endpoints)

    def pack(self, message: msgspec.Struct, place: str, about: str = "") -> str:
        """Return the message as text."""
        body = msgspec.msgpack.encode(message)
        return b64encode(self._code(body, place, about) + body).decode()

    def unpack(self, value: bytes, kind: type[_Message], place: str, about: str = "") -> _Message | None:
        """Return the message; None if it was not packed for this place with the same secret."""
        try:
            data = b64decode(value, validate=True)
            code, body = data[:32], data[32:]
            if not hmac.compare_digest(code, self._code(body, place, about)):
                return None
            return msgspec.msgpack.decode(body, type=kind)
        except (ValueError, msgspec.MsgspecError):
            return None

    def _code(self, body: bytes, place: str, about: str) -> bytes:
        said = "\0".join(("hal rendezvous 2", self._job, place, about)).encode() + b"\0" + body
        return hmac.new(self._secret, said, "sha256").digest()


class Rendezvous:
    """One rank's part. ``seconds``: limit for all of it. ``look`` is called from time to time; what it raises ends the
    rendezvous."""

    def __init__(
        self, launched: Launched, secret: str, seconds: float, look: Callable[[], None], store: Store | None = None
    ) -> None:
        self._launched, self._seal, self._local, self._look = launched, Seal(secret, launched), not secret, look
        self._seconds, self.end = seconds, time.monotonic() + seconds
        self._store, self._over = store, threading.Event()
        self._keys: dict[int, str] = {}

    @property
    def _address(self) -> tuple[str, int]:
        host, port = self._launched.rank_zero
        return ("127.0.0.1" if self._local else host), port

    def keys(self) -> list[str]:
        """On rank 0: serve the store and wait for all other ranks. Return their public keys.

        Raises :class:`Unavailable` for a busy port, :class:`GroupLost` naming the ranks that are missing.
        """
        if self._store is None:
            self._store = self._served()
        store, others = self._store, range(1, self._launched.size)
        places = [f"{name}/{rank}" for name in ("present", "where", "read") for rank in others]

        def clear() -> None:
            for place in places:
                store.set(place, "")

        self._within(clear, lambda: "its own store does not answer")
        found = self._exchange({}, {rank: self._reads(Present, "present", rank) for rank in others})
        self._keys = {rank: found[rank].key for rank in others}
        return [key for key in self._keys.values() if key]

    def tell(self, where: Where) -> None:
        """On rank 0: write the engine's address, and close the store when all ranks have read it."""
        places = {rank: f"where/{rank}" for rank in self._keys}
        said = {place: self._seal.pack(where, place, self._keys[rank]) for rank, place in places.items()}
        self._exchange(said, {rank: self._reads(Read, "read", rank) for rank in self._keys})
        self._store = None

    def answer(self, key: str) -> Where:
        """On another rank: write its public key. Return the engine's address. Raises :class:`GroupLost`."""
        rank = self._launched.rank
        if self._store is None:
            self._store = self._within(self._connected, lambda: "it does not listen there")
        present, where, read = (f"{name}/{rank}" for name in ("present", "where", "read"))
        said = {present: self._seal.pack(Present(rank, key), present)}
        found = self._exchange(said, {0: lambda store: self._trusted(store.get(where), where, key)})
        self._exchange({read: self._seal.pack(Read(rank), read)}, {})
        self._store = None
        return found[0]

    def _reads(self, kind: type[_Message], name: str, rank: int) -> Callable[[Store], _Message | None]:
        """Return a reader of a rank's message that checks the rank's number."""
        place = f"{name}/{rank}"

        def read(store: Store) -> _Message | None:
            message = self._seal.unpack(store.get(place), kind, place)
            return message if message is not None and getattr(message, "rank", None) == rank else None

        return read

    def _trusted(self, value: bytes, place: str, key: str) -> Where | None:
        """Return the engine's address; None for a message that is not rank 0's, as far as can be known."""
        message = self._seal.unpack(value, Where, place, key)
        return None if message is None or (self._local and not _is_own(message.url)) else message

    def _exchange(self, said: Mapping[str, str], wanted: Mapping[int, Callable[[Store], _T | None]]) -> dict[int, _T]:
        """Write ``said`` repeatedly until all ``wanted`` messages of ranks could be read. Return them."""
        store, found = self._store, dict[int, _T]()
        assert store is not None

        def talk() -> None:
            while not self._over.is_set():
                for place, value in said.items():
                    store.set(place, value)
                for rank, read in wanted.items():
                    if rank not in found and (message := read(store)) is not None:
                        found[rank] = message
                if len(found) == len(wanted):
                    return
                self._over.wait(TIMEOUTS.pause)

        self._within(talk, lambda: f"no message of rank(s) {sorted(wanted.keys() - found.keys())}")
        return found

    def _within(self, call: Callable[[], _T], missing: Callable[[], str]) -> _T:
        """Call the store, which may block for ever, in a thread. Wait for it until the deadline."""
        answers = queue.SimpleQueue[tuple[_T | None, Exception | None]]()

        def attempt() -> None:
            try:
                answers.put((call(), None))
            except Exception as error:  # noqa: BLE001 (raised in the command's thread)
                answers.put((None, error))

        threading.Thread(target=attempt, name="hal-rendezvous", daemon=True).start()
        host, port = self._launched.rank_zero
        try:
            while True:
                self._look()
                left = self.end - time.monotonic()
                try:
                    answer, error = answers.get(timeout=max(0.0, min(left, TIMEOUTS.look)))
                except queue.Empty:
                    if left > 0:
                        continue
                    raise GroupLost(
                        f"rank {self._launched.rank} did not meet the others within {self._seconds:g} s at rank 0's "
                        f"endpoint {host}:{port}: {missing()}",
                        cure=f"see their output, and whether all have the same {SECRET}",
                    ) from None
                if error is not None:
                    what = f"rank 0's store at {host}:{port} failed: {str(error).strip().splitlines()[0]}"
                    raise GroupLost(what, cure="see rank 0's output, and what else listens there") from error
                return answer  # type: ignore[return-value]
        except BaseException:
            self._over.set()
            raise

    def _served(self) -> Store:
        host, port = self._launched.rank_zero
        try:  # Paddle would end the process
            socket.create_server(("", port)).close()
        except OSError as error:
            raise Unavailable(
                f"port {port} of {host}, rank 0's endpoint, is taken by another program",
                cure="end that program, or have the launcher choose another port (--start_port)",
                argument="PADDLE_TRAINER_ENDPOINTS",
            ) from error
        return self._made(serves=True)

    def _connected(self) -> Store:
        while True:
            left = self.end - time.monotonic()
            try:
                socket.create_connection(self._address, max(0.001, left)).close()
            except OSError:
                if left <= 0 or self._over.is_set():
                    raise
                self._over.wait(TIMEOUTS.pause)
            else:
                return self._made(serves=False)

    def _made(self, *, serves: bool) -> Store:
        """Create the store without a number of ranks: with one, Paddle would wait while it holds the GIL."""
        from paddle.base import core

        host, port = self._address
        made: Any = core.TCPStore(host, port, serves, 0, max(1, round(self._seconds)))
        return made  # type: ignore[no-any-return]


def _is_own(url: str) -> bool:
    """Return whether an ipc url lies in a folder that its user alone can enter."""
    path = socket_of(url)
    try:
        found = None if path is None else path.parent.stat()
    except OSError:
        return False
    return found is not None and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
