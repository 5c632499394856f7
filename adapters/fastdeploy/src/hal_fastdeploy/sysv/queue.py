"""One System V message queue with FastDeploy's key: its limits, and messages of a former owner.

The library is ``sysv_ipc`` (reasons in ``docs/decisions/25-*``): it has the ABI of ``msqid_ds``, releases the GIL,
and has wheels.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
from pathlib import Path
from typing import Any

from hal_core import HalError, InvalidValue, SinkClosed, Unavailable

from hal_fastdeploy.sysv.owner import QueueLock, may_live, process

log = logging.getLogger("hal")
#: What FastDeploy's documentation recommends; it covers every layout.
SYSCTL = ("sysctl -w kernel.msgmax=1048576", "sysctl -w kernel.msgmnb=268435456")
KEYS = ("20", "16", "ftok")
_REMOVED = ("it was removed", "open a new sink; the reader must open the queue anew too")
_LIMITS = Path("/proc/sys/kernel")
_TABLE = Path("/proc/sysvipc/msg")


def derive_key(folder: str, number: int, kind: str = "20") -> int:
    """Return the key that legacy readers compute from a folder's inode and a number.

    ``20``: 4, 8 and 20 bits of device, inode and number. ``16``: 8, 8 and 16 bits, as before. ``ftok``: the C
    library's. Raises InvalidValue if they would continue with the key -1.
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
    """An opened queue for messages of one size, owned by this sink alone until :meth:`release`.

    Made if it is missing, and never removed, as readers keep its number. Raises InvalidValue, naming the owner or the
    living sender, if it has one.
    """

    def __init__(self, key: int, nbytes: int, mode: int, *, drop_stale: bool) -> None:
        check_limits(nbytes)
        self._ipc = _library()
        self.key, self.nbytes = key, nbytes
        self._queue = self._open(mode)
        self._lock = QueueLock(key, int(self._queue.mode), str(self))
        try:
            if self._queue.max_size < nbytes:
                raise _too_small(
                    f"the queue {self} holds {self._queue.max_size} bytes", nbytes, f"; then {self._removal()}"
                )
            if self._queue.mode & ~mode & 0o777:
                made = "" if self._queue.cuid in (0, os.getuid()) else f", made by user {self._queue.cuid},"
                what = f"has mode {self._queue.mode & 0o777:o}, wider than the {mode:o} asked for"
                log.warning("the queue %s%s %s", self, made, what)
            self.stale_removed = self._take_over(drop_stale)
            self._last_send = self._queue.last_send_pid, self._queue.last_send_time
            self._has_sent = False
        except BaseException:
            self._lock.release()
            raise

    def __str__(self) -> str:
        return f"{self.key & 0xFFFFFFFF:#010x}"

    def send(self, message: bytes) -> bool:
        """Queue the message; False if the queue is full. Raises SinkClosed if the queue takes no further message."""
        try:
            if (stranger := self._stranger()) is None:
                if not self._has_sent:
                    self._lock.mark_sender()
                self._queue.send(message, False, type=1)
        except self._ipc.BusyError:
            if (room := self._queue.max_size) < self.nbytes:
                raise self._closed(
                    f"its msg_qbytes was lowered to {room}, a message has {self.nbytes} bytes",
                    f"{self._removal()}, and start reader and worker again",
                ) from None
            return False
        except (self._ipc.Error, OSError) as error:
            raise self._closed(*self._reason(error)) from error
        if stranger is not None:
            raise self._closed(f"{process(stranger)} sends to it too", "stop that process, or choose another id")
        self._has_sent = True
        return True

    def unread(self) -> int | None:
        """Return the number of unread messages; None if the queue was removed."""
        try:
            return int(self._queue.current_messages)
        except (self._ipc.Error, OSError):
            return None

    def check(self) -> None:
        """Raise SinkClosed if the queue was removed."""
        if self.unread() is None:
            raise self._closed(*_REMOVED)

    def take_back(self) -> int | None:
        """Remove the unread messages and return their number; None if some may be another sender's."""
        try:
            if not self._has_sent or self._stranger() is not None:
                return None if self._has_sent else 0
        except (self._ipc.Error, OSError):
            return None
        return self._drain()[0]

    def release(self) -> None:
        """Release the lock on the queue. Idempotent."""
        self._lock.release(for_good=self.unread() is None)

    def _open(self, mode: int) -> Any:  # noqa: ANN401
        if self.key == 0:  # IPC_PRIVATE: each call would make a new private queue
            raise InvalidValue(
                "the key of this folder and id is 0, no queue's", cure="choose another id", argument="url"
            )
        try:
            return self._ipc.MessageQueue(self.key, self._ipc.IPC_CREAT, mode, self.nbytes)
        except (self._ipc.Error, OSError) as error:
            there = next((row for row in table().values() if row["key"] == self.key), None)
            whose = "" if there is None else f"; it is of user {there['uid']}, mode {there['perms']:03d}"
            cure = "run as the user that made the queue, or have the reader make it with mode 0660"
            if there is None:
                cure = "remove queues that nobody uses (ipcs -q, ipcrm -q), or raise kernel.msgmni"
            raise InvalidValue(f"cannot open the queue {self}: {error}{whose}", cure=cure, argument="url") from error

    def _stranger(self) -> int | None:
        """Return another process that has sent to the queue while this sink owns it, or None."""
        last = self._queue.last_send_pid, self._queue.last_send_time
        ours = last[0] == os.getpid() if self._has_sent else last == self._last_send
        return None if ours else int(last[0])

    def _drain(self) -> tuple[int, int]:
        count = nbytes = 0
        while True:
            try:
                data, _ = self._queue.receive(False)
            except (self._ipc.Error, OSError):
                return count, nbytes
            count, nbytes = count + 1, nbytes + len(data)

    def _take_over(self, drop_stale: bool) -> int:
        """Check that no other process sends and that unread messages have this layout, and remove them."""
        if self._queue.last_send_time == 0:  # never used
            return 0
        sender, unread = int(self._queue.last_send_pid), self.unread() or 0
        entry = table().get(self._queue.id)
        if unread and entry is not None and entry["cbytes"] != entry["qnum"] * self.nbytes:
            raise InvalidValue(
                f"the queue {self} holds {entry['qnum']} messages of {entry['cbytes']} bytes in all, not of "
                f"{self.nbytes} each: another layout",
                cure=f"choose another id, or {self._removal()}",
                argument="url",
            )
        # The last sink that sent has released the queue, or this one would not own it. Its pid may be reused by now.
        is_former_sink = sender != 0 and sender in (os.getpid(), self._lock.last_sender())
        if not drop_stale and not is_former_sink and may_live(sender):
            self._refuse(sender, unread)
        if not unread:
            return 0
        removed, nbytes = self._drain()
        gone = "dropped as asked" if drop_stale else "which is gone; removed"
        log.warning(
            "the queue %s held %d messages (%d bytes) of %s, %s; whose requests they tell is known to that worker's "
            "engine alone: run again what it still waits for",
            *(self, removed, nbytes, process(sender) if drop_stale else f"process {sender}", gone),
        )
        return removed

    def _refuse(self, sender: int, unread: int) -> None:
        left = f"{unread} messages ({unread * self.nbytes} bytes) are unread" if unread else "all it sent was read"
        if sender:
            what = f"{process(sender)} sends to the queue {self}, {left}"
        elif unread:
            what = f"{process(0)} may send to the queue {self}, {left}"
        else:  # as after each restart of a container: no message is unread, and a new one is detected
            log.warning("%s sent to the queue %s; a message of it will close this sink", process(0), self)
            return
        raise InvalidValue(
            what,
            cure="choose another id, or stop that worker; with stale=drop its messages are removed",
            argument="url",
        )

    def _reason(self, error: Exception) -> tuple[str, str]:
        """Return the reason of a permanent failure to send, and the cure."""
        limit = _limit("msgmax")
        if isinstance(error, OSError) and error.errno == errno.EINVAL and limit is not None and limit < self.nbytes:
            what = f"kernel.msgmax was lowered to {limit}, a message has {self.nbytes} bytes"
            return what, f"as root, in this IPC namespace: {SYSCTL[0]}; then open a new sink"
        if isinstance(error, self._ipc.ExistentialError):
            return _REMOVED
        if isinstance(error, self._ipc.PermissionsError):
            return "this user may not send to it any more", "ask who changed its mode (ipcs -q), and open a new sink"
        return str(error), "open a new sink; the reader must open the queue anew too"

    def _closed(self, why: str, cure: str) -> SinkClosed:
        return SinkClosed(f"the queue {self} takes nothing: {why}", cure=cure, hook="save_output", argument="sink")

    def _removal(self) -> str:
        return f"remove it (ipcrm -Q {self})"


def check_limits(nbytes: int) -> None:
    """Raise Unavailable if the kernel takes no message of that size."""
    for name in ("msgmax", "msgmnb"):
        if (limit := _limit(name)) is not None and limit < nbytes:
            raise _too_small(f"kernel.{name} is {limit}", nbytes, "")


def _limit(name: str) -> int | None:
    """Return a limit of this IPC namespace; None without such a file, as sending reports it."""
    text = _read(_LIMITS / name)
    return None if text is None else int(text)


def _read(path: Path) -> str | None:
    """Return the file's text; None if the kernel has no such file. Raises Unavailable if it cannot be read now."""
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except OSError as error:  # mostly, no descriptor is left: without the file a check would be skipped
        cure = "close files, or raise the limit (ulimit -n)"
        raise Unavailable(f"cannot read {path}: {error.strerror}", cure=cure, argument="url") from error


def table() -> dict[int, dict[str, int]]:
    """Return the kernel's table of message queues, by number, empty if it is missing. ``perms`` has octal digits."""
    head, *lines = (_read(_TABLE) or "none").splitlines()
    rows = [dict(zip(head.split(), map(int, line.split()), strict=True)) for line in lines]
    return {row["msqid"]: row for row in rows}


def _too_small(what: str, nbytes: int, then: str) -> HalError:
    return Unavailable(
        f"{what}, a message has {nbytes} bytes, so none would ever be sent",
        cure=f"as root, in this IPC namespace: {' && '.join(SYSCTL)}{then}",  # one command, where a line is all it has
        hook="save_output",
        argument="sink",
    )


def _library() -> Any:  # noqa: ANN401  # a module without type information
    try:
        return importlib.import_module("sysv_ipc")
    except ModuleNotFoundError as error:
        cure = "pip install 'sysv-ipc>=1.2'"
        raise Unavailable("the sysv transport needs the package sysv_ipc", cure=cure, argument="url") from error
    except (ImportError, OSError) as error:  # it is there
        cure = "see to what it says (ulimit -n, if files are too many), or install it anew"
        raise Unavailable(f"the package sysv_ipc cannot be loaded: {error}", cure=cure, argument="url") from error
