"""Admitted requests on their way to the GPU: their bytes are put into pinned memory at admission, before any insertion.

What an insertion has to move of a request is known when it is admitted: its record and rows. They are put one after
the other into chunks of pinned memory, each with device memory of the same size beside it. An insertion puts its own
entries (hal_cuda.entering) after them, uploads what the chunk has gained since the last one in one copy, whichever
requests it is about, and its kernel reads all of it there. A request that is not here (no room, or admitted without the
state) is inserted by the general way, from its own bytes: nothing depends on being staged but time.

A request's bytes: five int32 lengths of its rows (elements, in the order of ``ROW_FIELDS``) in 32 bytes, then
its record, then its rows without the block table; record and rows each begin on a 16-byte boundary.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from struct import Struct
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.fields import ROW_FIELDS

from .memory import PinnedBlock
from .streams import CudaEvent, CudaStream

if TYPE_CHECKING:
    from hal_core.requests import AdmittedRequest

Int64s = np.ndarray[Any, np.dtype[np.int64]]
HEAD = Struct("<5i12x")
"""The lengths that begin a request's bytes; ``HEAD`` of kernels/enter.cu."""
CHUNK = 4 << 20
"""Bytes of a chunk, unless one request needs more."""
PLACES = 1 << 14
"""Requests that can be staged and not yet inserted; a power of two."""
SPARE = 1
"""Chunks kept for later besides the one being filled; what a burst took beyond is given back."""
_numbers = itertools.count(1)  # of one process, so that a device never takes another's number for its own
BLOCKS = ROW_FIELDS.index("block_tables")


def _up16(nbytes: int) -> int:
    return (nbytes + 15) & ~15


class Chunk:
    """Pinned memory that is filled from the front, and how far it was uploaded.

    ``fences``: by stream, the last work that read it. ``arrival``: the end of the last upload, and ``ordered``: the
    streams that wait for it already.
    """

    def __init__(self, block: PinnedBlock, nbytes: int) -> None:
        self.block, self.nbytes = block, nbytes
        self.fences: dict[int, CudaEvent] = {}
        self.clear()

    def clear(self) -> None:
        """Empty it."""
        self.used = self.uploaded = 0
        self.fences.clear()
        self.arrival: CudaEvent | None = None
        self.ordered: set[int] = set()

    def order(self, stream: CudaStream) -> None:
        """Let a stream wait for what was uploaded, which may have been for a batch on another."""
        if self.arrival is not None and stream.handle not in self.ordered:
            stream.wait(self.arrival)
            self.ordered.add(stream.handle)

    @property
    def passed(self) -> bool:
        """True when nothing on the GPU reads it any more."""
        return all(event.done() for event in self.fences.values())


class Staged:
    """Held by an admitted request: when both are gone without an insertion, the request's place is free again."""

    __slots__ = ("_dropped", "_number")

    def __init__(self, number: int, dropped: deque[int]) -> None:
        self._number, self._dropped = number, dropped

    def __del__(self) -> None:
        self._dropped.append(self._number)


class Admissions:
    """The chunks of one device. ``put`` from any thread; the rest from the device's, with ``lock`` held.

    - ``allocate(nbytes)`` gives a pinned block with a mirror; ``entered()`` makes the device's context current, for
      threads that are not the device's.
    - ``limit``: bytes of pinned memory at most; 0 turns staging off.
    """

    def __init__(
        self,
        allocate: Callable[[int], PinnedBlock],
        entered: Callable[[], AbstractContextManager[None]],
        *,
        limit: int,
    ) -> None:
        self._allocate, self._entered, self.limit = allocate, entered, limit
        self.lock = Lock()
        self.chunks: list[Chunk] = []
        self._filling: Chunk | None = None
        self._dropped: deque[int] = deque()
        # By a request's number modulo PLACES: its number, its address on the device, its chunk's place in ``chunks``,
        # and 1 while it waits for its insertion. One table, so that an insertion looks once.
        self._table = np.full((PLACES, 4), -1, np.int64)
        self._number, self._address, self._chunk, self._waits = self._table.T
        self._waits[:] = 0

    @property
    def held(self) -> int:
        """Bytes of pinned memory held now."""
        return sum([chunk.nbytes for chunk in self.chunks])

    # -- at admission -------------------------------------------------------------------------------------------

    def put(self, request: AdmittedRequest, record: bytes) -> None:
        """Put a request's bytes into a chunk, ``record`` among them; where there is no room, do nothing."""
        rows = [row for at, row in enumerate(request.rows) if at != BLOCKS]
        begins = list(itertools.accumulate([HEAD.size, len(record), *map(len, rows)], lambda at, n: _up16(at + n)))
        nbytes = begins.pop()
        with self.lock:
            number = next(_numbers)
            place = number % PLACES
            if self._waits[place] and not self._forget(place):
                return
            found = self.room(nbytes)
            if found is None:
                return
            chunk, at = found
            buffer = chunk.block.buffer.data
            HEAD.pack_into(buffer, at, *request.extents)
            for begin, piece in zip(begins, (record, *rows), strict=True):
                buffer[at + begin : at + begin + len(piece)] = piece
            self._table[place] = number, chunk.block.mirror + at, self.chunks.index(chunk), 1
        request.stage(number, Staged(number, self._dropped))

    def room(self, nbytes: int) -> tuple[Chunk, int] | None:
        """Take ``nbytes`` of the chunk that is being filled, or of another; None without room. Under ``lock``.

        Where they begin is a multiple of 16. They are uploaded with the next insertion.
        """
        chunk = self._filling
        if chunk is None or chunk.used + nbytes > chunk.nbytes:
            chunk = self._next(nbytes)
            if chunk is None:
                return None
        at = chunk.used
        chunk.used = at + _up16(nbytes)
        return chunk, at

    def _next(self, nbytes: int) -> Chunk | None:
        """Go on with another chunk: an idle one, else a new one, else none."""
        if self.limit < nbytes:
            return None
        with self._entered():
            self._forget_dropped()
            idle = [at for at, chunk in enumerate(self.chunks) if self._idle(at, chunk)]
            fitting = [at for at in idle if self.chunks[at].nbytes >= nbytes]
            if not fitting:
                self._give_back(idle, max(0, self.held + max(CHUNK, nbytes) - self.limit))
                if self.held + max(CHUNK, nbytes) > self.limit:
                    self._filling = None
                    return None
                size = max(CHUNK, nbytes)
                self._filling = Chunk(self._allocate(size), size)
                self.chunks.append(self._filling)
                return self._filling
            chosen = self.chunks[fitting[0]]
            self._empty(fitting[0])
            self._filling = chosen
            others = [at for at in idle if at != fitting[0]]
            self._give_back(others[SPARE:], self.limit)
            return chosen

    def _idle(self, at: int, chunk: Chunk) -> bool:
        return not self._waits[self._chunk == at].any() and chunk.passed

    def _empty(self, at: int) -> None:
        self.chunks[at].clear()
        self._table[self._chunk == at] = -1, -1, -1, 0

    def _give_back(self, idle: list[int], wanted: int) -> None:
        """Release idle chunks, the last first, until ``wanted`` bytes are free."""
        for at in sorted(idle, reverse=True):
            if wanted <= 0:
                return
            self._empty(at)
            chunk = self.chunks.pop(at)
            self._chunk[self._chunk > at] -= 1
            wanted -= chunk.nbytes
            chunk.block.release()

    def _forget_dropped(self) -> None:
        """Requests that are gone without having been inserted wait no longer."""
        while self._dropped:
            number = self._dropped.popleft()
            if self._number[number % PLACES] == number:
                self._waits[number % PLACES] = 0

    def _forget(self, place: int) -> bool:
        self._forget_dropped()
        return not self._waits[place]

    # -- at insertion -------------------------------------------------------------------------------------------

    def find(self, numbers: Int64s) -> Int64s | None:
        """Where the requests of these numbers lie in device memory; None unless all of them are here."""
        places = numbers & (PLACES - 1)
        rows = self._table[places]
        if (rows[:, 0] != numbers).any():
            return None
        self._waits[places] = 0
        addresses: Int64s = rows[:, 1]
        return addresses

    def find_few(self, numbers: list[int]) -> list[int] | None:
        """The same for a few requests, in plain Python."""
        rows = [self._table[number & (PLACES - 1)].tolist() for number in numbers]
        if [row[0] for row in rows] != numbers:
            return None
        for number in numbers:
            self._waits[number & (PLACES - 1)] = 0
        return [row[1] for row in rows]

    def close(self) -> None:
        """Release every chunk whose work is over; one whose work does not end is lost rather than used again."""
        with self.lock:
            self.limit, self._filling = 0, None
            self._number[:] = -1
            for chunk in self.chunks:
                if all(event.wait(60.0) for event in chunk.fences.values()):
                    chunk.block.release()
            self.chunks.clear()
