"""The frames that a sender still holds because no reader has acknowledged them. No I/O: it is tested by itself."""

from __future__ import annotations

from collections import deque
from itertools import islice

from hal_core.frames import decode


class Window:
    """Encoded frames by sequence number: ``first`` is the oldest held, ``unsent`` the next to send."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self.first = self.unsent = 1
        self.nbytes = 0
        self.resent = 0  #: frames that a reader asked for again, counted

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def next(self) -> int:
        """The number that the next frame gets."""
        return self.first + len(self._frames)

    def add(self, frame: bytes) -> None:
        """Hold the frame, whose sequence is ``next``."""
        self._frames.append(frame)
        self.nbytes += len(frame)

    def acknowledge(self, sequence: int) -> int:
        """Forget everything up to ``sequence`` and return how many frames that were. Numbers never made are ignored."""
        count = min(sequence, self.next - 1) - self.first + 1
        for _ in range(count):
            self.nbytes -= len(self._frames.popleft())
        if count <= 0:
            return 0
        self.first += count
        self.unsent = max(self.unsent, self.first)
        return count

    def rewind(self, after: int) -> None:
        """Have everything after ``after`` that is still held sent again."""
        target = min(max(after + 1, self.first), self.next)
        self.resent += max(0, self.unsent - target)
        self.unsent = target

    def message(self, limit: int) -> tuple[bytes, int]:
        """Return the next unsent frames, joined up to about ``limit`` bytes, and how many; ``sent`` confirms them."""
        start = self.unsent - self.first
        if start == len(self._frames) - 1:  # the usual case: one frame, not copied
            return self._frames[-1], 1
        size, count = 0, 0
        for frame in islice(self._frames, start, None):
            if count and size + len(frame) > limit:
                break
            size, count = size + len(frame), count + 1
        return b"".join(islice(self._frames, start, start + count)), count

    def sent(self, count: int) -> None:
        """The ``count`` frames of the last message are with the transport."""
        self.unsent += count

    def deliveries(self) -> list[tuple[str, int, int]]:
        """``(request_id, first_position, count)`` of everything held: what is undelivered if the sender ends now."""
        return [told for frame in self._frames for told in decode(frame).record.deliveries()]
