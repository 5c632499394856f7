"""Events of a reader besides records. Losses are exceptions: unhandled ones stop the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hal_core import HalError


@dataclass(frozen=True, slots=True)
class SessionStarted:
    """An unknown sender sends, starting with frame ``first``. A worker's restart is a new session."""

    session: int
    sender: int
    first: int


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A sender has closed; everything up to ``last_sequence`` was sent and acknowledged.

    ``again``: its worker is started again, so that a new session follows.
    """

    session: int
    sender: int
    last_sequence: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class FrameSkipped:
    """Bytes that are not a frame. If a frame was damaged, it is requested again; if that fails, a Gap follows."""

    reason: str


class StreamLoss(HalError, ConnectionError):
    """Output that was lost."""


class SessionLost(StreamLoss):
    """A sender has vanished without a goodbye: ``last_sequence`` was the last frame, ``requests`` were not finished."""

    def __init__(self, session: int, sender: int, last_sequence: int, requests: Sequence[str], why: str) -> None:
        self.session, self.sender = session, sender
        self.last_sequence, self.requests = last_sequence, tuple(requests)
        named = ", ".join(self.requests[:8]) + (" …" if len(self.requests) > 8 else "")
        super().__init__(
            f"sender {sender} is lost ({why}) after frame {last_sequence} of session {session:016x}; "
            f"{len(self.requests)} request(s) unfinished: {named or 'none known'}",
            cure="start the worker again and run these requests from the last token read",
        )


class Gap(StreamLoss):
    """Frames ``first`` to ``last`` of a session are lost: no longer held by the sender, or unreadable."""

    def __init__(self, session: int, sender: int, first: int, last: int, why: str) -> None:
        self.session, self.sender, self.first, self.last = session, sender, first, last
        super().__init__(
            f"frames {first} to {last} of session {session:016x} (sender {sender}) are missing: {why}",
            cure="compare the positions of the records that follow, and run the requests concerned again",
        )


Event = SessionStarted | SessionEnded | FrameSkipped | SessionLost | Gap
