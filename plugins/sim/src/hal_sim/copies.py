"""Copies out: on a stream of their own, into pinned memory, with the compute stream left alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hal_core.layout import ByteRange
from hal_core.transfers import CopyTicket

from hal_sim.accelerator import Accelerator
from hal_sim.memory import Limbo, PinnedBlock, SimMemory
from hal_sim.ordering import SimEvent, SimStream, SimTicket

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
KEPT = 8
"""Pinned blocks of one size kept for later copies; a worker has a few copies under way at once."""


class OutputBlocks:
    """Pinned blocks for copies out, by size; one is used again when its arrays are gone and its copy is over."""

    def __init__(self, accelerator: Accelerator, limbo: Limbo) -> None:
        self.accelerator, self.limbo = accelerator, limbo
        self._free: dict[int, list[PinnedBlock]] = {}
        self._closed = False

    def take(self, nbytes: int) -> PinnedBlock:
        """A block of at least ``nbytes``, of a power-of-two size."""
        self.limbo.reap()
        size = max(4096, 1 << (max(nbytes, 1) - 1).bit_length())
        free = self._free.setdefault(size, [])
        return free.pop() if free else PinnedBlock(self.accelerator, self.limbo, size, mirrored=False)

    def give(self, block: PinnedBlock) -> None:
        """Keep a block for later, or free it when enough are kept."""
        self.accelerator.host_read(block.address, block.nbytes)  # whoever had its arrays may have read them until now
        free = self._free.setdefault(block.nbytes, [])
        if self._closed or len(free) >= KEPT:
            block.free()
        else:
            free.append(block)

    def close(self) -> None:
        """Free every block that is kept, and later those that come back."""
        self._closed = True
        for free in self._free.values():
            while free:
                free.pop().free()


class Lease:
    """Holds a pinned block; it goes back when the last array over it is gone and the copy has ended."""

    def __init__(self, blocks: OutputBlocks, block: PinnedBlock) -> None:
        self.blocks, self.block = blocks, block
        self.event: SimEvent | None = None
        self.__array_interface__ = {
            "shape": (block.nbytes,), "typestr": "|u1", "data": (block.address, False), "version": 3
        }  # fmt: skip

    def array(self) -> Bytes:
        """The block as uint8; the array holds the lease."""
        return np.asarray(self)

    def __del__(self) -> None:
        blocks, block = self.blocks, self.block
        blocks.limbo.release(() if self.event is None else (self.event,), lambda: blocks.give(block))


class SimCopy(SimTicket, CopyTicket):
    """A copy under way. The arrays of ``data`` lie in its pinned block, which they keep alive."""

    __slots__ = ("_data", "_lease", "_told")

    def __init__(self, event: SimEvent, lease: Lease, parts: Sequence[tuple[int, int]]) -> None:
        super().__init__(event)
        self._lease, self._told = lease, False
        whole = lease.array()
        self._data = [whole[begin : begin + nbytes] for begin, nbytes in parts]

    @property
    def data(self) -> Sequence[Bytes]:
        return self._data

    def done(self) -> bool:
        return super().done() and self._readable()

    def _block(self, timeout: float | None) -> bool:
        return super()._block(timeout) and self._readable()

    def _readable(self) -> bool:
        """Tell the checker, once, that the host may read from now on."""
        if not self._told:
            self._told = True
            self._lease.blocks.accelerator.host_read(self._lease.block.address, self._lease.block.nbytes)
        return True


class PendingReads:
    """Copies out under way: whoever writes what they read lets its stream wait for them first."""

    def __init__(self) -> None:
        self._reads: list[tuple[int, int, SimEvent]] = []

    def add(self, memory: SimMemory, parts: Sequence[ByteRange], event: SimEvent) -> None:
        """Remember that the copy up to ``event`` reads these parts."""
        begin, end = min(part.offset for part in parts), max(part.end for part in parts)
        self._reads.append((memory.address + begin, memory.address + end, event))

    def order(self, memory: SimMemory | None, stream: SimStream) -> None:
        """Let ``stream`` wait for copies that still read from ``memory`` (None: any memory)."""
        left = []
        for begin, end, event in self._reads:
            if event.done():
                continue
            left.append((begin, end, event))
            if memory is None or (begin < memory.end and memory.address < end):
                stream.wait(event)
        self._reads = left
