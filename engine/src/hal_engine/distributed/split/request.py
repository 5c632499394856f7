"""One request between a prefill and a decode worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from hal_engine.engine.roles import DecodeScheduler, Key, PrefillScheduler

from .states import Event, State, after

if TYPE_CHECKING:
    from hal_core import Request

    from hal_engine.distributed.worker import RankWorker


@dataclass(eq=False)
class SplitRequest:
    """A request from its arrival to its end.

    - ``number``: of its arrival. ``request``: its present form, with every token delivered before this prefill.
    - ``first``, ``drafts``: results of the prefill, in the states after it.
    - ``prefill``, ``decode``: the workers that have it. ``attempt``: number of this prefill or offer, higher than any
      before.
    - ``reserved``, ``arrived``, ``over``: ranks of the decode worker that have reported so for this attempt.
    - ``since``: time of its last change of state. ``held_since``: time of its first token.
    - ``failed``: offers that failed although the worker lives. ``why``: the last reason.
    - ``careful``: it was given up before; it is prefilled again only when a decode worker has room for it.
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
        """The request's name."""
        return self.request.request_id

    @property
    def key(self) -> Key:
        """The key of this attempt."""
        return self.name, self.attempt

    @property
    def output(self) -> tuple[int, ...]:
        """Tokens that were delivered before the decode worker's part."""
        return (*self.request.output, self.first) if self.first >= 0 else tuple(self.request.output)

    def move(self, event: Event, now: float) -> None:
        """Enter the next state. Raises :class:`hal_core.HalError` if the event is not possible."""
        self.state, self.since = after(self.state, event), now

    def turn_back(self, output: tuple[int, ...]) -> None:
        """Start again, with that many tokens delivered."""
        self.request = replace(self.request, output=output)
        self.first, self.drafts, self.prefill, self.decode = -1, (), None, None
