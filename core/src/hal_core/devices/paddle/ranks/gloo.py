"""The sockets of a group over gloo, so that a call that waits in it can be ended.

Gloo waits 30 s whatever one asks for, and Paddle hands out no handle to its connections. They are the connected
sockets that appear while the group is made. Shutting them down for reading (not closing: the descriptors stay gloo's)
makes the call that waits raise at once (G16).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

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
