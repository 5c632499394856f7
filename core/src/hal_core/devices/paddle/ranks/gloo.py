"""The sockets of a group over gloo, so that a call that waits in it can be ended.

Gloo waits 30 s whatever one asks for, and Paddle hands out no handle to its connections. They are the connected
sockets that appear while the group is made. Shutting them down for reading (not closing: the descriptors stay gloo's)
makes the call that waits raise at once (G16).

Each is kept by a descriptor of our own too. Gloo closes its descriptor after that, and a rank that was stopped and goes
on answers what it had received: on a connection that nobody holds any more it could not write, where gloo throws in a
thread of its own, which ends that process (2 of 14 times on a fast machine). Kept, the connection takes what it writes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path("/proc/self/fd")


class GlooSockets:
    """Keeps the connected sockets that appear while it is used as a context manager, for as long as it lives.

    ``found`` are its own descriptors of them. Nothing else in the process should open connections meanwhile.
    """

    def __init__(self) -> None:
        self._before: dict[int, int] = {}
        self.found: list[int] = []

    def __enter__(self) -> GlooSockets:
        self._before = _sockets()
        return self

    def __exit__(self, *_: object) -> None:
        for fd, inode in _sockets().items():
            if self._before.get(fd) != inode and _is_connected(fd):
                with contextlib.suppress(OSError):  # closed meanwhile
                    self.found.append(os.dup(fd))
        weakref.finalize(self, _close, tuple(self.found))

    def shut_down(self) -> None:
        """End every call that waits on the sockets; they cannot be used again.

        Only reading is shut down. Gloo's own thread may be about to answer what it has read already: where it could
        not write any more, it would throw, and end the process (seen on a rank that was stopped and went on later).
        """
        for fd in self.found:
            with contextlib.suppress(OSError), _borrowed(fd) as link:  # whose other end may be gone
                link.shutdown(socket.SHUT_RD)


def _close(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)


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
