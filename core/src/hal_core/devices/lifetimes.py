"""Memory of a device, and when what nobody holds any more may be given back."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

from ..streams import Event

Free = Callable[[], None]
LOOKS = 4
"""Entries that a frequent call looks at: more than it adds, so that the list gets shorter once the work is over."""


class Retired:
    """What nobody holds any more, but work that is under way may still use.

    Filled by finalizers, which may run in any thread and at any point, so adding calls nothing; emptied where the
    device's thread makes or closes something.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[tuple[Event, ...], Free]] = deque()
        self._process = os.getpid()
        self._closed = False

    def add(self, events: Iterable[Event], free: Free) -> None:
        """Have ``free`` called once all events have passed."""
        if self._closed:  # all work was over then
            if self._process == os.getpid():
                free()
            return
        self._waiting.append((tuple(events), free))

    def close(self, deadline: float) -> None:
        """Give back what is over within ``deadline`` seconds; from now on at once what comes."""
        self.reap(deadline)
        self._closed = True

    def look(self) -> None:
        """Give back what is over among the first few entries: cheap enough for every hook call."""
        if self._waiting:
            self.reap(most=LOOKS)

    def reap(self, deadline: float = 0.0, most: int | None = None) -> int:
        """Give back what is over by now, or within ``deadline`` seconds; how many that were. ``most``: entries
        that are looked at, up to the first that is under way."""
        if self._process != os.getpid():
            return 0  # a fork's child: memory and streams are the parent's
        freed, end = 0, time.monotonic() + deadline
        for _ in range(len(self._waiting) if most is None else min(most, len(self._waiting))):
            events, free = self._waiting.popleft()
            if all(event.done() or (deadline and event.wait(max(0.0, end - time.monotonic()))) for event in events):
                free()
                freed += 1
            else:
                self._waiting.append((events, free))
                if most is not None:
                    break  # those behind it came later: most often they are under way too
        return freed


class Noted(Event, Protocol):
    """An event that remembers that it has passed."""

    @property
    def passed(self) -> bool: ...


class Owner(Protocol):
    """The device that memory belongs to, as far as the memory asks."""

    @property
    def last(self) -> Mapping[int, Noted]: ...

    @property
    def retired(self) -> Retired: ...


class DeviceMemory:
    """Device memory at ``address``. It goes back when nobody holds it and the work that was given it is over.

    ``keep``: the owner of memory that a framework allocated. Its allocator gives memory to the next tensor as soon as
    the owner is dropped, so the owner is held until that work is over. ``_free``: what gives other memory back.
    """

    __slots__ = ("__weakref__", "_free", "address", "device", "keep", "nbytes")

    def __init__(self, device: Owner, address: int, nbytes: int, keep: object = None, free: Free | None = None) -> None:
        self.device, self.address, self.nbytes, self.keep, self._free = device, address, nbytes, keep, free

    def __del__(self) -> None:
        free = self._free
        if free is None and self.keep is not None:
            free = partial(_let_go, self.keep)
        if free is not None:  # work that uses it was put on a stream before now, so before its last event
            self.device.retired.add([event for event in self.device.last.values() if not event.passed], free)


def _let_go(keep: object) -> None:
    """Do nothing: this call held the owner until now."""
