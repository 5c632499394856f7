"""The sockets of an address: where one process listens, and others connect.

The path of a listener within one host is one process's at a time. A socket that accepts no connection was left by a
dead process, and is replaced. Two processes that find one at the same time take turns by a lock (flock) on its folder.
The socket is accessible only to this user (0600), whatever the umask.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from hal_core import HalError, InvalidValue, Unavailable

from hal_engine.timeouts import TIMEOUTS

_MODE = 0o600
_CREDENTIALS = struct.Struct("3i")
_PROBES = 3
"""Probes without an answer after which the kernel takes the other host for lost."""
_NO_ADDRESS = "that is no address of this host", "name one that it has, by number or by a name that it knows"
_REFUSED = {
    errno.EADDRINUSE: ("another program listens there", "choose a free port"),
    errno.EACCES: ("this user may not", "choose a port above 1023, or a folder that this user can write to"),
    errno.EADDRNOTAVAIL: _NO_ADDRESS,
}


def open_exactly(path: Path) -> int:
    """Open the file for reading and writing, for this user only whatever the umask. Create it if it is missing."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != _MODE:
            os.fchmod(descriptor, _MODE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Door:
    """A listening socket. ``url``: its address, whose port is resolved."""

    def __init__(self, sock: socket.socket, url: str, path: Path | None = None) -> None:
        """``path``: of a Unix socket."""
        self._sock, self.url, self._path = sock, url, path
        self._identity = None if path is None else _identity(path)
        sock.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 once closed."""
        return self._sock.fileno()

    def accept(self) -> socket.socket:
        """Return the next connection. Raises OSError as ``accept`` does."""
        sock, _ = self._sock.accept()
        if self._path is None:
            _tune(sock)
        return sock

    def close(self) -> None:
        """Close it. A Unix socket is removed if it is still that one, while it listens: its identity may be used again
        later."""
        if self._path is not None and self._sock.fileno() >= 0:
            with contextlib.suppress(OSError), _locked(self._path.parent):  # gone, or another process has replaced it
                if _identity(self._path) == self._identity:
                    self._path.unlink()
        self._sock.close()

    def leave_to_parent(self) -> None:
        """Close the descriptor alone, in a forked child."""
        self._sock.close()


def listen(url: str, path: Path | None, backlog: int) -> Door:
    """Listen at a well-formed address; ``path``: of its socket, None over tcp. Raises :class:`InvalidValue` for one
    that cannot be used, or where a process listens, which it names."""
    return _listen_tcp(url, backlog) if path is None else _listen_at(url, path, backlog)


def _listen_at(url: str, path: Path, backlog: int) -> Door:
    with contextlib.ExitStack() as undo:
        try:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            os.fchmod(sock.fileno(), _MODE)  # the mode of the file on Linux: other users may never connect
            with _locked(path.parent):
                _check_free(url, path)
                path.unlink(missing_ok=True)
                sock.bind(os.fspath(path))
                undo.callback(path.unlink, missing_ok=True)
                if (mode := stat.S_IMODE(path.lstat().st_mode)) & ~_MODE:
                    cure = "set umask 077, or use private_ipc_url()"
                    raise Unavailable(f"{url!r} would be open to others: mode {mode:o}", cure=cure, argument="url")
                path.chmod(_MODE)  # the umask may have removed this user's rights
                sock.listen(backlog)
            found = Door(sock, url, path)
        except OSError as error:
            cure = "choose a folder that exists and can be written"
            raise InvalidValue(f"cannot bind {url!r}: {error}", cure=cure, argument="url") from error
        undo.pop_all()
    return found


def _listen_tcp(url: str, backlog: int) -> Door:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("" if host == "*" else host, 0 if port == "*" else int(port)))
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        no_name = _NO_ADDRESS if isinstance(error, socket.gaierror) else None
        why, cure = no_name or _REFUSED.get(error.errno or 0, (str(error), "choose another address"))
        raise InvalidValue(f"cannot bind {url!r}: {why}", cure=cure, argument="url") from error
    found, number = sock.getsockname()
    return Door(sock, f"tcp://{found}:{number}")


def dial(url: str, path: Path | None) -> socket.socket:
    """Return a socket that connects to a well-formed address, over tcp later; ``path`` as above. Raises OSError if
    nobody listens there, :class:`Unavailable` for a Unix socket of another user."""
    with contextlib.ExitStack() as undo:
        family = socket.AF_INET if path is None else socket.AF_UNIX
        sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.setblocking(False)
        if path is None:
            _tune(sock)
            host, _, port = url.removeprefix("tcp://").rpartition(":")
            with contextlib.suppress(BlockingIOError):
                sock.connect((host, int(port)))
        else:
            sock.connect(os.fspath(path))
            _check_own(sock, path)
        undo.pop_all()
    return sock


def _check_own(sock: socket.socket, path: Path) -> None:
    user = _peer_of(sock)[1]
    if user != os.geteuid():
        raise Unavailable(
            f"on {path} listens user {user}, not {os.geteuid()}: nothing is sent there",
            cure="run both as one user, or choose a folder that others cannot write to (private_ipc_url())",
            argument="url",
        )


def _tune(sock: socket.socket) -> None:
    """Have the kernel send at once over tcp, and end a connection whose other host does not answer any more."""
    silence = TIMEOUTS.silence
    every = min(max(1, round(silence / (1 + _PROBES))), 32767)  # the most that the kernel takes
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, every),
        (socket.TCP_KEEPINTVL, every),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, round(1000 * silence)),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _peer_of(sock: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group at the other end."""
    process, user, group = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return process, user, group


def remove_left(path: Path) -> None:
    """Remove the socket at ``path`` if nobody listens there; never a file."""
    with contextlib.suppress(HalError, OSError), _locked(path.parent):
        if stat.S_ISSOCK(path.lstat().st_mode):
            _check_free("", path)
            path.unlink()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, for which others hold it a moment only. Raises OSError if it cannot be had."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    end = time.monotonic() + TIMEOUTS.lock
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(TIMEOUTS.pause)
        yield
    finally:
        os.close(descriptor)


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def check_is_socket(url: str, mode: int) -> None:
    """Raise InvalidValue if a file of that mode is not a socket."""
    if not stat.S_ISSOCK(mode):
        what = "folder" if stat.S_ISDIR(mode) else "symbolic link" if stat.S_ISLNK(mode) else "file"
        raise _bad(url, f"names a {what}, not a socket", "choose another path; nothing was touched")


def _check_free(url: str, path: Path) -> None:
    """Raise unless the path is free, or a socket without a listener."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    check_is_socket(url, mode)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        holder = "a process that takes no connections"
        with contextlib.suppress(BlockingIOError):
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                return
            number = _peer_of(probe)[0]
            holder = f"process {number} ({_command(number)})"
    raise _bad(url, f"has a reader already: {holder}", "stop that reader, or use private_ipc_url()")


def _command(number: int) -> str:
    try:
        return Path(f"/proc/{number}/comm").read_text().strip()
    except OSError:
        return "of another namespace"


def _bad(url: str, what: str, cure: str) -> HalError:
    return InvalidValue(f"{url!r} {what}", cure=cure, argument="url")
