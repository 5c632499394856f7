"""Groups over gloo: made so that they cannot meet each other's leavings, and so that a call that waits can be ended.

``paddle.distributed.new_group`` has every group of a job publish its addresses in one store under the same keys, so
that a rank now and then reads those of an older group and connects to nobody, or waits for ever. Each group here gets
a store of its own, which its first rank serves. Only members take part.

Gloo waits 30 s whatever one asks for, and Paddle hands out no handle to its connections. They are the connected
sockets that appear while the group is made. Shutting them down for reading (not closing: the descriptors stay gloo's)
makes the call that waits raise at once (G16).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import GroupLost
from .paddle_world import wait_for_listener
from .peers import Endpoint, receive, send

WHERE = struct.Struct("<II")
"""Port of a group's store, and the number under which Paddle keeps the group."""

FOLDER = Path("/proc/self/fd")


class GlooSockets:
    """Takes note of the sockets that appear while it is used as a context manager.

    Each is remembered by descriptor and inode, so that a number that was closed and given to something else later is
    left alone. Nothing else in the process should open connections meanwhile.
    """

    def __init__(self) -> None:
        self._before: dict[int, int] = {}
        self.found: dict[int, int] = {}

    def __enter__(self) -> GlooSockets:
        self._before = _sockets()
        return self

    def __exit__(self, *_: object) -> None:
        now = _sockets()
        self.found = {fd: inode for fd, inode in now.items() if self._before.get(fd) != inode and _is_connected(fd)}

    def shut_down(self) -> None:
        """End every call that waits on the sockets; they cannot be used again.

        Only reading is shut down. Gloo's own thread may be about to answer what it has read already: where it could
        not write any more, it would throw, and end the process (seen on a rank that was stopped and went on later).
        """
        for fd, inode in self.found.items():
            with contextlib.suppress(OSError), _borrowed(fd) as link:  # gloo may close it at any moment
                if _inode(link.fileno()) == inode:
                    link.shutdown(socket.SHUT_RD)
        self.found = {}


def _sockets() -> dict[int, int]:
    """Descriptor to inode of each socket of this process."""
    found = {}
    for name in os.listdir(FOLDER):
        inode = _inode(int(name))
        if inode:
            found[int(name)] = inode
    return found


def _inode(fd: int) -> int:
    """The inode of an open socket, else 0."""
    try:
        status = os.fstat(fd)
    except OSError:
        return 0
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else 0


def _is_connected(fd: int) -> bool:
    try:
        with _borrowed(fd) as link:
            link.getpeername()
            return link.family in (socket.AF_INET, socket.AF_INET6) and link.type == socket.SOCK_STREAM
    except OSError:
        return False


def _borrowed(fd: int) -> socket.socket:
    """A socket object over a descriptor of its own, so that closing it leaves the other open. Raises OSError."""
    own = os.dup(fd)
    try:
        return socket.socket(fileno=own)
    except OSError:  # no socket (any more)
        os.close(own)
        raise


def make_group(
    ranks: Sequence[int],
    me: int,
    endpoints: Mapping[int, Endpoint],
    links: Mapping[int, socket.socket],
    timeout: float,
) -> tuple[Any, Any, GlooSockets]:
    """Make the group of these ranks, as its members do together: Paddle's process group, its store, its sockets.

    ``links`` are the connections with the other members. Raises :class:`GroupLost` when one does not come.
    """
    from paddle.base import core

    host, first = endpoints[ranks[0]].host, me == ranks[0]
    try:
        if first:
            port, number = _free_port(host), int.from_bytes(os.urandom(4), "little") % (1 << 30) + (1 << 30)
            for link in links.values():
                send(link, WHERE.pack(port, number))
        else:
            port, number = WHERE.unpack(receive(links[ranks[0]], WHERE.size, timeout))
            wait_for_listener(host, port, timeout, ranks[0])
        store = core.TCPStore(host, port, first, len(ranks), max(1, round(timeout)))
        with GlooSockets() as sockets:
            group = core.ProcessGroupGloo.create(store, list(ranks).index(me), len(ranks), number)
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, GroupLost):
            raise
        raise GroupLost(
            f"rank {me} could not make the group {tuple(ranks)}: {error}",
            cure="see what became of its ranks, and whether they reach each other",
            argument="group",
        ) from error
    return group, store, sockets


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        return int(server.getsockname()[1])
