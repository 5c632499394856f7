"""The frames that a sink still holds because no reader has acknowledged them. No I/O, so it is tested alone."""

from __future__ import annotations

from collections import deque
from itertools import islice

from hal_core.frames import decode


class Window:
    """Encoded frames by sequence number: ``first`` is the oldest held, ``unsent`` the next to send."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._waiting: deque[bytes] = deque()  # the last ones of them, still to be sent
        self.first = 1
        self.nbytes = 0
        self.resent = 0  #: number of frames that were sent again on a new connection

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def next(self) -> int:
        """Return the number of the next new frame."""
        return self.first + len(self._frames)

    @property
    def unsent(self) -> int:
        """Return the number of the frame to send next; ``next`` when all are sent."""
        return self.first + len(self._frames) - len(self._waiting)

    def add(self, frame: bytes) -> None:
        """Hold the frame, whose sequence is ``next``."""
        self._frames.append(frame)
        self._waiting.append(frame)
        self.nbytes += len(frame)

    def acknowledge(self, sequence: int) -> None:
        """Drop everything up to ``sequence``. Ignores numbers that were never used."""
        frames = self._frames
        count = max(0, min(sequence, self.next - 1) - self.first + 1)
        for _ in range(count):
            self.nbytes -= len(frames.popleft())
        while len(self._waiting) > len(frames):
            self._waiting.popleft()
        self.first += count

    def rewind(self, after: int) -> None:
        """Send everything after ``after`` that is still held again."""
        target = min(max(after + 1, self.first), self.next)
        self.resent += max(0, self.unsent - target)
        self._waiting = deque(islice(self._frames, target - self.first, None))

    def take(self) -> bytes | None:
        """Return the next frame to send, which counts as sent; None if there is none."""
        return self._waiting.popleft() if self._waiting else None

    def deliveries(self) -> list[tuple[str, int, int]]:
        """Return ``(request_id, first_position, count)`` of everything held, which is undelivered if the sink ends
        now."""
        return [one for frame in self._frames for one in decode(frame).record.deliveries()]
