"""The owner of a System V queue: one sink in the whole IPC namespace, while its process lives.

The lock is a semaphore set with the queue's own key, in the queue's own namespace. So every user, container and mount
namespace that can reach the queue finds the same lock, and the kernel releases it (``SEM_UNDO``) when the process ends
in any way. A lock on a file has neither property (``docs/decisions/25-*``).

Semaphore 0 is 1 while the queue has an owner. Semaphore 1 is always 0. The kernel keeps the pid of its last user, and
each owner uses it before its first message: so it names the last sink that sent. ``semop`` is called through ctypes,
because testing and taking must be one call, which ``sysv_ipc`` lacks; ``struct sembuf`` is three shorts on every Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
from pathlib import Path

from hal_core import HalError, InvalidValue, Unavailable

log = logging.getLogger("hal")
_libc = ctypes.CDLL(None, use_errno=True)
_CREATE, _NO_WAIT, _UNDO = 0o1000, 0o4000, 0x1000
_REMOVE, _GET_PID = 0, 11
_OWNED, _SENDER, _SEMAPHORES = 0, 1, 2
_TRIES = 100  #: another process may remove the set between finding and taking it
_PROCESSES = Path("/proc")


class _Operation(ctypes.Structure):
    _fields_ = (("number", ctypes.c_ushort), ("change", ctypes.c_short), ("flags", ctypes.c_short))


class QueueLock:
    """Exclusive lock on a queue. Raises InvalidValue naming the current owner."""

    def __init__(self, key: int, queue_mode: int, name: str) -> None:
        self._name, self._pid = name, os.getpid()
        mode = queue_mode & 0o222  # a user with the right to send may own the queue, and must then be able to test
        for _ in range(_TRIES):
            self._set = _libc.semget(ctypes.c_int(key), _SEMAPHORES, _CREATE | mode | mode << 1)
            if self._set < 0:
                raise self._unusable(ctypes.get_errno())
            try:
                _operate(self._set, (_OWNED, 0, _NO_WAIT), (_OWNED, 1, _NO_WAIT | _UNDO))
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    raise self._owned() from None
                if error.errno not in (errno.EIDRM, errno.EINVAL):
                    raise self._unusable(error.errno or 0) from error
            else:
                return
        raise self._unusable(errno.EIDRM)

    def last_sender(self) -> int:
        """Return the pid of the last sink that sent; 0 if there was none or its pid is not visible."""
        return max(0, int(_libc.semctl(self._set, _SENDER, _GET_PID)))

    def mark_sender(self) -> None:
        """Note that this process is about to send."""
        with contextlib.suppress(OSError):  # the set was removed: the next owner tests whether this process lives
            _operate(self._set, (_SENDER, 0, _NO_WAIT))

    def release(self, *, for_good: bool = False) -> None:
        """Release the queue; ``for_good`` removes the semaphores too, if the queue was removed. Idempotent."""
        if self._set < 0 or os.getpid() != self._pid:
            return
        taken, self._set = self._set, -1
        if for_good:
            _libc.semctl(taken, 0, _REMOVE)
            return
        try:
            _operate(taken, (_OWNED, -1, _NO_WAIT | _UNDO))
        except OSError as error:
            log.warning("the lock of the queue %s was gone before its owner: %s", self._name, error)

    def _owned(self) -> HalError:
        owner = max(0, int(_libc.semctl(self._set, _OWNED, _GET_PID)))
        if owner == self._pid:
            what, cure = "is open in this process already", "close that sink, or choose another id"
        else:
            what, cure = f"belongs to {process(owner)}", "choose another id, or stop that worker"
        return InvalidValue(f"the queue {self._name} {what}", cure=f"{cure} (ids may share a key)", argument="url")

    def _unusable(self, number: int) -> HalError:
        what = f"the queue {self._name} cannot be locked: its semaphores: {os.strerror(number)}"
        if number in (errno.EACCES, errno.EPERM):
            cure = f"run as the user who owns them (ipcs -s), or remove them (ipcrm -S {self._name})"
        elif number == errno.ENOSPC:
            cure = "remove semaphores that nobody uses (ipcs -s), or raise the 4th number of kernel.sem"
        elif number == errno.EINVAL:
            cure = "another program has semaphores with this key (ipcs -s); choose another id"
        else:
            cure = "allow semget and semop here, as msgget and msgsnd are"
        return Unavailable(what, cure=cure, argument="url")


def process(pid: int) -> str:
    """Return a process's name for an error: its pid and, if readable, its command."""
    if pid <= 0:
        return "a process that cannot be seen from here"
    with contextlib.suppress(OSError):  # gone, or hidden from this user
        return f"{(_PROCESSES / str(pid) / 'comm').read_text().strip()!r} of process {pid}"
    return f"process {pid}"


def may_live(pid: int) -> bool:
    """Return whether the process may still run: False only if the kernel has no such process, or a zombie."""
    if pid <= 0:
        return True  # in another pid namespace
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, so it exists
        pass
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Return whether the whole process has ended and waits for its parent, not only its first thread."""
    try:
        state = (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
        return state in "ZX" and len(os.listdir(_PROCESSES / str(pid) / "task")) <= 1
    except OSError:  # unreadable: it counts as living
        return False


def _operate(semaphores: int, *operations: tuple[int, int, int]) -> None:
    array = (_Operation * len(operations))(*(_Operation(*operation) for operation in operations))
    if _libc.semop(semaphores, array, ctypes.c_size_t(len(operations))) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
