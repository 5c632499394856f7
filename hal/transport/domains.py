"""Domains: where the shared memory of one life of a reader lies, so that what its dead leave is known by its name.

A domain is a folder ``SOCKET.shm-NAME`` (0700) beside the reader's socket, for iceoryx2's own files, and the files in
``/dev/shm`` that begin with ``hal-NAME-`` (0600). NAME is random. The reader holds a lock on the file ``lock`` in the
folder; the kernel releases that when the process ends, however it ends. A domain whose lock is free is a dead
reader's: the next reader of that url removes it. Workers that still use it keep what they have mapped.
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

from hal_core.errors import Unavailable

MEMORY = Path("/dev/shm")  #: where the files lie that POSIX shared memory has on Linux
_LOCK, _MARK = "lock", ".shm-"
_NAME = re.compile(r"[0-9a-f]{16}")


def folder_of(socket: Path, name: str) -> Path:
    """Return the folder of the domain. Raises Unavailable unless it is one, and this user's alone."""
    if not _NAME.fullmatch(name):
        raise Unavailable(f"{name!r} names no domain of shared memory", cure="connect hal's own readers only")
    folder = socket.with_name(f"{socket.name}{_MARK}{name}")
    try:
        found = folder.lstat()
    except OSError as error:
        raise Unavailable(f"no domain of shared memory in {folder}: {error.strerror}", cure=_CURE) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise Unavailable(f"{folder} is not a folder of this user alone", cure=_CURE)
    return folder


_CURE = "run worker and reader as one user on one host and, in containers, with one /dev/shm; or use ipc://"


def prefix_of(name: str) -> str:
    """Return what the names of a domain's files begin with."""
    return f"hal-{name}-"


def make_domain(socket: Path) -> tuple[str, Path, int]:
    """Make a domain; return its name, its folder and the descriptor of its lock. Raises Unavailable."""
    name = os.urandom(8).hex()
    folder = socket.with_name(f"{socket.name}{_MARK}{name}")
    try:
        folder.mkdir(mode=0o700)
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        cure = "make room there, or choose a folder that can be written"
        raise Unavailable(f"no folder for shared memory beside {socket}: {error}", cure=cure, argument="url") from error
    return name, folder, lock


def remove_domain(folder: Path) -> None:
    """Remove the domain's files and its folder."""
    for path in MEMORY.glob(f"{prefix_of(folder.name.rpartition(_MARK)[2])}*"):
        with contextlib.suppress(OSError):  # its process has just removed it, or it is another user's
            path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale_domains(folder: Path, socket: str | None = None) -> list[Path]:
    """Remove this user's domains in ``folder``, those of one socket or of all, whose reader is gone; return them."""
    removed = []
    for found in folder.glob(f"{'*' if socket is None else glob.escape(socket)}{_MARK}*"):
        if not _NAME.fullmatch(found.name.rpartition(_MARK)[2]):
            continue
        with contextlib.suppress(OSError):  # another user's, no folder, or just removed by another process
            if found.lstat().st_uid != os.getuid():
                continue
            lock = os.open(found / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_domain(found)
                removed.append(found)
            finally:
                os.close(lock)
    return removed
