"""Staging of admitted requests: their bytes are copied into pinned memory before any insertion.

At admission a request's record and rows are known. They are appended to chunks of pinned memory; each chunk has device
memory of the same size beside it. An insertion appends its own entries (hal_cuda.insertion). Then it uploads everything
appended since the last upload in one copy, whichever requests that belongs to. Its kernel reads all of it there.

A request that is not staged (no room, or admitted without the state) is inserted from its own bytes on the general
path, which is slower but gives the same result. If a backlog leaves no room for the entries, the kernel reads them from
the device's ring. Only this module's table, by admission id, records which requests are staged. Whether one that waits
was dropped is looked up when its chunk, or its place, is needed.

A request's bytes: its record, then its rows without the block table, each aligned to 16 bytes. The entry holds the
lengths of the rows.
"""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import TIMEOUTS, OutOfMemory

from .structs import CHUNK_NUMBERS, PLACE

if TYPE_CHECKING:
    from hal_core import AdmittedRequest
    from hal_core.devices import AdmittedColumns, MirroredBlock, RecordedEvent

log = logging.getLogger("hal")
Int64s = np.ndarray[Any, np.dtype[np.int64]]
Rows = tuple[bytes | memoryview, ...]
CHUNK = 4 << 20
"""Bytes of a chunk, unless one request needs more."""
PLACES = 1 << 14
"""Most staged requests that wait for their insertion; a power of two."""
SPARE = 1
"""Idle chunks kept besides the one being filled; chunks beyond that, left by a burst, are released."""


def _up16(nbytes: int) -> int:
    return (nbytes + 15) & ~15


def _no_request() -> None:
    """As a weak reference to a request that was dropped."""


class Chunk:
    """Pinned memory filled from the front, with the position up to which it was uploaded.

    ``number``: its name in the table of requests. ``fences``: by stream, the last work that read or filled it.
    ``numbers``: host address, device address, ``nbytes``, ``used``, ``uploaded``; native code shares them as the struct
    ``Chunk`` of native/insertion.c.
    """

    def __init__(
        self,
        number: int,
        block: MirroredBlock,
        nbytes: int,
        stage: Callable[[int, bytes, Rows], int],
    ) -> None:
        self.number, self.block, self.nbytes = number, block, nbytes
        self.fences: dict[int, RecordedEvent] = {}
        self.numbers = array("Q", [block.address, block.mirror, nbytes, 0, 0])
        self.address = self.numbers.buffer_info()[0]
        self.put: Callable[[bytes, Rows], int] = partial(stage, self.address)
        assert len(self.numbers) == CHUNK_NUMBERS

    @property
    def used(self) -> int:
        """Bytes in use."""
        return self.numbers[3]

    @used.setter
    def used(self, nbytes: int) -> None:
        self.numbers[3] = nbytes

    @property
    def uploaded(self) -> int:
        """Bytes already uploaded."""
        return self.numbers[4]

    @uploaded.setter
    def uploaded(self, nbytes: int) -> None:
        self.numbers[4] = nbytes

    @property
    def passed(self) -> bool:
        """True once no work on the GPU reads the chunk."""
        return all(event.done() for event in self.fences.values())


class StagedRequests:
    """The chunks of one device. Call ``put`` from any thread, the rest from the device's thread with ``lock`` held.

    - ``allocate(nbytes)`` returns a pinned block with a mirror; ``entered()`` makes the device's context current, for
      other threads than the device's.
    - ``limit``: most bytes of pinned memory; 0 turns staging off.
    - ``table`` int64 ``[PLACES, PLACE]``, by a request's admission id modulo ``PLACES``: that id, its address on the
      device, the number of its chunk, and 1 while it waits for its insertion. One table, so that an insertion needs one
      look-up. Admission ids are unique in the process, so devices cannot confuse their requests.
    - ``stage``, ``stage_all``: native code for :meth:`Chunk.put` and for :meth:`put_all`; both take the address of a
      chunk's numbers.
    - ``listed``: for native code, addresses of chunks' numbers: of the chunk being filled, or 0, then of all chunks.
    """

    def __init__(
        self,
        allocate: Callable[[int], MirroredBlock],
        entered: Callable[[], AbstractContextManager[None]],
        *,
        limit: int,
        stage: Callable[[int, bytes, Rows], int],
        stage_all: Callable[..., int],
    ) -> None:
        self._allocate, self._entered, self.limit = allocate, entered, limit
        self._stage, self._stage_all = stage, stage_all
        self.lock = Lock()
        self.chunks: list[Chunk] = []
        self._filling: Chunk | None = None
        self._made = itertools.count()
        self._leaving: deque[Chunk] = deque()
        self._requests: list[Callable[[], AdmittedRequest | None]] = [_no_request] * PLACES  # weak references
        self.listed = array("Q", [0])
        self._process = os.getpid()
        self.table = np.full((PLACES, PLACE), -1, np.int64)
        self._ids, self._address, self._chunk, self._waits = self.table.T
        self._waits[:] = 0
        self._table_bytes = self.table.data.cast("B")
        self._numbers = self._table_bytes.cast("q")  # for one place: NumPy takes 0.7 us for a row

    @property
    def held(self) -> int:
        """Bytes of pinned memory held now."""
        return sum([chunk.nbytes for chunk in (*self.chunks, *self._leaving)])

    # -- at admission -------------------------------------------------------------------------------------------

    def put(self, request: AdmittedRequest, record: bytes) -> None:
        """Stage a request's bytes, ``record`` included; do nothing if there is no room."""
        if os.getpid() != self._process:  # a forked child does not own the pinned memory
            return
        admission_id, numbers = request.admission_id, self._numbers
        place = admission_id % PLACES
        at_place = place * PLACE
        with self.lock:
            free = not numbers[at_place + 3] or self._requests[place]() is None
            chunk = self._filling if free else None
            at = -1 if chunk is None else chunk.put(record, request.rows)
            if at < 0 and free:
                chunk = self._chunk_for(sum([_up16(len(piece)) for piece in (record, *request.rows)]))
                at = -1 if chunk is None else chunk.put(record, request.rows)
            if chunk is not None and at >= 0:
                numbers[at_place], numbers[at_place + 1] = admission_id, chunk.block.mirror + at
                numbers[at_place + 2], numbers[at_place + 3] = chunk.number, 1
                self._requests[place] = weakref.ref(request)
        self._release()

    def put_all(self, columns: AdmittedColumns) -> bool:
        """Stage requests that were admitted together; return False, with nothing done, if that cannot be."""
        if os.getpid() != self._process:
            return True  # as :meth:`put`
        kept = self._requests
        given = self._table_bytes, columns.packed, columns.lists, columns.ids, columns.width
        with self.lock:
            chunk = self._filling
            needed = self._stage_all(chunk.address if chunk else 0, chunk.number if chunk else 0, *given)
            if needed > 0:
                chunk = self._chunk_for(needed)
                needed = -1 if chunk is None else self._stage_all(chunk.address, chunk.number, *given)
            if not needed:
                refer = weakref.ref
                for one in columns.requests:
                    kept[one.admission_id % PLACES] = refer(one)
        self._release()
        return not needed

    def _release(self) -> None:
        """Free chunks that left, outside the lock, which an insertion needs: freeing waits for the device."""
        if self._leaving:
            with self._entered():
                while True:
                    try:
                        chunk = self._leaving.popleft()
                    except IndexError:  # another thread may have taken the last one
                        break
                    chunk.block.release()

    def _chunk_for(self, nbytes: int) -> Chunk | None:
        """Return the chunk to fill: the current one, another with room, an idle one, a new one; None if there is no
        room."""
        filling = self._filling
        if filling is not None and filling.used + nbytes <= filling.nbytes:
            return filling
        try:
            self._filling = self._other(nbytes)
        finally:
            self._list()
        return self._filling

    def _list(self) -> None:
        """Publish the chunks to native code."""
        numbers = [one.address for one in self.chunks]
        self.listed = array("Q", [0 if self._filling is None else self._filling.address, *numbers])

    def _other(self, nbytes: int) -> Chunk | None:
        """Return another chunk than the current one; None if there is no room."""
        self._filling = None
        for chunk in self.chunks:
            if chunk.used + nbytes <= chunk.nbytes:
                return chunk
        if nbytes > self.limit:
            return None
        with self._entered():
            idle = [chunk for chunk in self.chunks if self._idle(chunk)]
            chosen = next((chunk for chunk in idle if nbytes <= chunk.nbytes), None)
            if chosen is not None:
                self._empty(chosen)
                idle.remove(chosen)
                self._leave(idle[SPARE:])
            else:
                chosen = self._new(nbytes)
                if chosen is None:  # the idle chunks are too short, and occupy memory that a longer one needs
                    self._leave(idle)
        return chosen

    def _leave(self, chunks: list[Chunk]) -> None:
        """Empty idle chunks and queue them for release outside the lock."""
        for chunk in chunks:
            self._empty(chunk)
            self.chunks.remove(chunk)
            self._leaving.append(chunk)

    def _new(self, nbytes: int) -> Chunk | None:
        """Return a new chunk; None beyond the limit. If an allocation fails, the bytes held so far become the limit."""
        size = max(nbytes, min(CHUNK, self.limit))
        if self.held + size > self.limit:
            return None
        try:
            chunk = Chunk(next(self._made), self._allocate(size), size, self._stage)
        except OutOfMemory as error:
            self.limit = self.held
            log.warning("cuda: admitted requests are staged in %d bytes from now on: %s", self.limit, error)
            return None
        self.chunks.append(chunk)
        return chunk

    def _idle(self, chunk: Chunk) -> bool:
        waiting = np.flatnonzero((self._chunk == chunk.number) & (self._waits == 1)).tolist()
        return all(one() is None for one in map(self._requests.__getitem__, waiting)) and chunk.passed

    def _empty(self, chunk: Chunk) -> None:
        places = np.flatnonzero(self._chunk == chunk.number)
        self.table[places] = -1, -1, -1, 0
        for place in places.tolist():
            self._requests[place] = _no_request
        chunk.used = chunk.uploaded = 0
        chunk.fences.clear()

    # -- at insertion -------------------------------------------------------------------------------------------

    def inserted(self, admission_ids: Int64s) -> None:
        """Mark requests, staged or not, as inserted on the general path."""
        places = admission_ids & (PLACES - 1)
        here = places[self._ids[places] == admission_ids]
        self._waits[here] = 0

    def close(self, *, release: bool) -> None:
        """Stop staging. With ``release``, free the chunks whose work ends in time; the rest stay allocated."""
        with self.lock:
            self.limit, self._filling = 0, None
            self._ids[:] = -1
            chunks, self.chunks = self.chunks, []
            self._list()
        for chunk in chunks if release else ():
            if all(event.wait(TIMEOUTS.ring) for event in chunk.fences.values()):
                chunk.block.release()
