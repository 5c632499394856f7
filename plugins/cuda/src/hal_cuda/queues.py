"""Number of calls in flight on each stream, on the fallback; the native path has native/queue_depth.c."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

ROOM = 832
"""Copies and launches in flight on a stream until a caller waits with a deadline: ``ROOM`` of native/native.h."""
CALL = 2
"""Most copies and launches before one event."""
APART = 64
"""Number of them between two marks."""


class Queues:
    """Counts by stream. An event is recorded at intervals: once it has passed, so has the work before it."""

    def __init__(
        self, create: Callable[[], Any], record: Callable[[Any, int], None], passed: Callable[[Any], bool]
    ) -> None:
        self._create, self._record, self._passed = create, record, passed
        self._streams: dict[int, _Queue] = {}
        self._free: list[Any] = []

    def add(self, stream: int, work: int = CALL) -> None:
        """Count work queued on a stream."""
        queue = self._streams.get(stream)
        if queue is None:
            queue = self._streams[stream] = _Queue()
        queue.issued += work
        if queue.issued - queue.marked >= APART:
            event = self._free.pop() if self._free else self._create()
            self._record(event, stream)
            queue.marked = queue.issued
            queue.marks.append((queue.issued, event))
            self._look(queue)

    def full(self, stream: int) -> Any:  # noqa: ANN401 (an event)
        """Return the event to wait for before more work is queued on a stream; None if there is room."""
        queue = self._streams.get(stream)
        if queue is None or queue.issued - queue.passed < ROOM:
            return None
        self._look(queue)
        return queue.marks[0][1] if queue.marks and queue.issued - queue.passed >= ROOM else None

    def _look(self, queue: _Queue) -> None:
        while queue.marks and self._passed(queue.marks[0][1]):
            queue.passed, event = queue.marks.popleft()
            self._free.append(event)

    def close(self, destroy: Callable[[Any], None]) -> None:
        """Destroy the events; no work is in flight."""
        for event in (*self._free, *(event for queue in self._streams.values() for _, event in queue.marks)):
            destroy(event)
        self._free.clear()
        self._streams.clear()


class _Queue:
    __slots__ = ("issued", "marked", "marks", "passed")

    def __init__(self) -> None:
        self.issued = self.marked = self.passed = 0
        self.marks: deque[tuple[int, Any]] = deque()
