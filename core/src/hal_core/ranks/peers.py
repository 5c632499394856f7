"""Connections between the members of a group, apart from those of the collectives, to detect lost members.

Every member is connected with every other, so that all detect the end of a process at once. A collective reports it
only to ranks that wait for the dead one. Messages have 16 bytes; as long as all is well,
a connection carries at most two questions and answers per timeout.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import ip_address
from time import monotonic
from zlib import crc32

from ..errors import GroupLost

ENDPOINT = struct.Struct("<46sH16s")
"""Host, port, and a random token that the connecting side must send."""
HELLO = struct.Struct("<16sII")
"""The token, the number of the group being opened, the global rank of the connecting side."""
MESSAGE = struct.Struct("<BxxxiQ")
"""A :class:`Kind`, a global rank or -1, a number of calls."""


class Kind(IntEnum):
    """The kind of a message. ``LOST``: the sender gave the group up, because of the rank named."""

    LEFT = 1  # the sender closed the group after that many calls
    LOST = 2
    PROBE = 3  # asks for an ANSWER
    ANSWER = 4  # the sender is alive and has begun that many calls


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address where a rank listens while groups are opened. A host "@NAME" is an abstract Unix socket."""

    host: str
    port: int
    token: bytes

    def pack(self) -> bytes:
        """Return the endpoint as bytes of fixed size."""
        return ENDPOINT.pack(self.host.encode(), self.port, self.token)

    @classmethod
    def unpack(cls, data: bytes) -> Endpoint:
        """Return the endpoint packed by :meth:`pack`."""
        host, port, token = ENDPOINT.unpack(data)
        return cls(host.rstrip(b"\0").decode(), port, token)


class Listener:
    """Listener for the other members of the groups being opened. A context manager.

    A loopback address is one host's: there a Unix socket takes a message at less cost than tcp."""

    def __init__(self, host: str) -> None:
        if ip_address(host).is_loopback:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind("")  # a free abstract name
            self._socket.listen(128)
            host, port = "@" + self._socket.getsockname()[1:].decode(), 0
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, 0), family=family, backlog=128)
            port = self._socket.getsockname()[1]
        self.endpoint = Endpoint(host, port, os.urandom(16))

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def meet(
        self, me: int, groups: Sequence[tuple[int, ...]], endpoints: Mapping[int, Endpoint], timeout: float
    ) -> list[dict[int, socket.socket]]:
        """Connect with every other member of each of ``groups`` (all contain ``me``); return rank to connection for
        each.

        All ranks call this with their common groups in the same order; a group may occur several times. The higher rank
        connects, the lower accepts.

        :raises GroupLost: naming the missing ranks after ``timeout`` seconds.
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
                f"rank {me} has no connection with rank(s) {_missing(me, groups, met)} after {timeout} s: {error}",
                cure="check whether these ranks are running, and whether a firewall separates the hosts",
                argument="group",
            ) from error
        return met

    def _accept(self, groups: Sequence[tuple[int, ...]], deadline: float) -> tuple[int, int, socket.socket]:
        """Return the next connection that sends the token; close others."""
        while True:
            self._socket.settimeout(max(0.001, deadline - monotonic()))
            link, _ = self._socket.accept()
            try:
                token, key, rank = HELLO.unpack(receive(link, HELLO.size, min(1.0, deadline - monotonic())))
                at = next((i for i in range(len(groups)) if _key(groups, i) == key), -1)
                if token == self.endpoint.token and at >= 0:
                    return at, rank, _ready(link)
            except (OSError, struct.error):
                pass  # Not a member, or it ended just now: the deadline's error names the missing ranks.
            link.close()


def _key(groups: Sequence[tuple[int, ...]], at: int) -> int:
    """Return a number for one of the groups, equal on all its members: from its ranks and its earlier occurrences."""
    return crc32(repr((sorted(groups[at]), [*groups[:at]].count(groups[at]))).encode())


def _missing(me: int, groups: Sequence[tuple[int, ...]], met: Sequence[Mapping[int, socket.socket]]) -> list[int]:
    return sorted({r for ranks, links in zip(groups, met, strict=True) for r in ranks if r != me and r not in links})


def _connect(endpoint: Endpoint, key: int, me: int, deadline: float) -> socket.socket:
    left = max(0.001, deadline - monotonic())
    if endpoint.host.startswith("@"):
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(left)
        try:
            link.connect(f"\0{endpoint.host[1:]}")
        except OSError:
            link.close()
            raise
    else:
        link = socket.create_connection((endpoint.host, endpoint.port), left)
    link.sendall(HELLO.pack(endpoint.token, key, me))
    return _ready(link)


def _ready(link: socket.socket) -> socket.socket:
    """Make a connection non-blocking, and send its few bytes without delay."""
    if link.family != socket.AF_UNIX:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setblocking(False)
    return link


def receive(link: socket.socket, nbytes: int, timeout: float) -> bytes:
    """Receive exactly ``nbytes`` within ``timeout`` seconds, over a connection that the watchdog does not read yet."""
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
