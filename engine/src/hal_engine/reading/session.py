"""A reader's state of one session. No I/O, so that it can be tested separately."""

from __future__ import annotations

from hal_core import OutputRecord

from hal_engine.reading.events import Gap, SessionStarted
from hal_engine.transport.channel import Channel
from hal_engine.transport.protocol import Hello

#: Most frames that are read before they are acknowledged.
_ACKNOWLEDGE_EVERY = 128


class Session:
    """A sink's lifetime from the reader's view. Times are monotonic seconds.

    - ``channel``: its connection; None while it has none. ``broken``: when the last one ended, None while there is one.
    - ``overdue``: since when its time is over, 0.0 while it is not.
    - ``expected``: the next frame, None before its first message. ``read``: the last one that the caller has.
    """

    def __init__(self, number: int, now: float, after: int | None = None) -> None:
        self.number, self.sender = number, 0
        self.channel: Channel | None = None
        self.heard = now
        self.broken: float | None = None
        self.overdue = 0.0
        self.expected = None if after is None else after + 1
        self.read = self.acknowledged = after or 0
        self.acknowledge_every = 1
        self.requests: dict[str, None] = {}  # unfinished, in the order of their appearance
        self._last_ids: tuple[str, ...] = ()
        self._ended: set[str] = set()  # of these, whose rows may stay for steps that were launched before the end
        self._unreadable = 0

    @property
    def last(self) -> int:
        """Return the last frame taken in order."""
        return (self.expected or 1) - 1

    def begin(self, hello: Hello, channel: Channel) -> Gap | SessionStarted | None:
        """Take the first message of a connection."""
        self.channel, self.broken, self.sender = channel, None, hello.sender
        self.acknowledge_every = max(1, min(_ACKNOWLEDGE_EVERY, hello.capacity // 4))
        if self.expected is None:
            self.expected = hello.oldest
            self.read = self.acknowledged = hello.oldest - 1
            return SessionStarted(self.number, self.sender, hello.oldest)
        if hello.oldest <= self.expected:
            return None
        gap = Gap(self.number, self.sender, self.expected, hello.oldest - 1, "the sender no longer holds them")
        self.expected = hello.oldest
        return gap

    def breaks(self, now: float) -> None:
        """Note that its connection has ended."""
        self.channel, self.broken = None, now

    def take(self, sequence: int, record: OutputRecord) -> None:
        """Record the expected frame and the unfinished requests."""
        self.expected = sequence + 1
        if record.request_ids is not self._last_ids:  # the same tuple from step to step while the batch does not change
            self._last_ids = record.request_ids
            self._ended.intersection_update(record.request_ids)
            self.requests |= dict.fromkeys(name for name in record.request_ids if name not in self._ended)
        if self._ended:
            again = self._ended.intersection(record.request_ids[row] for row in record.counts.nonzero()[0].tolist())
            self._ended -= again  # with a token, so that another request has the name
            self.requests |= dict.fromkeys(again)
        if record.finish.tobytes().strip(b"\0"):
            ended = [record.request_ids[row] for row in record.finish.nonzero()[0].tolist()]
            self._ended.update(ended)
            for name in ended:
                self.requests.pop(name, None)

    def unreadable(self, sequence: int, why: str) -> Gap | None:
        """Handle an unreadable expected frame: give it up the second time, else it comes again on a new connection."""
        if self._unreadable != sequence:
            self._unreadable = sequence
            return None
        self.expected = sequence + 1
        return Gap(self.number, self.sender, sequence, sequence, f"unreadable twice: {why}")
