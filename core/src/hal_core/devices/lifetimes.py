"""Memory of a device, and when what nobody holds any more may be given back."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..streams import Event

Free = Callable[[], None]


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
        """Give back what is over within ``deadline`` seconds each; from now on at once what comes."""
        self.reap(deadline)
        self._closed = True

    def reap(self, deadline: float = 0.0) -> int:
        """Give back what is over by now, or within ``deadline`` seconds each; how many that were."""
        if self._process != os.getpid():
            return 0  # a fork's child: memory and streams are the parent's
        freed = 0
        for _ in range(len(self._waiting)):
            events, free = self._waiting.popleft()
            if all(event.wait(deadline) if deadline else event.done() for event in events):
                free()
                freed += 1
            else:
                self._waiting.append((events, free))
        return freed


class Owner(Protocol):
    """The device that memory belongs to, as far as the memory asks."""

    @property
    def last(self) -> Mapping[int, Event]: ...

    @property
    def retired(self) -> Retired: ...


class DeviceMemory:
    """Device memory at ``address``. It goes back when nobody holds it and the work that was given it is over.

    ``keep``: the owner of memory that somebody else made. ``_free``: what gives it back; None: nothing is to be done.
    """

    __slots__ = ("__weakref__", "_free", "address", "device", "keep", "nbytes")

    def __init__(self, device: Owner, address: int, nbytes: int, keep: object = None, free: Free | None = None) -> None:
        self.device, self.address, self.nbytes, self.keep, self._free = device, address, nbytes, keep, free

    def __del__(self) -> None:
        if self._free is not None:  # work that uses it was put on a stream before now, so before its last event
            self.device.retired.add(self.device.last.values(), self._free)
