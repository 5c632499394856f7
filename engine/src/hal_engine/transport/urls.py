"""Addresses: the transport that a URL names, and private folders (0700) for ipc sockets and the ranks' output.

A private folder is named ``hal-<random>`` and lies in ``$XDG_RUNTIME_DIR`` or the folder for temporary files. Its
process holds a lock on the file ``lock`` inside. The kernel releases that lock when the process ends, for any reason
and in any namespace. A folder whose lock is free is left by a dead process; the next :func:`private_ipc_url` removes
it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

from hal_core import HalError, InvalidValue, Unavailable

from hal_engine.transport.places import open_exactly, remove_left

SCHEMES = ("ipc", "tcp")  #: the schemes that carry frames
_PREFIX, _SOCKET = "hal-", "output"
# Folders are recognized by this file, and removed with all in it: no other program may have one of that name.
_LOCK, _NEW_LOCK = "paddle-hal.lock", "paddle-hal.lock.new"
_MAX_PATH = 107  #: bytes of a path in sockaddr_un without its end
_locks: dict[Path, int] = {}  #: private folders of this process, with the descriptor of their lock


def scheme_of(url: str) -> str:
    """Return the scheme of a well-formed URL that carries frames. Raises InvalidValue."""
    scheme, separator, address = url.partition("://")
    if "\0" in url:  # the system would cut the path there
        raise _bad(url, "has a NUL character in it", "leave it out")
    if not separator or scheme not in SCHEMES:
        raise _bad(url, f"has no scheme of {', '.join(SCHEMES)}", "write ipc:///folder/name or tcp://host:port")
    if not _is_text(address):
        raise _bad(url, "has bytes that are no UTF-8", "use a host or folder whose name is text")
    if scheme == "tcp":
        _check_host_and_port(url, address)
    if scheme == "ipc":
        _check_path(url, address)
    return scheme


def is_loopback(url: str) -> bool:
    """Return whether a tcp URL, well-formed, names this host's loopback, which no other host reaches."""
    host = url.partition("://")[2].rpartition(":")[0]
    return host == "localhost" or re.fullmatch(r"127(\.[0-9]{1,3}){1,3}", host) is not None


def socket_of(url: str) -> Path | None:
    """Return the path of the URL's socket; None for a scheme whose address is not a path."""
    scheme, _, address = url.partition("://")
    return Path(address) if scheme == "ipc" else None


def _check_path(url: str, path: str) -> None:
    if not path.startswith("/"):
        raise _bad(url, "is no absolute path", "write ipc:///folder/name, or use private_ipc_url()")
    if os.path.basename(path) in ("", ".", ".."):
        raise _bad(url, "names no file", "write ipc:///folder/name, or use private_ipc_url()")
    if len(path.encode()) > _MAX_PATH:
        raise _bad(url, f"has a path of more than {_MAX_PATH} bytes", "use a shorter folder, or set TMPDIR to one")


def _is_text(address: str) -> bool:
    """Return whether it holds no bytes that could not be decoded; Python represents these as surrogates."""
    return all(not 0xD800 <= ord(character) < 0xE000 for character in address)


def check_named_port(url: str) -> None:
    """Raise InvalidValue for a tcp URL without a port: a reader may leave it open, a sink cannot."""
    port = url.rpartition(":")[2]
    if scheme_of(url) == "tcp" and port.strip("0") in ("", "*"):
        raise _bad(url, f"has the port {port!r}", "write the one on which the reader listens (its url names it)")


def _check_host_and_port(url: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host:
        raise _bad(url, "names no host and port", "write tcp://host:port")
    if ":" in host:
        raise _bad(url, "has an IPv6 address, which is not served", "write the host's name, or its IPv4 address")
    try:
        host.encode("idna")  # else a socket raises TypeError
    except UnicodeError as error:
        raise _bad(url, f"has a host that is no name: {error}", "write the host's name, or its IPv4 address") from None
    if port != "*" and not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise _bad(url, f"has the port {port!r}", "write a port of 1 to 65535; a reader may take any with *")


def private_ipc_url() -> str:
    """Create a private folder and return the URL of a socket in it. :func:`release_ipc` or the exit removes it."""
    parent = _parent()
    room = _MAX_PATH - len(os.fsencode(parent / f"{_PREFIX}{'x' * 8}" / _SOCKET))
    what = "" if parent.is_absolute() else "is no absolute path"
    if room < 0:
        what = f"leaves no room for a socket: {-room} bytes too long"
    if not _is_text(str(parent)):
        what = "is no UTF-8"
    if what:
        cure = "set XDG_RUNTIME_DIR (or TMPDIR, where that is not set) to a short absolute path"
        raise Unavailable(f"no private folder for ipc: {str(parent)!r} {what}", cure=cure)
    url = f"ipc://{private_folder() / _SOCKET}"
    scheme_of(url)
    return url


def private_folder() -> Path:
    """Create a private folder, after removing those of dead processes. :func:`release_private` or the exit removes
    it."""
    parent = _parent()
    try:
        remove_stale_folders(parent)
        return _make_folder(parent)
    except OSError as error:
        cure = "make room there, or set XDG_RUNTIME_DIR or TMPDIR to a folder that can be written"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            cure = "raise the limit on open files (ulimit -n), or close some"
        raise Unavailable(f"no private folder in {parent}: {error}", cure=cure) from error


def _parent() -> Path:
    """Return the folder of the private folders. Python tests folders for temporary files by writing into them."""
    try:
        return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    except FileNotFoundError as error:
        cure = "make room in one of them, or set XDG_RUNTIME_DIR or TMPDIR to a folder that can be written"
        raise Unavailable(f"no private folder for ipc: {error.strerror}", cure=cure) from error


def _make_folder(parent: Path) -> Path:
    """Create a private folder (0700, whatever the umask) and take its lock. After an error it is removed."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        folder.chmod(0o700)
        descriptor = open_exactly(folder / _NEW_LOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / _NEW_LOCK).rename(folder / _LOCK)  # never there with a free lock while this process lives
        except BaseException:
            os.close(descriptor)
            raise
    except BaseException:
        _remove_folder(folder)
        raise
    _locks[folder] = descriptor
    return folder


def _remove_folder(folder: Path) -> None:
    """Remove a private folder, even without a free descriptor, which listing it would need."""
    for name in (_SOCKET, _NEW_LOCK, _LOCK):
        with contextlib.suppress(OSError):  # usually there is none
            (folder / name).unlink()
    try:
        folder.rmdir()
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)


def adopt_ipc(url: str) -> None:
    """Take the lock of the URL's folder if it is the private one of a dead process, as after its restart."""
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


def release_ipc(url: str) -> None:
    """Remove the socket, and its folder if it is a private one of this process. Idempotent.

    The socket is removed only if this process created it or nobody listens on it; with its folder always. Never a file.
    """
    path = socket_of(url)
    if path is None:
        return
    remove_left(path)
    release_folder(url)


def release_folder(url: str) -> None:
    """Remove the folder of the URL's socket, and all in it, if it is a private one of this process. Idempotent."""
    if (path := socket_of(url)) is not None:
        release_private(path.parent)


def release_private(folder: Path) -> None:
    """Remove ``folder``, and all in it, if it is a private one of this process. Idempotent."""
    if (descriptor := _locks.pop(folder, None)) is not None:
        os.close(descriptor)  # first: listing the folder needs a free descriptor
        _remove_folder(folder)


def remove_folders_of_killed() -> None:
    """Remove the private folders that this user's dead processes have left, as those that this process has killed."""
    with contextlib.suppress(HalError, OSError):  # the next private folder removes them otherwise
        remove_stale_folders(_parent())


def remove_stale_folders(parent: Path) -> list[Path]:
    """Remove the private folders of this user in ``parent`` whose process is gone, and return them."""
    removed = []
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # it belongs to another user, or another process has just removed it
            if lock.parent in _locks or lock.parent.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
                removed.append(lock.parent)
            finally:
                os.close(descriptor)
    return removed


def _bad(url: str, what: str, cure: str) -> HalError:
    return InvalidValue(f"{url!r} {what}", cure=cure, argument="url")


@atexit.register
def release_all() -> None:
    """Remove all private folders of this process, as it ends."""
    for folder in list(_locks):
        release_ipc(f"ipc://{folder / _SOCKET}")


def _leave_to_parent() -> None:
    """In a forked child, forget the folders: they belong to the parent, and its locks end with it, not with its
    children."""
    while _locks:
        os.close(_locks.popitem()[1])


os.register_at_fork(after_in_child=_leave_to_parent)
