"""Connections between the members of a group, apart from those of the collectives: who is there, and who is gone.

Every member is connected with every other, so that the end of any process is seen by all at once. (A collective tells
only those who wait for the dead rank: of four ranks over gloo, one.) The connections carry messages of 16 bytes, and
carry a question and its answer at most twice in a timeout while all is well.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from time import monotonic
from zlib import crc32

from ..errors import GroupLost

ENDPOINT = struct.Struct("<46sH16s")
"""Host, port, and a random token that whoever connects has to show."""
HELLO = struct.Struct("<16sII")
"""The token, which of the groups being opened, the global rank that connects."""
MESSAGE = struct.Struct("<BxxxiQ")
"""A :class:`Kind`, a global rank or -1, a number of calls."""


class Kind(IntEnum):
    """What a message says. ``LOST``: the sender gave the group up, because of the rank named."""

    LEFT = 1  # the sender closed the group after that many calls
    LOST = 2
    PROBE = 3  # are you there?
    ANSWER = 4  # I am, and have begun that many calls


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a rank listens while groups are opened."""

    host: str
    port: int
    token: bytes

    def pack(self) -> bytes:
        """The endpoint as bytes of fixed size."""
        return ENDPOINT.pack(self.host.encode(), self.port, self.token)

    @classmethod
    def unpack(cls, data: bytes) -> Endpoint:
        """The endpoint of :meth:`pack`."""
        host, port, token = ENDPOINT.unpack(data)
        return cls(host.rstrip(b"\0").decode(), port, token)


class Listener:
    """Listens for the other members of the groups that are being opened. A context manager."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        self.endpoint = Endpoint(host, self._socket.getsockname()[1], os.urandom(16))

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def meet(
        self, me: int, groups: Sequence[tuple[int, ...]], endpoints: Mapping[int, Endpoint], timeout: float
    ) -> list[dict[int, socket.socket]]:
        """Connect with every other member of each of ``groups`` (all hold ``me``): for each, rank to connection.

        All ranks call this with the same groups of theirs in one order; a group may be there several times. The higher
        rank connects, the lower accepts.
        Raises :class:`GroupLost` naming who is missing after ``timeout`` seconds.
        """
        deadline = monotonic() + timeout
        met: list[dict[int, socket.socket]] = [{} for _ in groups]
        try:
            for at, ranks in enumerate(groups):
                key = _key(groups, at)
                for rank in (rank for rank in ranks if rank < me):
                    met[at][rank] = _connect(endpoints[rank], key, me, deadline)
            while missing := _missing(me, groups, met):
                at, rank, link = self._accept(groups, deadline)
                if rank in missing and rank in groups[at] and rank not in met[at]:
                    met[at][rank] = link
                else:
                    link.close()
        except OSError as error:
            for link in (link for group in met for link in group.values()):
                link.close()
            raise GroupLost(
                f"rank {me} found no connection with rank(s) {_missing(me, groups, met)} within {timeout} s: {error}",
                cure="see what became of these ranks, and whether a firewall stands between the hosts",
                argument="group",
            ) from error
        return met

    def _accept(self, groups: Sequence[tuple[int, ...]], deadline: float) -> tuple[int, int, socket.socket]:
        """The next connection that shows the token; others are closed."""
        while True:
            self._socket.settimeout(max(0.001, deadline - monotonic()))
            link, _ = self._socket.accept()
            try:
                token, key, rank = HELLO.unpack(receive(link, HELLO.size, min(1.0, deadline - monotonic())))
                at = next((i for i in range(len(groups)) if _key(groups, i) == key), -1)
                if token == self.endpoint.token and at >= 0:
                    return at, rank, _ready(link)
            except (OSError, struct.error):
                pass  # whoever it was is no member, or died just now: the deadline names whom we miss
            link.close()


def _key(groups: Sequence[tuple[int, ...]], at: int) -> int:
    """A number for one of the groups, the same on all its members: by its ranks, and how many had the same before."""
    return crc32(repr((sorted(groups[at]), [*groups[:at]].count(groups[at]))).encode())


def _missing(me: int, groups: Sequence[tuple[int, ...]], met: Sequence[Mapping[int, socket.socket]]) -> list[int]:
    return sorted({r for ranks, links in zip(groups, met, strict=True) for r in ranks if r != me and r not in links})


def _connect(endpoint: Endpoint, key: int, me: int, deadline: float) -> socket.socket:
    link = socket.create_connection((endpoint.host, endpoint.port), max(0.001, deadline - monotonic()))
    link.sendall(HELLO.pack(endpoint.token, key, me))
    return _ready(link)


def _ready(link: socket.socket) -> socket.socket:
    """A connection that never blocks whoever uses it, and sends its few bytes at once."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setblocking(False)
    return link


def receive(link: socket.socket, nbytes: int, timeout: float) -> bytes:
    """Receive exactly ``nbytes`` over a connection that nobody watches yet, within ``timeout`` seconds."""
    link.settimeout(max(0.001, timeout))
    try:
        data = b""
        while len(data) < nbytes:
            part = link.recv(nbytes - len(data))
            if not part:
                raise ConnectionResetError("the other rank has closed the connection")
            data += part
        return data
    finally:
        link.setblocking(False)
