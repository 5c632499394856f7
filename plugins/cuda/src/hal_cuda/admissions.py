"""Admitted requests on their way to the GPU: their bytes are put into pinned memory at admission, before any insertion.

What an insertion has to move of a request is known when it is admitted: its record and rows. They are put one after
the other into chunks of pinned memory, each with device memory of the same size beside it. An insertion puts its own
entries (hal_cuda.insertion) after them, uploads what the chunk has gained since the last one in one copy, whichever
requests it is about, and its kernel reads all of it there. A request that is not here (no room, or admitted without the
state) is inserted by the general way, from its own bytes: nothing depends on being staged but time. Where a backlog has
left the entries no room, the kernel reads them from the device's ring. Which requests are here is this module's own
table, by their admission ids: no request knows of it.

A request's bytes: its record, then its rows without the block table, each of which begins on a 16-byte boundary. How
long the rows are is in the entry.
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
    from hal_core.devices import MirroredBlock, RecordedEvent

log = logging.getLogger("hal")
Int64s = np.ndarray[Any, np.dtype[np.int64]]
Rows = tuple[bytes | memoryview, ...]
CHUNK = 4 << 20
"""Bytes of a chunk, unless one request needs more."""
PLACES = 1 << 14
"""Requests that can be staged and not yet inserted; a power of two."""
SPARE = 1
"""Chunks kept for later besides the one being filled; what a burst took beyond is given back."""


def _up16(nbytes: int) -> int:
    return (nbytes + 15) & ~15


class Chunk:
    """Pinned memory that is filled from the front, and how far it was uploaded.

    ``number``: names it in the table of requests. ``fences``: by stream, the last work that read or filled it.
    ``numbers``: address on the host, address on the device, ``nbytes``, ``used``, ``uploaded``, where native code has
    them too: ``Chunk`` of native/entering.c.
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
        """Bytes that are taken."""
        return self.numbers[3]

    @used.setter
    def used(self, nbytes: int) -> None:
        self.numbers[3] = nbytes

    @property
    def uploaded(self) -> int:
        """Bytes of them that were uploaded."""
        return self.numbers[4]

    @uploaded.setter
    def uploaded(self, nbytes: int) -> None:
        self.numbers[4] = nbytes

    @property
    def passed(self) -> bool:
        """True when nothing on the GPU reads it any more."""
        return all(event.done() for event in self.fences.values())


class Admissions:
    """The chunks of one device. ``put`` from any thread; the rest from the device's, with ``lock`` held.

    - ``allocate(nbytes)`` gives a pinned block with a mirror; ``entered()`` makes the device's context current, for
      threads that are not the device's.
    - ``limit``: bytes of pinned memory at most; 0 turns staging off.
    - ``table`` int64 ``[PLACES, PLACE]``, by a request's admission id modulo ``PLACES``: that id, its address on the
      device, the number of its chunk, and 1 while it waits for its insertion. One table, so that an insertion looks
      once. An id names one request of this process, so no device takes another's for its own.
    - ``stage``: native code for :meth:`Chunk.put`, which takes the address of a chunk's numbers.
    - ``listed``: for native code the addresses of chunks' numbers: that of the one being filled, or 0, then of all.
    """

    def __init__(
        self,
        allocate: Callable[[int], MirroredBlock],
        entered: Callable[[], AbstractContextManager[None]],
        *,
        limit: int,
        stage: Callable[[int, bytes, Rows], int],
    ) -> None:
        self._allocate, self._entered, self.limit = allocate, entered, limit
        self._stage = stage
        self.lock = Lock()
        self.chunks: list[Chunk] = []
        self._filling: Chunk | None = None
        self._made = itertools.count()
        self._leaving: deque[Chunk] = deque()
        self._dropped: deque[int] = (
            deque()
        )  # admission ids of requests that are gone; filled by whichever thread lets go
        self._alive: dict[int, weakref.ref[AdmittedRequest]] = {}  # by admission id; what fills ``_dropped``
        self.listed = array("Q", [0])
        self._process = os.getpid()
        self.table = np.full((PLACES, PLACE), -1, np.int64)
        self._ids, self._address, self._chunk, self._waits = self.table.T
        self._waits[:] = 0

    @property
    def held(self) -> int:
        """Bytes of pinned memory held now."""
        return sum([chunk.nbytes for chunk in (*self.chunks, *self._leaving)])

    # -- at admission -------------------------------------------------------------------------------------------

    def put(self, request: AdmittedRequest, record: bytes) -> None:
        """Put a request's bytes into a chunk, ``record`` among them; where there is no room, do nothing."""
        if os.getpid() != self._process:  # a fork's child: the pinned memory is not its own
            return
        admission_id, place, dropped = request.admission_id, request.admission_id % PLACES, self._dropped
        with self.lock:
            if dropped:
                self._forget_dropped()
            free = not self._waits[place]
            chunk = self._filling if free else None
            at = -1 if chunk is None else chunk.put(record, request.rows)
            if at < 0 and free:
                chunk = self._chunk_for(sum([_up16(len(piece)) for piece in (record, *request.rows)]))
                at = -1 if chunk is None else chunk.put(record, request.rows)
            if chunk is not None and at >= 0:
                self.table[place] = admission_id, chunk.block.mirror + at, chunk.number, 1
                self._alive[admission_id] = weakref.ref(request, lambda _: dropped.append(admission_id))
        if self._leaving:  # freeing waits for the device, so not under the lock, which an insertion needs
            with self._entered():
                while self._leaving:
                    self._leaving.popleft().block.release()

    def _chunk_for(self, nbytes: int) -> Chunk | None:
        """The chunk to fill: the one that is being filled, another with room, an idle one, a new one; or none."""
        filling = self._filling
        if filling is not None and filling.used + nbytes <= filling.nbytes:
            return filling
        try:
            self._filling = self._other(nbytes)
        finally:
            self._list()
        return self._filling

    def _list(self) -> None:
        """Tell native code of the chunks."""
        numbers = [one.address for one in self.chunks]
        self.listed = array("Q", [0 if self._filling is None else self._filling.address, *numbers])

    def _other(self, nbytes: int) -> Chunk | None:
        """Another chunk than the one that was filled."""
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
                if chosen is None:  # what is idle is too short for this one, and holds what a longer one needs
                    self._leave(idle)
        return chosen

    def _leave(self, chunks: list[Chunk]) -> None:
        """Have idle chunks released once the lock is free."""
        for chunk in chunks:
            self._empty(chunk)
            self.chunks.remove(chunk)
            self._leaving.append(chunk)

    def _new(self, nbytes: int) -> Chunk | None:
        """A new chunk; None beyond the limit, and where the memory is not to be had, which is then the limit."""
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
        return not self._waits[self._chunk == chunk.number].any() and chunk.passed

    def _empty(self, chunk: Chunk) -> None:
        self.table[self._chunk == chunk.number] = -1, -1, -1, 0
        chunk.used = chunk.uploaded = 0
        chunk.fences.clear()

    def _forget_dropped(self) -> None:
        """Requests that are gone without having been inserted wait no longer."""
        while self._dropped:
            admission_id = self._dropped.popleft()
            del self._alive[admission_id]
            if self._ids[admission_id % PLACES] == admission_id:
                self._waits[admission_id % PLACES] = 0

    # -- at insertion -------------------------------------------------------------------------------------------

    def inserted(self, admission_ids: Int64s) -> None:
        """Requests of these ids, whether they are here or not, were inserted by the general way."""
        places = admission_ids & (PLACES - 1)
        here = places[self._ids[places] == admission_ids]
        self._waits[here] = 0

    def close(self, *, release: bool) -> None:
        """Stage nothing any more; with ``release``, give back the chunks whose work ends (others are lost)."""
        with self.lock:
            self.limit, self._filling = 0, None
            self._ids[:] = -1
            chunks, self.chunks = self.chunks, []
            self._list()
        for chunk in chunks if release else ():
            if all(event.wait(TIMEOUTS.device_end) for event in chunk.fences.values()):
                chunk.block.release()
