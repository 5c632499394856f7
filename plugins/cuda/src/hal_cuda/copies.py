"""Copies out: on a stream of their own, into pinned memory, with the compute stream left alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from hal_core.layout import ByteRange
from hal_core.tickets import Mode
from hal_core.transfers import CopyTicket

from .driver import Driver
from .memory import CudaMemory, PinnedBlock
from .streams import CudaEvent, CudaStream, CudaTicket

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
KEPT = 16
"""Pinned blocks of one size kept for later copies; a worker has a few copies under way at once."""


class OutputBlocks:
    """Pinned blocks for copies out, by size; a block is used again once its ticket is gone and its copy has ended."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: dict[int, list[PinnedBlock]] = {}
        self._ending: deque[tuple[CudaEvent, PinnedBlock]] = deque()

    def take(self, nbytes: int) -> PinnedBlock:
        """A block of at least ``nbytes``, of a power-of-two size."""
        while self._ending and self._ending[0][0].done():
            self.give(self._ending.popleft()[1])
        size = max(4096, 1 << (max(nbytes, 1) - 1).bit_length())
        free = self._free.setdefault(size, [])
        return free.pop() if free else PinnedBlock(self._driver, size, mirrored=False)

    def give(self, block: PinnedBlock) -> None:
        """Keep a block for later, or release it when enough are kept."""
        free = self._free.setdefault(block.nbytes, [])
        if len(free) < KEPT:
            free.append(block)
        else:
            block.release()

    def give_after(self, event: CudaEvent, block: PinnedBlock) -> None:
        """Keep a block whose copy may still be under way, for when it has ended. Never waits; from any thread."""
        self._ending.append((event, block))

    def close(self) -> None:
        """Release every block that is kept; one whose copy does not end is lost rather than used again."""
        while self._ending:
            event, block = self._ending.popleft()
            if event.wait(60.0):
                block.release()
        for free in self._free.values():
            while free:
                free.pop().release()


class CudaCopy(CudaTicket, CopyTicket):
    """A copy under way. The arrays of ``data`` lie in its pinned block, which they keep alive."""

    __slots__ = ("_data", "_lease", "_parts")
    mode: Mode = "async"

    def __init__(self, event: CudaEvent, lease: Lease, parts: Sequence[tuple[int, int]]) -> None:
        super().__init__(event)
        self._lease, self._parts = lease, parts
        self._data: list[Bytes] | None = None

    @property
    def data(self) -> Sequence[Bytes]:
        if self._data is None:  # made by whoever reads, not by the step
            whole = self._lease.array()
            self._data = [whole[begin : begin + nbytes] for begin, nbytes in self._parts]
        return self._data


class Lease:
    """Holds a pinned block; it goes back when the last array over it is gone. A ticket may be dropped at any time."""

    def __init__(self, blocks: OutputBlocks, block: PinnedBlock) -> None:
        self.blocks, self.block = blocks, block
        self.event: CudaEvent | None = None

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"shape": (self.block.nbytes,), "typestr": "|u1", "data": (self.block.address, False), "version": 3}

    def array(self) -> Bytes:
        """The block as uint8; the array holds the lease."""
        return np.asarray(self)

    def __del__(self) -> None:
        if self.event is None:
            self.blocks.give(self.block)
        else:
            self.blocks.give_after(self.event, self.block)


class PendingReads:
    """Copies out under way: whoever writes what they read lets its stream wait for them first."""

    def __init__(self) -> None:
        self.under_way: list[tuple[CudaMemory, int, int, CudaEvent]] = []

    def add(self, memory: CudaMemory, parts: Sequence[ByteRange], event: CudaEvent) -> None:
        """Remember that the copy up to ``event`` reads these parts."""
        if len(parts) == 1:
            begin, end = parts[0].offset, parts[0].end
        else:
            begin, end = min([part.offset for part in parts]), max([part.end for part in parts])
        self.under_way.append((memory, begin, end, event))

    def order(self, memory: object, stream: CudaStream) -> None:
        """Let ``stream`` wait for copies that still read ``memory`` (None: any memory)."""
        left = []
        for read in self.under_way:
            if read[3].done():
                continue
            left.append(read)
            if memory is None or read[0] is memory:
                stream.wait(read[3])
        self.under_way = left
