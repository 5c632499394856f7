"""Domains: where the shared memory of one life of a reader lies, so that what its dead leave is known by its name.

A domain is a folder ``SOCKET.shm-NAME`` (0700) beside the reader's socket, for iceoryx2's own files, and the files in
``/dev/shm`` that begin with ``hal-NAME-`` (0600). NAME is random. The reader holds a lock on the file ``lock`` in the
folder; the kernel releases that when the process ends, however it ends. A domain whose lock is free is a dead
reader's: the next reader of that path removes it. With a private folder all domains in it go, whoever holds them. Who
still uses a domain that was removed keeps what it has mapped, and makes nothing more in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import stat
from pathlib import Path

from hal_core import Unavailable

from hal.transport.addresses import open_exactly

MEMORY = Path("/dev/shm")  #: where the files lie that POSIX shared memory has on Linux
PRIVATE = "hal-"  #: what the names of private folders begin with
#: Bytes that must be free there before anything is made in it: iceoryx2 writes its own small files without reserving
#: them, and a write for which there is no room ends the process (SIGBUS).
MARGIN = 1 << 20
_LOCK, _MARK = "lock", ".shm-"
_NAME = re.compile(r"[0-9a-f]{16}")


def folder_of(socket: Path, name: str) -> Path:
    """Return the folder of the domain. Raises Unavailable unless it is one, and this user's alone."""
    if not _NAME.fullmatch(name):  # a peer has written it, and the log will have it: no more than a line of it
        raise Unavailable(f"{name[:40]!r} names no domain of shared memory", cure="connect hal's own readers only")
    folder = socket.with_name(f"{socket.name}{_MARK}{name}")
    try:
        found = folder.lstat()
    except OSError as error:
        raise Unavailable(f"no domain of shared memory in {folder}: {error.strerror}", cure=_CURE) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise Unavailable(f"{folder} is not a folder of this user alone", cure=_CURE)
    if not os.path.lexists(folder / _LOCK):  # iceoryx2 makes folders that it misses, so there may be one again
        raise Unavailable(f"the domain of shared memory in {folder} was removed", cure=_CURE)
    return folder


_CURE = "run worker and reader as one user on one host and, in containers, with one /dev/shm; or use ipc://"


def prefix_of(name: str) -> str:
    """Return what the names of a domain's files begin with."""
    return f"hal-{name}-"


def check_room(size: int = 0) -> None:
    """Raise Unavailable unless ``size`` bytes and the margin are free in ``MEMORY``."""
    found = os.statvfs(MEMORY)
    free = found.f_bavail * found.f_frsize
    if found.f_blocks and free < size + MARGIN:  # no blocks: a file system without a limit
        raise Unavailable(
            f"{MEMORY} has no room for {size + MARGIN} bytes, {free} are free",
            cure=f"remove what is left in {MEMORY}, or make it larger (docker run --shm-size)",
        )


def make_domain(socket: Path) -> tuple[str, Path, int]:
    """Make a domain; return its name, its folder and the descriptor of its lock. Raises Unavailable."""
    name = os.urandom(8).hex()
    folder = socket.with_name(f"{socket.name}{_MARK}{name}")
    try:
        folder.mkdir(mode=0o700)
        folder.chmod(0o700)  # whatever the umask has taken away
        lock = open_exactly(folder / _LOCK)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        cure = "make room there, or choose a folder that can be written"
        raise Unavailable(f"no folder for shared memory beside {socket}: {error}", cure=cure, argument="url") from error
    return name, folder, lock


def remove_domain(folder: Path) -> None:
    """Remove the domain's files and its folder. Who has mapped them keeps them.

    The files twice: first, because without the folder nobody would find them if this process were killed; and again,
    for a worker that is making some now. Either they are here by then, or it sees that the folder is gone.
    """
    _remove_files(folder)
    shutil.rmtree(folder, ignore_errors=True)
    _remove_files(folder)


def _remove_files(folder: Path) -> None:
    for path in MEMORY.glob(f"{prefix_of(folder.name.rpartition(_MARK)[2])}*"):
        with contextlib.suppress(OSError):  # its process has just removed it, or it is another user's
            path.unlink()


def remove_if_revived(folder: Path) -> None:
    """Remove what this process has made in a domain that was removed meanwhile; nobody else would find it."""
    if os.path.lexists(folder / _LOCK):
        return
    remove_domain(folder)
    if folder.parent.name.startswith(PRIVATE):
        with contextlib.suppress(OSError):  # it is there and has files, its lock at least, or it is not
            folder.parent.rmdir()


def remove_domains(folder: Path) -> None:
    """Remove all domains in ``folder``, also those of readers that live: the folder itself is about to go."""
    for found in folder.glob(f"*{_MARK}*"):
        if _NAME.fullmatch(found.name.rpartition(_MARK)[2]):
            remove_domain(found)


def remove_stale_domains(folder: Path, socket: str | None = None) -> list[Path]:
    """Remove this user's domains in ``folder``, those of one socket or of all, whose reader is gone; return them."""
    removed = []
    for found in folder.glob(f"{'*' if socket is None else glob.escape(socket)}{_MARK}*"):
        if not _NAME.fullmatch(found.name.rpartition(_MARK)[2]):
            continue
        with contextlib.suppress(OSError):  # another user's, no folder, or just removed by another process
            if found.lstat().st_uid != os.getuid():
                continue
            lock = open_exactly(found / _LOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_domain(found)
                removed.append(found)
            finally:
                os.close(lock)
    return removed
