"""Device memory and pinned host memory, released once the work that uses it is over."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from hal_sim.accelerator import Accelerator
from hal_sim.ordering import SimEvent, SimStream

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Free = Callable[[], None]


class Limbo:
    """What nobody holds any more, but work that is under way may still use. Filled from finalizers of any thread."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[list[SimEvent], Free]] = deque()
        self._process = os.getpid()

    def release(self, events: Iterable[SimEvent], free: Free) -> None:
        """Call ``free`` when all events have passed: now, or at a later :meth:`reap`."""
        if self._process != os.getpid():
            return  # the child of a fork: memory and streams are the parent's
        pending = [event for event in events if not event.done()]
        if pending:
            self._waiting.append((pending, free))
        else:
            free()

    def reap(self) -> None:
        """Release what is over by now; nothing is waited for."""
        for _ in range(len(self._waiting)):
            try:
                events, free = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return
            self.release(events, free)


class SimMemory:
    """Device memory at ``address``. It goes back when nobody holds it and the work that was given it is over.

    ``keep`` is the owner of a tensor's memory, which is kept alive as long.
    """

    __slots__ = ("__weakref__", "_free", "_limbo", "_tables", "_uses", "accelerator", "address", "device", "nbytes")

    def __init__(
        self, device: object, accelerator: Accelerator, limbo: Limbo, address: int, nbytes: int, free: Free
    ) -> None:
        self.device, self.accelerator, self.address, self.nbytes = device, accelerator, address, nbytes
        self._limbo, self._free = limbo, free
        self._uses: dict[int, SimEvent] = {}
        self._tables: dict[int, tuple[object, PinnedBlock]] = {}

    @classmethod
    def allocate(cls, device: object, accelerator: Accelerator, limbo: Limbo, nbytes: int) -> SimMemory:
        """A new block, on a page boundary and filled with poison."""
        limbo.reap()
        address = accelerator.allocate(nbytes)
        return cls(device, accelerator, limbo, address, nbytes, partial(accelerator.free, address))

    @classmethod
    def at(
        cls, device: object, accelerator: Accelerator, limbo: Limbo, address: int, nbytes: int, keep: object
    ) -> SimMemory:
        """The memory of somebody else's object."""
        return cls(device, accelerator, limbo, address, nbytes, partial(_let_go, keep))

    @property
    def end(self) -> int:
        """The first address after the block."""
        return self.address + self.nbytes

    def used(self, stream: SimStream, event: SimEvent) -> None:
        """Work on ``stream`` uses this memory up to ``event``."""
        self._uses[stream.handle] = event

    def table(self, spread: np.ndarray[Any, Any]) -> int:
        """The address of a spread table of this memory's plans: pinned memory, written once, read by kernels."""
        found = self._tables.get(id(spread))
        if found is None:
            data = np.ascontiguousarray(spread).view(np.uint8).reshape(-1)
            block = PinnedBlock(self.accelerator, self._limbo, data.nbytes, mirrored=False)
            self.accelerator.host_write(block.address, data.nbytes)
            block.buffer[...] = data
            found = self._tables[id(spread)] = (spread, block)
        return found[1].address

    def __del__(self) -> None:
        tables = [block.free for _, block in self._tables.values()]
        self._limbo.release(self._uses.values(), partial(_call_all, [self._free, *tables]))


class PinnedBlock:
    """Host memory that copies read and write when they run; ``mirror`` is device memory of the same size, or 0."""

    __slots__ = ("_accelerator", "_limbo", "_pinned", "address", "buffer", "mirror", "nbytes")

    def __init__(self, accelerator: Accelerator, limbo: Limbo, nbytes: int, *, mirrored: bool) -> None:
        limbo.reap()
        self._accelerator, self._limbo, self.nbytes = accelerator, limbo, nbytes
        self._pinned = accelerator.pinned(nbytes)
        self.address, self.buffer = self._pinned.address, self._pinned.array
        self.mirror = 0
        if mirrored:
            try:
                self.mirror = accelerator.allocate(nbytes)
            except BaseException:
                self._pinned.close()
                raise

    def release(self) -> None:
        """Give both back; the caller has waited for whatever used them."""
        self._limbo.release((), self.free)

    def free(self) -> None:
        """Give both back now. Calling it again does nothing."""
        mirror, self.mirror = self.mirror, 0
        self._pinned.close()
        if mirror:
            self._accelerator.free(mirror)


def _call_all(calls: list[Free]) -> None:
    for call in calls:
        call()


def _let_go(keep: object) -> None:
    """Nothing to do: this call held the owner, and is over."""
