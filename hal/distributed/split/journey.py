"""One request on its way from worker to worker."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hal.engine.roles import DecodeScheduler, Key, PrefillScheduler

from .states import Event, State, after

if TYPE_CHECKING:
    from hal_core import Request

    from hal.distributed.worker import RankWorker


@dataclass(eq=False)
class Journey:
    """A request from its arrival to its end.

    - ``number``: of its arrival; ``request``: as it goes on, with every token that was delivered before this prefill.
    - ``first``, ``drafts``: what the prefill has given, in the states behind it.
    - ``prefill``, ``decode``: the workers that have it; ``attempt``: of this prefill, or offer: higher than any before.
    - ``reserved``, ``arrived``, ``over``: ranks of the decode worker that have said so of this attempt.
    - ``since``: when its state changed last; ``held_since``: when it got its first token.
    - ``failed``: offers that came to nothing though the worker lives; ``why``: the last one's reason.
    - ``careful``: it was given up before, and is not prefilled again before a decode worker has room for it.
    """

    number: int
    request: Request
    state: State = State.WAITING
    first: int = -1
    drafts: tuple[int, ...] = ()
    prefill: RankWorker[PrefillScheduler] | None = None
    decode: RankWorker[DecodeScheduler] | None = None
    attempt: int = 0
    reserved: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    over: set[int] = field(default_factory=set)
    since: float = 0.0
    held_since: float = 0.0
    failed: int = 0
    why: str = ""
    careful: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in the order of service: by priority, the lower first, then by arrival."""
        return self.request.priority, self.number

    @property
    def name(self) -> str:
        """The request's."""
        return self.request.request_id

    @property
    def key(self) -> Key:
        """Of this attempt."""
        return self.name, self.attempt

    @property
    def output(self) -> tuple[int, ...]:
        """Everything that was delivered before the decode worker's part."""
        return (*self.request.output, self.first) if self.first >= 0 else tuple(self.request.output)

    def move(self, event: Event, now: float) -> None:
        """Go to the next state. Raises :class:`hal_core.HalError` where there is none."""
        self.state, self.since = after(self.state, event), now

    def turn_back(self, output: tuple[int, ...]) -> None:
        """Be as new, with that much delivered."""
        self.request = replace(self.request, output=output)
        self.first, self.drafts, self.prefill, self.decode = -1, (), None, None
