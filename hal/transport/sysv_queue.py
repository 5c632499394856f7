"""One System V message queue as FastDeploy names it: key, limits, what a former life left in it.

The library is ``sysv_ipc`` (extra ``[sysv]``; ``docs/decisions/0010-*`` says why): it knows the ABI of ``msqid_ds``,
lets go of the interpreter's lock, and has wheels.
"""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import Any

from hal_core.errors import HalError, InvalidValue, SinkClosed, Unavailable

log = logging.getLogger("hal")
#: What FastDeploy's documentation recommends; it covers every layout.
SYSCTL = ("sysctl -w kernel.msgmax=1048576", "sysctl -w kernel.msgmnb=268435456")
KEYS = ("20", "16", "ftok")
_LIMITS = Path("/proc/sys/kernel")
_TABLE = Path("/proc/sysvipc/msg")


def derive_key(folder: str, number: int, kind: str = "20") -> int:
    """The key that legacy readers compute from a folder's inode and a number.

    ``20``: 4, 8 and 20 bits of device, inode and number. ``16``: 8, 8 and 16 bits, as before. ``ftok``: the C
    library's. Raises InvalidValue where they would go on with the key -1.
    """
    try:
        found = os.stat(folder)
    except OSError as error:
        raise InvalidValue(
            f"no key from {folder!r}: {error}", cure="name a folder that exists", argument="url"
        ) from error
    device, inode = found.st_dev, found.st_ino
    if kind == "20":
        key = (device & 0xF) << 28 | (inode & 0xFF) << 20 | number & 0xFFFFF
    elif kind == "16":
        key = (device & 0xFF) << 24 | (inode & 0xFF) << 16 | number & 0xFFFF
    else:
        key = (number & 0xFF) << 24 | (device & 0xFF) << 16 | inode & 0xFFFF
    return key - (1 << 32) if key >= 1 << 31 else key  # key_t is a signed int


class Queue:
    """An opened queue for messages of one size. Made if it is not there; never removed, as readers keep its number."""

    def __init__(self, key: int, nbytes: int, mode: int, *, drop_stale: bool) -> None:
        check_limits(nbytes)
        self._ipc = _library()
        self.key, self.nbytes = key, nbytes
        try:
            self._queue = self._ipc.MessageQueue(key, self._ipc.IPC_CREAT, mode, nbytes)
        except (self._ipc.Error, OSError) as error:
            cure = "run as the user that made the queue, or have the reader make it with mode 0660"
            raise InvalidValue(f"cannot open the queue {self}: {error}", cure=cure, argument="url") from error
        if self._queue.max_size < nbytes:
            raise _too_small(
                f"the queue {self} holds {self._queue.max_size} bytes", nbytes, f"; then {self._removal()}"
            )
        if self._queue.mode & ~mode & 0o777:
            log.warning("the queue %s has mode %o, wider than the %o asked for", self, self._queue.mode & 0o777, mode)
        self.stale_removed = self._take_over(drop_stale)

    def __str__(self) -> str:
        return f"{self.key & 0xFFFFFFFF:#010x}"

    def send(self, message: bytes) -> bool:
        """Queue the message; False when there is no room. Raises SinkClosed when the queue is gone."""
        try:
            self._queue.send(message, False, type=1)
        except self._ipc.BusyError:
            return False
        except (self._ipc.Error, OSError) as error:
            raise SinkClosed(
                f"the queue {self} takes nothing: {error}",
                cure="open a new sink; the reader must open the queue anew too",
                hook="save_output",
                argument="sink",
            ) from error
        return True

    def unread(self) -> int:
        """How many messages nobody has read yet; 0 when the queue is gone."""
        try:
            return int(self._queue.current_messages)
        except (self._ipc.Error, OSError):
            return 0

    def take_back(self) -> int:
        """Take out what nobody has read, and return how many messages that were."""
        count = 0
        while True:
            try:
                self._queue.receive(False)
            except (self._ipc.Error, OSError):
                return count
            count += 1

    def _take_over(self, drop_stale: bool) -> int:
        """Make sure that what lies in the queue is of our layout and of nobody who still sends; remove it."""
        entry = table().get(self._queue.id)
        unread = self.unread()
        if not unread:
            return 0
        if entry is not None and entry["cbytes"] != entry["qnum"] * self.nbytes:
            raise InvalidValue(
                f"the queue {self} holds {entry['qnum']} messages of {entry['cbytes']} bytes in all, not of "
                f"{self.nbytes} each: another layout",
                cure=f"choose another id, or {self._removal()}",
                argument="url",
            )
        sender = self._queue.last_send_pid
        if not drop_stale and (sender == 0 or (sender != os.getpid() and _is_alive(sender))):
            who = f"process {sender} sends" if sender else "a process that cannot be seen from here may send"
            raise InvalidValue(
                f"{who} to the queue {self}, {unread} messages are unread",
                cure="choose another id, or stop that worker; with stale=drop its messages are removed",
                argument="url",
            )
        removed = self.take_back()
        log.warning("the queue %s held %d messages of process %d, which is gone; removed", self, removed, sender)
        return removed

    def _removal(self) -> str:
        return f"remove it (ipcrm -Q {self})"


def check_limits(nbytes: int) -> None:
    """Raise Unavailable when the kernel takes no message of that size; an error with the cure."""
    for name in ("msgmax", "msgmnb"):
        try:
            limit = int((_LIMITS / name).read_text())
        except (OSError, ValueError):
            continue  # no such file here; sending will say
        if limit < nbytes:
            raise _too_small(f"kernel.{name} is {limit}", nbytes, "")


def table() -> dict[int, dict[str, int]]:
    """The kernel's table of message queues, by number; empty where it cannot be read."""
    try:
        head, *lines = _TABLE.read_text().splitlines()
    except (OSError, ValueError):
        return {}
    rows = [dict(zip(head.split(), map(int, line.split()), strict=True)) for line in lines]
    return {row["msqid"]: row for row in rows}


def _too_small(what: str, nbytes: int, then: str) -> HalError:
    return Unavailable(
        f"{what}, a message has {nbytes} bytes, so none would ever be sent",
        cure="as root, in this IPC namespace:\n  " + "\n  ".join(SYSCTL) + "\n" + then.removeprefix("; "),
        hook="save_output",
        argument="sink",
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _library() -> Any:  # noqa: ANN401  # a module without type information
    try:
        return importlib.import_module("sysv_ipc")
    except ImportError as error:
        cure = "pip install 'paddle-hal[sysv]'"
        raise Unavailable("the sysv transport needs the package sysv_ipc", cure=cure, argument="url") from error
