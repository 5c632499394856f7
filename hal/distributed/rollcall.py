"""Ranks that the user's own launcher has started find their engine, which rank 0 starts, through rank 0's endpoint.

Rank 0 listens there before Paddle does. Each other rank connects, is greeted, and says who it is; rank 0 starts the
engine when all have come, and tells them where it listens. On one host that is a private ipc address; with several it
is tcp on rank 0's host, encrypted, and the engine knows the public key of each rank (public keys alone travel here).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from hal_core import GroupLost, InvalidValue, Unavailable

GREETING = b"hal roll call 1\n"
STARTING = 120.0
"""Seconds in which all ranks must have come."""
_GREETED = 5.0
"""Seconds in which rank 0 greets who connects to it."""
_PAUSE = 0.05


@dataclass(frozen=True, slots=True)
class Launched:
    """What Paddle's launcher has told this process: its rank, and the endpoints of all."""

    rank: int
    endpoints: tuple[str, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launched | None:
        """As the variables ``PADDLE_TRAINER…`` say; None for a process that is no rank of several."""
        endpoints = tuple(filter(None, environment.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")))
        size = environment.get("PADDLE_TRAINERS_NUM", "1")
        if not size.isdigit() or int(size) < 2 or len(endpoints) != int(size):
            return None
        return cls(int(environment["PADDLE_TRAINER_ID"]), endpoints)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.endpoints)

    @property
    def hosts(self) -> list[str]:
        """The hosts of the ranks, each once, rank 0's first."""
        return list(dict.fromkeys(endpoint.rpartition(":")[0] for endpoint in self.endpoints))

    @property
    def meeting(self) -> tuple[str, int]:
        """Host and port of rank 0."""
        host, _, port = self.endpoints[0].rpartition(":")
        return host.strip("[]"), int(port)

    def check_size(self, wanted: int) -> None:
        """Raise :class:`InvalidValue`, the same on every rank, unless there are so many."""
        if wanted != self.size:
            raise InvalidValue(
                f"--tp times --dp is {wanted}, and the launcher has started {self.size} ranks",
                cure="let --tp times --dp be the number of ranks, or start hal run without a launcher",
                argument="--tp",
            )


class Present(msgspec.Struct):
    """A rank says that it is there; ``key``: its public key, "" where all ranks are on one host."""

    rank: int
    key: str


class Where(msgspec.Struct):
    """Rank 0 answers where the engine listens, and with which public key."""

    url: str
    key: str


_Word = TypeVar("_Word", Present, Where)
_encoder = msgspec.msgpack.Encoder()


class RollCall:
    """Rank 0's part. A context manager; inside, its endpoint's port is in use."""

    def __init__(self, launched: Launched) -> None:
        """Listen. Raises :class:`Unavailable` for a busy port, with the words that the other ranks have for it."""
        self._launched = launched
        family = socket.AF_INET6 if ":" in launched.meeting[0] else socket.AF_INET
        try:
            self._socket = socket.create_server(launched.meeting, family=family, backlog=launched.size)
        except OSError as error:
            raise _busy(launched) from error
        self._links: dict[int, socket.socket] = {}

    def keys(self, timeout: float = STARTING) -> list[str]:
        """Wait for all other ranks; their public keys. Raises :class:`GroupLost` naming who is missing."""
        keys, end = dict[int, str](), time.monotonic() + timeout
        while missing := sorted(set(range(1, self._launched.size)) - set(self._links)):
            self._socket.settimeout(max(0.001, end - time.monotonic()))
            try:
                link, _ = self._socket.accept()
            except TimeoutError as error:
                raise GroupLost(
                    f"rank(s) {missing} did not come to rank 0 within {timeout:g} s",
                    cure="see whether they were started, and whether a firewall stands between the hosts",
                ) from error
            try:
                link.sendall(GREETING)
                said = _receive(link, Present, _GREETED)
            except (OSError, msgspec.MsgspecError):  # whoever it was is no rank: the deadline names whom we miss
                link.close()
                continue
            self._links[said.rank], keys[said.rank] = link, said.key
        return [keys[rank] for rank in sorted(keys) if keys[rank]]

    def tell(self, where: Where) -> None:
        """Say where the engine is."""
        for link in self._links.values():
            _send(link, where)

    def __enter__(self) -> RollCall:
        return self

    def __exit__(self, *_: object) -> None:
        for link in self._links.values():
            _wait_for_end(link)  # who closes first keeps the port busy for a while
            link.close()
        self._socket.close()


def answer(launched: Launched, key: str, timeout: float = STARTING) -> Where:
    """Another rank's part: where the engine is.

    Raises :class:`Unavailable` when somebody else listens on rank 0's port, :class:`GroupLost` when nobody does.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection(launched.meeting, max(0.001, end - time.monotonic())) as link:
                _greeted(link, launched)
                _send(link, Present(launched.rank, key))
                return _receive(link, Where, max(0.001, end - time.monotonic()))
        except Unavailable:
            raise
        except (OSError, msgspec.MsgspecError) as error:
            if time.monotonic() >= end or isinstance(error, TimeoutError):
                raise GroupLost(
                    f"rank 0 did not say within {timeout:g} s where the engine is: {error}",
                    cure="see what became of rank 0",
                ) from error
        time.sleep(_PAUSE)


def _greeted(link: socket.socket, launched: Launched) -> None:
    """Raise :class:`Unavailable` unless the greeting of a rank 0 comes."""
    link.settimeout(_GREETED)
    said = b""
    try:
        while len(said) < len(GREETING) and (part := link.recv(len(GREETING) - len(said))):
            said += part
    except TimeoutError:
        said = b"nothing"
    if said and said != GREETING:
        raise _busy(launched)
    if not said:
        raise ConnectionResetError("the connection was closed")


def _busy(launched: Launched) -> Unavailable:
    host, port = launched.meeting
    return Unavailable(
        f"port {port} of {host}, rank 0's endpoint, is taken by another program",
        cure="end that program, or have the launcher choose another port (--start_port)",
        argument="PADDLE_TRAINER_ENDPOINTS",
    )


def _send(link: socket.socket, word: msgspec.Struct) -> None:
    body = _encoder.encode(word)
    link.sendall(len(body).to_bytes(4, "little") + body)


def _receive(link: socket.socket, kind: type[_Word], timeout: float) -> _Word:
    link.settimeout(timeout)
    size = int.from_bytes(_exactly(link, 4), "little")
    return msgspec.msgpack.decode(_exactly(link, min(size, 1 << 16)), type=kind)


def _exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = link.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the other rank has closed the connection")
        data += part
    return data


def _wait_for_end(link: socket.socket) -> None:
    try:
        link.settimeout(1.0)
        link.recv(1)
    except OSError:
        return
