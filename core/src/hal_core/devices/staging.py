"""A fenced ring of staging memory, from which an asynchronous device uploads.

A span is reused only after the event of its last use has passed. A deep ring alone is not safe: five such bugs were
found in other runners. The ring starts small, grows in steps up to a limit, then waits only for its oldest entry, and
shrinks again after a burst.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from ..errors import InvalidValue, OutOfMemory
from ..memory.copies import Bytes

if TYPE_CHECKING:
    from ..streams import Event
    from .ring_options import RingOptions

ALIGNMENT = 256
"""Bytes; every span begins on such a boundary, which suits vector loads of any device."""
THINNED = 64
"""Entries that are checked together once twice as many have accumulated."""
CALM = 1024
"""After so many spans of at most half of the first segment, the ring releases the memory it grew by."""


class Block(Protocol):
    """One allocation of staging memory: ``buffer`` is its host bytes, ``address`` the host address."""

    @property
    def buffer(self) -> Bytes: ...

    @property
    def address(self) -> int: ...

    def release(self) -> None:
        """Release the memory. Idempotent."""


@dataclass(frozen=True, slots=True)
class Span:
    """``nbytes`` of a segment from ``begin``: write ``buffer``, upload from ``address``, then ``ring.fence(span)``."""

    segment: Segment
    begin: int
    nbytes: int

    @property
    def buffer(self) -> Bytes:
        """The span's host bytes."""
        return self.segment.block.buffer[self.begin : self.begin + self.nbytes]

    @property
    def address(self) -> int:
        """The span's host address."""
        return self.segment.block.address + self.begin


class Segment:
    """One block used as a byte ring. ``entries`` are spans under a fence, oldest first."""

    __slots__ = ("block", "entries", "head", "size")

    def __init__(self, block: Block) -> None:
        self.block, self.size = block, len(block.buffer)
        self.head = 0
        self.entries: deque[tuple[int, int, Event]] = deque()

    def place(self, nbytes: int) -> int | None:
        """Return where ``nbytes`` fit now, or None. Spans are taken in order, so the free bytes are head to oldest."""
        if not self.entries:
            self.head = 0
            return 0 if nbytes <= self.size else None
        oldest = self.entries[0][0]
        if self.head > oldest:
            if self.head + nbytes <= self.size:
                return self.head
            return 0 if nbytes <= oldest else None
        return self.head if self.head + nbytes <= oldest and self.head != oldest else None

    def retire(self) -> None:
        """Forget the entries whose event has passed."""
        while self.entries and self.entries[0][2].done():
            self.entries.popleft()

    def thin(self) -> None:
        """Forget the oldest entries when the last of them has passed, so that fences do not pile up.

        One query suffices if the events have the same ``stream_key``, as a stream's work is executed in order.
        """
        oldest = [event for _, _, event in islice(self.entries, THINNED)]
        stream_keys = {getattr(event, "stream_key", None) for event in oldest}
        if len(stream_keys) != 1 or None in stream_keys:
            self.retire()
        elif oldest[-1].done():
            for _ in oldest:
                self.entries.popleft()


class StagingRing:
    """The ring. Used from one thread.

    - ``allocate(nbytes)`` returns a :class:`Block`, or raises :class:`OutOfMemory`.
    - ``start`` and ``limit``: bytes held at first, and at most; ``deadline``: seconds to wait for a full ring before
      :class:`OutOfMemory`. ``options`` give all three.
    - ``waits`` counts waits for the oldest entry (G3).
    """

    def __init__(self, allocate: Callable[[int], Block], options: RingOptions) -> None:
        self._allocate, self.deadline = allocate, options.deadline
        self.start, self.limit = options.ring_start, options.ring_limit
        self._segment = Segment(allocate(self.start))
        self._draining: list[Segment] = []
        self._taken: Span | None = None
        self._calm = 0
        self.waits = 0

    @property
    def held(self) -> int:
        """Bytes of staging memory held now."""
        return self._segment.size + sum(segment.size for segment in self._draining)

    def take(self, nbytes: int) -> Span:
        """Return a span of ``nbytes``; it must be fenced, or dropped, before the next is taken.

        Raises :class:`OutOfMemory` when the ring stays full for ``deadline`` seconds, with no span taken, and
        :class:`InvalidValue` for more than ``limit``: such a value is uploaded in pieces.
        """
        if self._taken is not None:
            raise InvalidValue("the previous span has no fence", cure="fence() or drop() it", argument="ring")
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        if size > self.limit:
            raise InvalidValue(
                f"{nbytes} bytes do not fit a ring of at most {self.limit}", cure="send them in pieces", argument="ring"
            )
        at = self._segment.place(size)
        if at is None:
            self._segment.retire()
            at = self._segment.place(size)
        if at is None:
            at = self._make_room(size)
        elif self._draining or self._segment.size > self.start:
            at = self._settle(size, at)
        self._taken = Span(self._segment, at, nbytes)
        return self._taken

    def fence(self, span: Span, event: Event) -> None:
        """Guard the span: it is reused only after ``event``."""
        size = -(-max(span.nbytes, 1) // ALIGNMENT) * ALIGNMENT
        span.segment.entries.append((span.begin, span.begin + size, event))
        span.segment.head = span.begin + size
        if len(span.segment.entries) >= 2 * THINNED:
            span.segment.thin()
        self._taken = None

    def drop(self, span: Span) -> None:
        """Return a span that no device work reads."""
        del span
        self._taken = None

    def close(self) -> None:
        """Wait for every fence, then release the memory."""
        for segment in (*self._draining, self._segment):
            for _, _, event in segment.entries:
                event.wait(self.deadline)
            segment.entries.clear()
            segment.block.release()
        self._draining.clear()

    def _make_room(self, size: int) -> int:
        """Grow if the limit allows it, else wait for the oldest entries."""
        self._release_drained()
        wanted = max(self._segment.size * 2, ALIGNMENT)
        while wanted < size:
            wanted *= 2
        wanted = min(wanted, self.limit - self.held)
        if wanted >= max(size, self._segment.size):
            grown = Segment(self._allocate(wanted))
            self._draining.append(self._segment)
            self._segment = grown
            return 0
        return self._wait_for_room(size)

    def _wait_for_room(self, size: int) -> int:
        segment = self._segment
        while True:
            at = segment.place(size)
            if at is not None:
                return at
            if not segment.entries:  # too small even when empty: the draining segments hold the rest of the limit
                return self._replace(size)
            self._await(segment)

    def _replace(self, size: int) -> int:
        """Release everything and allocate a segment that fits, as the current one is empty and too small."""
        for segment in self._draining:
            while segment.entries:
                self._await(segment)
        self._release_drained()
        wanted = max(size, min(self.limit, self._segment.size * 2))
        self._segment.block.release()
        self._segment.size = 0  # nothing is placed in it again, also if this allocation fails
        self._segment = Segment(self._allocate(wanted))
        return 0

    def _await(self, segment: Segment) -> None:
        self.waits += 1
        if not segment.entries[0][2].wait(self.deadline):
            raise OutOfMemory(
                f"the staging ring of {self.held} bytes stayed full for {self.deadline} s",
                cure="the device has stopped, or its stream is held; raise the ring's limit or find out why it is held",
                argument="ring",
            )
        segment.retire()

    def _release_drained(self) -> None:
        left = []
        for segment in self._draining:
            segment.retire()
            if segment.entries:
                left.append(segment)
            else:
                segment.block.release()
        self._draining = left

    def _settle(self, size: int, at: int) -> int:
        """Release drained segments; after a calm period return to a segment of the first size. Return the span's
        place."""
        if self._draining:
            self._release_drained()
        self._calm = self._calm + 1 if size <= self.start // 2 else 0
        if self._calm < CALM or self._segment.size <= self.start:
            return at
        self._calm = 0
        big = self._segment
        big.retire()
        in_flight = sum(end - begin for begin, end, _ in big.entries)
        if in_flight > self.start // 2 or self.held + self.start > self.limit:
            return at
        self._segment = Segment(self._allocate(self.start))
        self._draining.append(big)
        self._release_drained()
        return 0
