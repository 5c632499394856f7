"""The connections of a server: their number, the time that each may take to send a request, and their bytes.

A connection that has not sent its whole request is one that the server waits for. If there is no room for another one,
or for more bytes, the server ends the one for which it has waited longest: silent and slow clients keep no other client
out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from enum import Enum
from typing import Protocol

from hal_engine.timeouts import TIMEOUTS

from .errors import ApiError
from .limits import Limits


class Phase(Enum):
    """Phase of a connection: the client sends the head of a request, or its body; the server answers; the client
    does not read the answer."""

    HEAD, BODY, ANSWER, UNREAD = "head", "body", "answer", "unread"


WAITING = (Phase.HEAD, Phase.BODY, Phase.UNREAD)
"""Phases in which the server waits for the client."""


class Member(Protocol):
    """A connection, as the gate knows it."""

    def refuse(self, error: ApiError) -> None:
        """Close it, with this error if an answer can still be sent."""


class Gate:
    """Counts connections and the bytes that they hold. ``refused``: how many it has ended, by why.

    All methods are called in the event loop."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.refused = limits, Counter[str]()
        self._phases: dict[Member, Phase] = {}
        self._waiting: dict[Phase, dict[Member, float]] = {phase: {} for phase in WAITING}  # since when; oldest first
        self._held: dict[Member, int] = {}
        self.bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many connections there are."""
        return len(self._phases)

    def enter(self, member: Member) -> None:
        """Take a new connection; the one that the server waits for longest makes room, else the new one is refused."""
        if len(self) >= self.limits.connections:
            firsts = [next(iter(self._waiting[phase].items())) for phase in WAITING if self._waiting[phase]]
            oldest = min(firsts, key=lambda pair: pair[1])[0] if firsts else member
            self._refuse(oldest, "connections", self._full(f"has {len(self)} connections"))
            if oldest is member:
                return
        self.now(member, Phase.HEAD)

    def now(self, member: Member, phase: Phase) -> None:
        """Set the phase of a connection."""
        former = self._phases.get(member)
        if former in self._waiting:
            del self._waiting[former][member]
        self._phases[member] = phase
        if phase in self._waiting:
            loop = asyncio.get_running_loop()
            self._waiting[phase][member] = loop.time()
            if self._timer is None:
                self._timer = loop.call_later(TIMEOUTS.client_look, self._look)

    def phase_of(self, member: Member) -> Phase | None:
        """Return the phase of a connection; None if it has left or was refused."""
        return self._phases.get(member)

    def hold(self, member: Member, count: int) -> None:
        """Count bytes of a request; if they are too many, the oldest unfinished body makes room, else this one."""
        self._held[member] = self._held.get(member, 0) + count
        self.bytes += count
        while self.bytes > self.limits.bytes and member in self._phases:
            oldest = next(iter(self._waiting[Phase.BODY]), member)
            self._refuse(oldest, "bytes", self._full(f"holds {self.bytes >> 20} MiB of requests"))

    def release(self, member: Member) -> None:
        """The bytes of a request are no longer held."""
        self.bytes -= self._held.pop(member, 0)

    def leave(self, member: Member) -> None:
        """Forget a connection; without effect if it was refused before."""
        self.release(member)
        former = self._phases.pop(member, None)
        if former in self._waiting:
            del self._waiting[former][member]

    def _refuse(self, member: Member, why: str, error: ApiError) -> None:
        self.refused[why] += 1
        self.leave(member)
        member.refuse(error)

    @staticmethod
    def _full(what: str) -> ApiError:
        return ApiError(503, f"the server {what}, and no room for more (try again later)", code="server_busy")

    def _look(self) -> None:
        """End the connections that the server has waited for too long."""
        now = asyncio.get_running_loop().time()
        most = {
            Phase.HEAD: TIMEOUTS.request_head,
            Phase.BODY: TIMEOUTS.request_body,
            Phase.UNREAD: TIMEOUTS.unread_answer,
        }
        for phase, seconds in most.items():
            late = [member for member, since in self._waiting[phase].items() if now - since >= seconds]
            for member in late:
                what = f"the {phase.value} of the request took more than {seconds:g} s (send it at once)"
                self._refuse(member, phase.value, ApiError(408, what, code="request_timeout"))
        left = any(self._waiting.values())
        self._timer = asyncio.get_running_loop().call_later(TIMEOUTS.client_look, self._look) if left else None
