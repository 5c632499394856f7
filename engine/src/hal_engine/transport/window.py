"""The frames that a sender still holds because no reader has acknowledged them. No I/O, so it is tested alone."""

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
        self.resent = 0  #: number of frames that a reader requested again

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

    @property
    def is_sent(self) -> bool:
        """Return whether the transport has every frame."""
        return not self._waiting

    def add(self, frame: bytes) -> None:
        """Hold the frame, whose sequence is ``next``."""
        self._frames.append(frame)
        self._waiting.append(frame)
        self.nbytes += len(frame)

    def acknowledge(self, sequence: int) -> int:
        """Drop everything up to ``sequence`` and return the number of frames dropped. Ignores numbers that were never
        used."""
        frames = self._frames
        count = min(sequence, self.next - 1) - self.first + 1
        if count <= 0:
            return 0
        freed = 0
        for _ in range(count):
            freed += len(frames.popleft())
        while len(self._waiting) > len(frames):
            self._waiting.popleft()
        self.first += count
        self.nbytes -= freed
        return count

    def rewind(self, after: int) -> None:
        """Send everything after ``after`` that is still held again."""
        target = min(max(after + 1, self.first), self.next)
        self.resent += max(0, self.unsent - target)
        self._waiting = deque(islice(self._frames, target - self.first, None))

    def message(self, limit: int) -> tuple[bytes, int]:
        """Return the next unsent frames, joined up to about ``limit`` bytes, and how many; ``sent`` confirms them."""
        waiting = self._waiting
        if len(waiting) == 1:  # the usual case
            return waiting[0], 1
        size, count = 0, 0
        for frame in waiting:
            size += len(frame)
            if count and size > limit:
                break
            count += 1
        return b"".join(islice(waiting, count)), count  # a single frame is not copied

    def sent(self, count: int) -> None:
        """Note that the transport has the ``count`` frames of the last message."""
        popleft = self._waiting.popleft
        for _ in range(count):
            popleft()

    def deliveries(self) -> list[tuple[str, int, int]]:
        """Return ``(request_id, first_position, count)`` of everything held, which is undelivered if the sender ends
        now."""
        return [told for frame in self._frames for told in decode(frame).record.deliveries()]
