"""A worker whose executor is ranks: they are started, may be lost, and are started again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from hal_core import GroupLost, HalError, SplitRole, Unavailable

from hal.engine import Scheduler
from hal.engine.worker import EngineWorker

from .errors import RankLost
from .words import Delivery, Release, SplitWord, Verdict, Word

if TYPE_CHECKING:
    import zmq
    from hal_core import OutputRecord
    from hal_core.handover import Description

    from hal.engine.roles import Key

    from .crew import Crew

S = TypeVar("S", bound=Scheduler)


class RankWorker(EngineWorker[S]):
    """Its ranks, with a scheduler for each of their groups.

    - ``start``: begins to start the ranks, which are up when ``Crew.assemble`` returns True.
    - ``schedulers``: makes the schedulers of ranks that are up.
    - ``role``, ``number``: its part of each request, and its number among the workers of that role.
    - ``crew``: None while there are no ranks; ``up`` False until they are.
    - ``leaving``: attempts that the engine has released, with the ranks that have not answered yet, and what follows
      when all have.
    """

    def __init__(
        self,
        role: SplitRole,
        number: int,
        start: Callable[[], Crew],
        schedulers: Callable[[Crew], Sequence[S]],
        *,
        in_step: bool = False,
    ) -> None:
        self.role, self.number, self.in_step = role, number, in_step
        self._start, self._made = start, schedulers
        self.crew: Crew | None = None
        self.up = False
        self.drafted: Counter[str] = Counter()
        self.restarts: Callable[[], bool] = lambda: False
        self.leaving: dict[Key, tuple[set[int], Callable[[], None]]] = {}
        self._loss: GroupLost | None = None  # the last one

    @property
    def name(self) -> str:
        """As errors call it."""
        return f"{self.role.name.lower()} worker {self.number}"

    def start(self) -> None:
        """Start the ranks. Raises :class:`RankLost` for whatever keeps them from being started again."""
        self.up = False
        try:
            self.crew = self.executor = self._start()
        except Unavailable as error:
            if self._loss is None:
                raise
            rank, step = (self._loss.rank, self._loss.step) if isinstance(self._loss, RankLost) else (-1, 0)
            raise RankLost(error.what, rank, step, cure=error.cure) from error
        self.crew.drafted, self.crew.again = self.drafted, self.restarts

    def assemble(self) -> bool:
        """Continue the start; whether the ranks are up. Raises as :class:`Crew`."""
        if not self.up and self.crew is not None and self.crew.assemble():
            self.take_steps(self._made(self.crew), overlap=self.crew.abilities.overlap)
            self.leaving.clear()
            self.up = True
        return self.up

    def rest(self, error: GroupLost) -> Iterator[tuple[int, OutputRecord]]:
        """Give the outputs that still come, then end the ranks."""
        assert self.crew is not None
        self._loss = error
        for number, record in self.crew.rest():
            if self.in_flight[number]:
                yield number, record
        self.crew.close()

    def lose(self) -> None:
        """See :class:`EngineWorker`."""
        self.close()
        self.crew, self.up = None, False
        self.leaving.clear()

    def stop(self) -> None:
        """See :class:`EngineWorker`."""
        if self.crew is not None and self.up:
            self.crew.stop()
        else:
            self.close()

    def close(self) -> None:
        """See :class:`EngineWorker`."""
        if self.crew is not None:
            self.crew.close()

    # -- messages -------------------------------------------------------------------------------------------------

    @property
    def drafts(self) -> tuple[int, ...]:
        """Drafts that were fed and accepted, and turns of a slot that decodes."""
        return (0, 0, 0) if self.crew is None else self.crew.drafts

    @property
    def undelivered(self) -> Sequence[Delivery]:
        """Tokens that a reader besides the engine has not acknowledged."""
        return () if self.crew is None else self.crew.undelivered

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """Sockets to poll."""
        return () if self.crew is None else self.crew.sockets

    @property
    def said(self) -> deque[SplitWord]:
        """Messages of ranks about requests that move."""
        return super().said if self.crew is None else self.crew.said

    @property
    def ranks(self) -> range:
        """Their numbers, while there are any."""
        assert self.crew is not None
        return range(self.crew.layout.size)

    @property
    def peers(self) -> Sequence[Description]:
        """What each rank is to its peers."""
        assert self.crew is not None
        return [peer for peer in self.crew.peers if peer is not None]

    def say(self, word: Word, *ranks: int) -> None:
        """Say a word to ranks. Whoever cannot be reached is lost, which is noticed elsewhere."""
        assert self.crew is not None
        self.crew.line.say(word, *ranks)

    def refuse(self, error: HalError) -> None:
        """Tell the ranks why they are refused."""
        if self.crew is not None:
            self.crew.line.say(Verdict(error.what, error.cure, refused=True))

    def release(self, key: Key, then: Callable[[], None], over: frozenset[int] = frozenset()) -> None:
        """Have the ranks drop an attempt, and call ``then`` when they have. ``over``: ranks that have done so."""
        waits = set(self.ranks) - over
        if not waits:
            then()
            return
        self.leaving[key] = waits, then
        self.say(Release(*key), *sorted(waits))

    def is_over(self, key: Key, rank: int) -> bool:
        """A rank has dropped an attempt; whether the engine had released it."""
        if (found := self.leaving.get(key)) is None:
            return False
        waits, then = found
        waits.discard(rank)
        if not waits:
            del self.leaving[key]
            then()
        return True
