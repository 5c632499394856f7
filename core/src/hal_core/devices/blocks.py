"""Host memory that copies read and write when they run: blocks of the staging ring and of copies out."""

from __future__ import annotations

import ctypes
import os
from collections import deque

import numpy as np

from ..errors import InvalidValue
from ..memory.copies import Bytes
from .events import RecordedEvent
from .primitives import Primitives, StreamPrimitives
from .staging import ALIGNMENT

KEPT = 16
"""Blocks of one size kept for later copies; a worker has a few copies in flight at once."""
KEPT_BYTES = 32 << 20
"""Limit on all kept blocks together; after a burst the rest is released once its copies are done."""


class HostBlock:
    """Host memory, page-locked if the runtime supports it, else pageable. ``buffer`` is its bytes (uint8)."""

    __slots__ = ("_locked", "_primitives", "address", "buffer", "nbytes")

    def __init__(self, primitives: StreamPrimitives, nbytes: int) -> None:
        if nbytes < 1:
            raise InvalidValue(f"{nbytes} bytes of host memory", cure="give at least 1", argument="nbytes")
        self._primitives, self.nbytes = primitives, nbytes
        address = primitives.allocate_host(nbytes)
        self._locked = address is not None
        self.buffer: Bytes
        if address is None:
            raw = np.empty(nbytes + ALIGNMENT, np.uint8)
            self.address = -(-raw.ctypes.data // ALIGNMENT) * ALIGNMENT
            self.buffer = raw[self.address - raw.ctypes.data :][:nbytes]
        else:
            self.address = address
            self.buffer = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def release(self) -> None:
        """Release the memory. Idempotent."""
        if self._locked:
            self._locked = False
            self._primitives.free_host(self.address)


class MirroredBlock(HostBlock):
    """A host block with device memory of the same size at ``mirror``, for uploads that a kernel reads."""

    __slots__ = ("_unfreed", "mirror")

    def __init__(self, primitives: Primitives, nbytes: int) -> None:
        super().__init__(primitives, nbytes)
        self._unfreed: Primitives | None = None  # those that free the mirror, until then
        try:
            self.mirror = primitives.allocate(nbytes)
        except BaseException:
            self.release()
            raise
        self._unfreed = primitives

    def release(self) -> None:
        """Release host and device memory. Idempotent."""
        super().release()
        primitives, self._unfreed = self._unfreed, None
        if primitives is not None:
            primitives.free(self.mirror)


_sizes: dict[int, int] = {}
"""Requested size to block size in bytes, for a limited number of sizes that recur."""


def _size_of(nbytes: int) -> int:
    size = max(4096, 1 << (max(nbytes, 1) - 1).bit_length())
    if len(_sizes) < 64:
        _sizes[nbytes] = size
    return size


class HostBlocks:
    """Blocks for copies out, by size; a block is reused when its arrays are gone and its copy is done."""

    def __init__(self, primitives: StreamPrimitives) -> None:
        self._primitives = primitives
        self._free: dict[int, list[HostBlock]] = {}
        self.kept = 0  # bytes
        self._ending: deque[tuple[RecordedEvent | None, HostBlock]] = deque()
        self._process = os.getpid()
        self._closed = False

    def take(self, nbytes: int) -> HostBlock:
        """Return a block of at least ``nbytes``, of a power-of-two size."""
        ending = self._ending
        while ending and ((event := ending[0][0]) is None or event.passed or event.done()):
            self.give(ending.popleft()[1])
        size = _sizes.get(nbytes) or _size_of(nbytes)
        free = self._free.get(size)
        if not free:
            return HostBlock(self._primitives, size)
        self.kept -= size
        return free.pop()

    def reserve(self, nbytes: int, count: int) -> None:
        """Allocate so many blocks of at least ``nbytes`` before they are needed."""
        for block in [self.take(nbytes) for _ in range(count)]:
            self.give(block)

    def give(self, block: HostBlock) -> None:
        """Keep a block for later, or release it if enough are kept."""
        self._primitives.host_read(block.address, block.nbytes)  # holders of its arrays may have read them until now
        free = self._free.get(block.nbytes)
        if free is None:
            free = self._free.setdefault(block.nbytes, [])
        if self._closed or len(free) >= KEPT or self.kept + block.nbytes > KEPT_BYTES:
            block.release()
        else:
            self.kept += block.nbytes
            free.append(block)

    def give_after(self, event: RecordedEvent | None, block: HostBlock) -> None:
        """Keep a block whose copy may be in flight until it has ended. Makes no calls; from any thread."""
        if not self._closed:
            self._ending.append((event, block))
        elif self._process == os.getpid() and (event is None or event.passed):  # all work was done then
            self.give(block)

    def close(self, deadline: float) -> None:
        """Release kept blocks and blocks whose copy ends in time; a later one is leaked rather than reused.

        A block with arrays over it is released with them.
        """
        self._closed = True
        while self._ending:
            event, block = self._ending.popleft()
            if event is None or event.wait(deadline):
                self.give(block)
        for free in self._free.values():
            while free:
                free.pop().release()


class Lease:
    """Holds a block until the last array over it is deleted, even if the ticket is dropped earlier."""

    __slots__ = ("block", "blocks", "event")

    def __init__(self, blocks: HostBlocks, block: HostBlock) -> None:
        self.blocks, self.block = blocks, block
        self.event: RecordedEvent | None = None

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"shape": (self.block.nbytes,), "typestr": "|u1", "data": (self.block.address, False), "version": 3}

    def array(self) -> Bytes:
        """Return the block as uint8; the array holds the lease."""
        return np.asarray(self)

    def __del__(self) -> None:
        self.blocks.give_after(self.event, self.block)
