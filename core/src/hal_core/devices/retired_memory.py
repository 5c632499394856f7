"""Memory of a device, and the release of unreferenced memory."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from ..streams import Event

Free = Callable[[], None]
LOOKS = 4
"""Entries checked by a frequent call: more than it adds, so that the list shrinks once the work is done."""


class Retired:
    """Releases of unreferenced memory, streams and tensors' owners, postponed until in-flight work finishes.

    Finalizers fill it, in any thread and at any point, so adding makes no calls. The device's thread empties it when it
    creates or closes something.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[tuple[Event, ...], Free]] = deque()
        self._process = os.getpid()
        self._closed = False

    def add(self, events: Iterable[Event], free: Free) -> None:
        """Call ``free`` once all events have passed."""
        if self._closed:  # all work was done then
            if self._process == os.getpid():
                free()
            return
        self._waiting.append((tuple(events), free))

    def keep(self, events: Iterable[Event], owner: object) -> None:
        """Keep an object alive until all events have passed."""
        self.add(events, partial(_let_go, owner))

    def close(self, deadline: float) -> None:
        """Release entries whose work is done within ``deadline`` seconds; from now on release new ones at once."""
        self.reap(deadline)
        self._closed = True

    def look(self) -> None:
        """Release finished entries among the first few: cheap enough for every hook call."""
        if self._waiting:
            self.reap(most=LOOKS)

    def reap(self, deadline: float = 0.0, most: int | None = None) -> int:
        """Release entries whose work is done by now, or within ``deadline`` seconds, and return their number. ``most``:
        entries to check, up to the first unfinished one."""
        if self._process != os.getpid():
            return 0  # a fork's child: memory and streams belong to the parent
        freed, end = 0, time.monotonic() + deadline
        for _ in range(len(self._waiting) if most is None else min(most, len(self._waiting))):
            events, free = self._waiting.popleft()
            if all(event.done() or (deadline and event.wait(max(0.0, end - time.monotonic()))) for event in events):
                free()
                freed += 1
            else:
                self._waiting.append((events, free))
                if most is not None:
                    break  # later entries are usually in flight too
        return freed


class Owner(Protocol):
    """The part of a device that its memory uses."""

    @property
    def last(self) -> Mapping[int, Any]:
        """Key of a stream to its last :class:`hal_core.devices.RecordedEvent`."""

    @property
    def retired(self) -> Retired: ...


class DeviceMemory:
    """Device memory at ``address``. It is released when it is unreferenced and its queued work is done.

    ``keep``: the owner of memory that a framework allocated. The framework's allocator reuses memory as soon as the
    owner is dropped, so the owner is held until that work is done. ``_free``: releases other memory.
    """

    __slots__ = ("__weakref__", "_free", "address", "device", "keep", "nbytes")

    def __init__(self, device: Owner, address: int, nbytes: int, keep: object = None, free: Free | None = None) -> None:
        self.device, self.address, self.nbytes, self.keep, self._free = device, address, nbytes, keep, free

    def __del__(self) -> None:
        if self._free is None and self.keep is None:
            return
        # work that uses it was queued before now, so before the stream's last event
        events = [event for event in [*self.device.last.values()] if not event.passed]  # copied: another thread may add
        if self._free is None:
            self.device.retired.keep(events, self.keep)
        else:
            self.device.retired.add(events, self._free)


class SpanMemory(DeviceMemory):
    """The addresses from the lowest of several memories to the end of the highest; only ``parts`` of it are written.

    ``parts``: begin and end of each memory.
    """

    __slots__ = ("parts",)

    def __init__(self, device: Owner, parts: Sequence[tuple[int, int]], keep: object) -> None:
        begin = min([begin for begin, _ in parts])
        super().__init__(device, begin, max([end for _, end in parts]) - begin, keep)
        self.parts = parts


def _let_go(keep: object) -> None:
    """Do nothing: this call held the owner until now."""
