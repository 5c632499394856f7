"""The path of a listener within one host, which one process at a time has.

A socket that accepts no connection was left by a dead process, and is replaced. Two processes that find one at the same
time take turns by a lock (flock) on its folder. The socket is accessible only to this user (0600), whatever the umask.
"""

from __future__ import annotations

import contextlib
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


def open_exactly(path: Path, flags: int = 0) -> int:
    """Open the file for reading and writing, for this user only whatever the umask. Create it if it is missing."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, _MODE)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != _MODE:
            os.fchmod(descriptor, _MODE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def bind_path(url: str, path: Path, backlog: int) -> tuple[socket.socket, tuple[int, int]]:
    """Return a listening socket at the path, and what identifies it there.

    Raises :class:`InvalidValue` for a path that cannot be used, or where a process listens, which it names.
    """
    with contextlib.ExitStack() as undo:
        try:
            door = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            os.fchmod(door.fileno(), _MODE)  # the mode of the file on Linux: other users may never connect
            with _locked(path.parent):
                _check_free(url, path)
                path.unlink(missing_ok=True)
                door.bind(os.fspath(path))
                undo.callback(path.unlink, missing_ok=True)
                if (mode := stat.S_IMODE(path.lstat().st_mode)) & ~_MODE:
                    cure = "set umask 077, or use private_ipc_url()"
                    raise Unavailable(f"{url!r} would be open to others: mode {mode:o}", cure=cure, argument="url")
                path.chmod(_MODE)  # the umask may have removed this user's rights
                door.listen(backlog)
            door.setblocking(False)
            found = door, _identity(path)
        except OSError as error:
            cure = "choose a folder that exists and can be written"
            raise InvalidValue(f"cannot bind {url!r}: {error}", cure=cure, argument="url") from error
        undo.pop_all()
    return found


def unbind_path(path: Path, identity: tuple[int, int]) -> None:
    """Remove the socket if it is still that one. Call it while it listens: its identity may be used again later."""
    with contextlib.suppress(OSError), _locked(path.parent):  # it is gone, or another process has replaced it
        if _identity(path) == identity:
            path.unlink()


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
                time.sleep(TIMEOUTS.lock_look)
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
            number = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
            holder = f"process {number} ({_command(number)})"
    raise _bad(url, f"has a reader already: {holder}", "stop that reader, or use private_ipc_url()")


def _command(number: int) -> str:
    try:
        return Path(f"/proc/{number}/comm").read_text().strip()
    except OSError:
        return "of another namespace"


def _bad(url: str, what: str, cure: str) -> HalError:
    return InvalidValue(f"{url!r} {what}", cure=cure, argument="url")
