"""The sockets of a group over gloo, by which a waiting call can be ended.

Gloo waits 30 s regardless of the timeout, and Paddle gives no access to its connections. They are the connected sockets
that appear while the group is created. Shutting them down for reading (not closing: the descriptors remain gloo's)
makes the waiting call raise at once (G16).

A descriptor of our own keeps each connection open. Gloo closes its descriptor after the call. A rank that was stopped
and then continues answers messages it had received. On a closed connection that write fails, gloo throws in a thread of
its own, and the process ends (2 of 14 times on a fast machine). An open connection accepts the write.
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
    """Context manager that keeps the connected sockets that appear within it, for as long as it lives.

    ``found`` are its own descriptors of them. The process should open no other connections meanwhile.
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

        Only reading is shut down. Gloo's own thread may be about to answer a message it has read. If that write failed,
        it would throw, and end the process (seen on a rank that was stopped and continued later).
        """
        for fd in self.found:
            with contextlib.suppress(OSError), _borrowed(fd) as link:  # the peer may be gone
                link.shutdown(socket.SHUT_RD)


def _close(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def _sockets() -> dict[int, int]:
    """Return descriptor to inode of each socket of this process."""
    found = {}
    for name in os.listdir(FOLDER):
        inode = _inode(int(name))
        if inode:
            found[int(name)] = inode
    return found


def _inode(fd: int) -> int:
    """Return the inode of an open socket, else 0."""
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
    """Return a socket object over a duplicated descriptor, so that closing it leaves the original open. Raises
    OSError."""
    own = os.dup(fd)
    try:
        return socket.socket(fileno=own)
    except OSError:  # no longer a socket
        os.close(own)
        raise
