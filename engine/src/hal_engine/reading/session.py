"""A reader's state of one session. No I/O, so that it can be tested separately."""

from __future__ import annotations

from hal_core import OutputRecord

from hal_engine.reading.events import Gap, SessionStarted
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.protocol import Cursor, State

#: Most frames that are read before they are acknowledged.
_ACKNOWLEDGE_EVERY = 128


class Session:
    """A sender's lifetime from the reader's view. Times are monotonic seconds."""

    def __init__(self, number: int, now: float, after: int | None = None) -> None:
        self.number, self.sender = number, 0
        self.identity: bytes | None = None  # of the connection of its last message; None: only its cursor is known
        self.descriptor = -1  # of its connection
        self.heard = now
        self.broken: float | None = None  # when its connection broke
        self.overdue: int | None = None  # messages read by the time its deadline passed
        self.met = 0  # messages read by the time of its own last one
        self.expected = None if after is None else after + 1
        self.read = self.acknowledged = after or 0
        self.acknowledge_every = 1
        self.requests: dict[str, None] = {}  # unfinished, in the order of their appearance
        self._last_ids: tuple[str, ...] = ()
        self._token = self._asked = 0
        self._asked_at = 0.0
        self._unreadable = self._stalled = 0

    @property
    def last(self) -> int:
        """Return the last frame taken in order."""
        return (self.expected or 1) - 1

    @property
    def is_asking(self) -> bool:
        """Return whether a cursor is unanswered."""
        return self._asked != 0

    def breaks(self, now: float) -> None:
        """Note that its connection broke. Only the answer to a later cursor repairs that."""
        if self.broken is None:
            self.broken, self._asked = now, 0
        self.descriptor = -1

    def ask(self, now: float, *, anew: bool = True) -> tuple[int, Cursor]:
        """Return the sequence and body of the CURSOR to send.

        Without ``anew`` a pending cursor is repeated unchanged: its answer may already be on its way, perhaps behind
        other messages.
        """
        if anew or not self._asked:
            self._token += 1
        self._asked, self._asked_at = self._token, now
        return self.last, Cursor(self._token, self.expected is not None)

    def take(self, sequence: int, record: OutputRecord) -> None:
        """Record the expected frame and the unfinished requests."""
        self.expected = sequence + 1
        if record.request_ids is not self._last_ids:  # the same tuple from step to step while the batch does not change
            self._last_ids = record.request_ids
            self.requests |= dict.fromkeys(record.request_ids)
        if record.finish.tobytes().strip(b"\0"):
            for row in record.finish.nonzero()[0].tolist():
                self.requests.pop(record.request_ids[row], None)

    def unreadable(self, sequence: int, why: str) -> Gap | None:
        """Handle an unreadable expected frame: give it up the second time, else request it again."""
        if self._unreadable != sequence:
            self._unreadable = sequence
            return None
        self.expected = sequence + 1
        return Gap(self.number, self.sender, sequence, sequence, f"unreadable twice: {why}")

    def hear(self, last: int, state: State) -> Gap | SessionStarted | None:
        """Take the sender's STATE; ``last`` is the last sequence it made."""
        self.acknowledge_every = max(1, min(_ACKNOWLEDGE_EVERY, state.capacity // 4))
        if not self._asked or state.echo != self._asked:
            return None
        self._asked, self.broken = 0, None
        if self.expected is None:
            self.expected = state.oldest
            self.read = self.acknowledged = state.oldest - 1
            return SessionStarted(self.number, self.sender, state.oldest)
        if state.oldest <= self.expected:
            return None
        gap = Gap(self.number, self.sender, self.expected, state.oldest - 1, "the sender no longer holds them")
        self.expected = state.oldest
        return gap

    def must_ask(self, last: int, now: float) -> bool:
        """Return whether a STATE shows that the cursor must be sent (again): unanswered, or frames that never came.

        A sender sends its frames before its next STATE. So frames that two STATEs cover and that were not read are
        lost.
        """
        if self._asked:
            return now - self._asked_at > TIMEOUTS.ask_again
        if self.expected is None:
            return True
        stalled, self._stalled = self._stalled, self.expected if last >= self.expected else 0
        return self._stalled != 0 and stalled == self._stalled
