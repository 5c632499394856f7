"""The address of a reader within one host: the path of a socket, which one reader at a time holds.

The reader holds a lock (flock) on the file ``SOCKET.paddle-hal.lock`` beside the socket. The kernel releases the lock
whenever the process ends. Only the holder of the lock creates or removes the socket. Both files are accessible only to
this user (0600), whatever the umask. A socket whose lock is free and which accepts no connection is left by a dead
reader: the next reader replaces it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import sys
import time
from pathlib import Path

from hal_core import HalError, InvalidValue, Unavailable

from hal_engine.timeouts import TIMEOUTS

_MODE = 0o600
_BACKLOG = 100  #: connections that the kernel queues until ZeroMQ accepts them
_held: dict[Path, Address] = {}


class Address:
    """A path that this process locks against every other reader, and the socket that listens there."""

    def __init__(self, url: str, path: Path) -> None:
        """Raise InvalidValue for a path that cannot be used or already has a reader. The files are removed then."""
        self._path, self._pid = path, os.getpid()
        self._lock = _take_lock(url, path)
        self._made: tuple[int, int] | None = None
        self._listener = self._handed = -1  # descriptors of the listening socket: before and after hand_over()
        try:
            _check_free(url, path)
            self._listen(url)
        except BaseException:
            self.release()
            raise
        _held[path] = self

    def hand_over(self) -> int:
        """Return the descriptor of the listening socket. The caller closes it."""
        self._handed, self._listener = self._listener, -1
        return self._handed

    def remove_socket(self) -> None:
        """Remove the socket if it is still the one that this process created.

        Call it while the socket listens: once it is closed, another file may get its inode number.
        """
        made, self._made = self._made, None
        with contextlib.suppress(OSError):  # it is gone, or another process replaced it
            if made == _identity(self._path):
                self._path.unlink()

    def release(self) -> None:
        """Release the address, its socket first. Idempotent. Does nothing in a forked child: the parent owns the
        address."""
        if self._lock < 0 or os.getpid() != self._pid:
            return
        _held.pop(self._path, None)
        self.remove_socket()
        if self._listener >= 0:
            os.close(self._listener)
            self._listener = -1
        _give_lock_back(self._path, self._lock)
        self._lock = -1

    def leave_to_parent(self) -> None:
        """In a forked child, close the lock and the listening socket, so that they end with the parent and not with its
        last child."""
        os.close(self._lock)
        self._lock = -1
        with contextlib.suppress(OSError):
            os.close(max(self._listener, self._handed))

    def _listen(self, url: str) -> None:
        with contextlib.ExitStack() as undo:
            made = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            os.fchmod(made.fileno(), _MODE)  # the mode of the file on Linux: other users may never connect
            try:
                self._path.unlink(missing_ok=True)  # left by a dead reader
                made.bind(os.fspath(self._path))
                self._made = _identity(self._path)
                self._check_mode(url)
                made.listen(_BACKLOG)
            except OSError as error:
                cure = "choose a folder that exists and can be written"
                raise InvalidValue(f"cannot bind {url!r}: {error}", cure=cure, argument="url") from error
            made.setblocking(False)
            undo.pop_all()
        self._listener = made.detach()

    def _check_mode(self, url: str) -> None:
        """Restore this user's permissions that the umask removed. Refuse a kernel that gives other users more than
        requested."""
        mode = stat.S_IMODE(self._path.lstat().st_mode)
        if mode & ~_MODE:
            cure = "set umask 077, or use private_ipc_url()"
            raise Unavailable(f"{url!r} would be open to others: mode {mode:o}", cure=cure, argument="url")
        if mode != _MODE:
            self._path.chmod(_MODE)


def remove_left(path: Path) -> None:
    """Remove the socket at ``path`` if this process created it or its reader is dead; never one with a reader."""
    if (own := _held.get(path)) is not None:
        own.remove_socket()
        return
    with contextlib.suppress(HalError, OSError):  # it has a reader, is missing, or is not a socket
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
        lock = _take_lock("", path)
        try:
            _check_free("", path)
            path.unlink()
        finally:
            _give_lock_back(path, lock)


def lock_of(path: Path) -> Path:
    """Return the file whose lock the reader at that path holds. It is truncated and removed, so its name is hal's own:
    ``poetry.lock`` is another program's."""
    return path.with_name(f"{path.name}.paddle-hal.lock")


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


def _take_lock(url: str, path: Path) -> int:
    """Return the descriptor of the locked file. Raises InvalidValue, which names the holder if there is one."""
    file = lock_of(path)
    while True:
        try:
            descriptor = open_exactly(file)
        except OSError as error:
            cure = "choose a folder that exists and can be written"
            raise InvalidValue(f"cannot bind {url!r}: {error}", cure=cure, argument="url") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(file, descriptor):  # otherwise its former holder has just removed it
                os.ftruncate(descriptor, 0)
                with contextlib.suppress(OSError):  # on a full disk the lock still holds, without the holder's name
                    os.pwrite(descriptor, f"{os.getpid()} {Path(sys.argv[0] or 'python').name}\n".encode(), 0)
                return descriptor
        except BlockingIOError:
            if _is_there(file, descriptor) and (holder := _holder(file, descriptor)):
                os.close(descriptor)
                raise _taken(url, f"{holder} holds {file}") from None
        except OSError as error:
            os.close(descriptor)
            raise InvalidValue(f"cannot lock {file}: {error}", cure="make room there", argument="url") from error
        os.close(descriptor)


def _give_lock_back(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the folder is gone
        lock_of(path).unlink()
    os.close(descriptor)


def _is_there(file: Path, descriptor: int) -> bool:
    """Return whether the open file is the one at the path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file, follow_symlinks=False))
    except OSError:
        return False


def _holder(file: Path, descriptor: int) -> str:
    """Name the holder of the lock; "" if it was released meanwhile. A dead holder's name may remain for a moment."""
    end = time.monotonic() + TIMEOUTS.lock_name
    while _is_there(file, descriptor):
        number, _, name = os.pread(descriptor, 4096, 0).decode(errors="replace").rstrip("\n").partition(" ")
        if number.isdigit() and os.path.exists(f"/proc/{number}"):
            return f"process {number} ({name})"
        if time.monotonic() > end:
            return "a process that cannot be seen from here"
        time.sleep(TIMEOUTS.lock_look)
    return ""


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def check_is_socket(url: str, mode: int) -> None:
    """Raise InvalidValue if a file of that mode is not a socket: no reader can use its path."""
    if not stat.S_ISSOCK(mode):
        what = "folder" if stat.S_ISDIR(mode) else "symbolic link" if stat.S_ISLNK(mode) else "file"
        raise _bad(url, f"names a {what}, not a socket", "choose another path; nothing was touched")


def _check_free(url: str, path: Path) -> None:
    """Raise unless the path is free, or a socket without a listener."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise _bad(url, f"cannot be used: {error.strerror}", "choose another path") from error
    check_is_socket(url, mode)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return  # left by a dead process
        except BlockingIOError:
            raise _taken(url, "a process without a lock, which takes no connections,") from None
        except OSError as error:
            raise _bad(url, f"cannot be used: {error.strerror}", "choose another path") from error
    raise _taken(url, "a process without a lock")


def _taken(url: str, holder: str) -> HalError:
    return _bad(url, f"has a reader already: {holder}", "stop that reader, or use private_ipc_url()")


def _bad(url: str, what: str, cure: str) -> HalError:
    return InvalidValue(f"{url!r} {what}", cure=cure, argument="url")


def _leave_to_parent() -> None:
    while _held:
        _held.popitem()[1].leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
