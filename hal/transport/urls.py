"""Addresses: which transport a url names, and private folders for ipc sockets (0700).

A private folder is named ``hal-<random>`` and lies in ``$XDG_RUNTIME_DIR`` or the folder for temporary files. Its
process holds a lock on the file ``lock`` inside; the kernel releases that when the process ends, however it ends, and
in whatever namespace. A folder whose lock is free is a dead process's, and the next :func:`private_ipc_url` removes it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from hal_core.errors import HalError, InvalidValue, Unavailable

from hal.transport.domains import PRIVATE, remove_domains

SCHEMES = ("ipc", "tcp", "shm", "sysv")
_ON_ONE_HOST = ("ipc", "shm")  #: schemes whose address is the path of a socket
_PREFIX, _LOCK, _SOCKET = PRIVATE, "lock", "output"
_MAX_PATH = 107  #: bytes of a path in sockaddr_un without its end
_locks: dict[Path, int] = {}  #: private folders of this process, with the descriptor of their lock


def scheme_of(url: str) -> str:
    """Return the scheme of a well-formed url. Raises InvalidValue."""
    scheme, separator, address = url.partition("://")
    if "\0" in url:  # the system would take what is before it for the whole
        raise _bad(url, "has a NUL character in it", "leave it out")
    if not separator or scheme not in SCHEMES:
        raise _bad(url, f"has no scheme of {', '.join(SCHEMES)}", "write ipc:///folder/name or tcp://host:port")
    if scheme == "tcp":
        _check_host_and_port(url, address)
    if scheme in _ON_ONE_HOST and not address.startswith("/"):
        raise _bad(url, "is no absolute path", f"write {scheme}:///folder/name, or use private_ipc_url()")
    if scheme in _ON_ONE_HOST and len(os.fsencode(address)) > _MAX_PATH:
        raise _bad(url, f"has a path of more than {_MAX_PATH} bytes", "use a shorter folder, or set TMPDIR to one")
    return scheme


def socket_of(url: str) -> Path | None:
    """Return the path of the url's socket; None for a scheme whose address is none."""
    scheme, _, address = url.partition("://")
    return Path(address) if scheme in _ON_ONE_HOST else None


def endpoint_of(url: str) -> str:
    """Return the url that ZeroMQ connects to or binds."""
    return "ipc" + url.removeprefix("shm") if url.startswith("shm://") else url


def _check_host_and_port(url: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host:
        raise _bad(url, "names no host and port", "write tcp://host:port")
    if port != "*" and not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise _bad(url, f"has the port {port!r}", "write a port of 1 to 65535; a reader may take any with *")


def private_ipc_url(*, shared: bool = False) -> str:
    """Make a private folder and return the url of a socket in it, ``ipc://`` or, with ``shared``, ``shm://``.

    Removed by :func:`release_ipc` or at exit.
    """
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    room = _MAX_PATH - len(os.fsencode(parent / f"{_PREFIX}{'x' * 8}" / _SOCKET))
    if not parent.is_absolute() or room < 0:
        what = "is no absolute path" if room >= 0 else f"leaves no room for a socket: {-room} bytes too long"
        cure = "set XDG_RUNTIME_DIR (or TMPDIR, where that is not set) to a short absolute path"
        raise Unavailable(f"no private folder for ipc: {str(parent)!r} {what}", cure=cure)
    try:
        remove_stale_folders(parent)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
        _locks[folder] = descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        cure = "make room there, or set XDG_RUNTIME_DIR or TMPDIR to a folder that can be written"
        raise Unavailable(f"no private folder for ipc in {parent}: {error}", cure=cure) from error
    url = f"{'shm' if shared else 'ipc'}://{folder / _SOCKET}"
    scheme_of(url)
    return url


def adopt_ipc(url: str) -> None:
    """Hold the lock of the url's folder if it is the private one of a process that is gone, as after its restart."""
    path = socket_of(url)
    if path is None or path.parent in _locks or not path.parent.name.startswith(_PREFIX):
        return
    lock = path.parent / _LOCK
    with contextlib.suppress(OSError):  # no such file, or its process lives and keeps the folder
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        _locks[lock.parent] = descriptor


def release_ipc(url: str, *, folder: bool = True) -> None:
    """Remove the socket and, with ``folder``, its folder if it is a private one of this process. Idempotent."""
    path = socket_of(url)
    if path is None:
        return
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):  # never a file that somebody has put there
            path.unlink(missing_ok=True)
    if folder and (descriptor := _locks.pop(path.parent, None)) is not None:
        remove_domains(path.parent)
        shutil.rmtree(path.parent, ignore_errors=True)
        os.close(descriptor)


def remove_stale_folders(parent: Path) -> list[Path]:
    """Remove the private folders of this user in ``parent`` whose process is gone, and return them."""
    removed = []
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or just removed by another process
            if lock.parent in _locks or lock.parent.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_domains(lock.parent)
                shutil.rmtree(lock.parent, ignore_errors=True)
                removed.append(lock.parent)
            finally:
                os.close(descriptor)
    return removed


def check_free(url: str) -> None:
    """Raise unless the ipc url names nothing, or a dead process's socket: binding removes whatever is there."""
    path = socket_of(url)
    assert path is not None
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise _bad(url, f"cannot be used: {error.strerror}", "choose another path") from error
    if not stat.S_ISSOCK(mode):
        what = "folder" if stat.S_ISDIR(mode) else "symbolic link" if stat.S_ISLNK(mode) else "file"
        raise _bad(url, f"names a {what}, not a socket", "choose another path; nothing was touched")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return  # left by a process that is gone; binding replaces it
        except OSError as error:
            raise _bad(url, f"cannot be used: {error.strerror}", "choose another path") from error
    raise _bad(url, "has a reader already", "stop that reader, or use private_ipc_url()")


def _bad(url: str, what: str, cure: str) -> HalError:
    return InvalidValue(f"{url!r} {what}", cure=cure, argument="url")


@atexit.register
def _release_all() -> None:
    for folder in list(_locks):
        release_ipc(f"ipc://{folder / _SOCKET}")


def _leave_to_parent() -> None:
    """In a forked child: the folders are the parent's, and its locks end with it, not with the last of its children."""
    while _locks:
        os.close(_locks.popitem()[1])


os.register_at_fork(after_in_child=_leave_to_parent)
