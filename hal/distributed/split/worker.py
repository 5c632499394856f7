"""One worker of a role, as the engine has it: its ranks with a scheduler of their own, whose loss is theirs alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from hal_core import HalError, SplitRole

from hal.distributed.words import Release, Verdict, Word
from hal.engine import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hal_core import OutputRecord
    from hal_core.handover import Description

    from hal.distributed.crew import Crew
    from hal.distributed.team import Team
    from hal.engine.roles import Key

S = TypeVar("S", bound=Scheduler)


class SplitWorker(Generic[S]):
    """``start`` begins to start its ranks, which are up when ``Crew.assemble`` says so.

    - ``crew``: None while there is none; ``team``: None while it is not up.
    - ``leaving``: attempts that the engine has released, with the ranks that have not answered yet, and what follows
      when all have.
    - ``drafted``: what its crews count of drafts, the engine's; ``restarts``: whether it may be started again.
    """

    def __init__(
        self,
        role: SplitRole,
        number: int,
        start: Callable[[], Crew],
        team: Callable[[Crew, Callable[[OutputRecord], None]], Team[S]],
    ) -> None:
        self.role, self.number = role, number
        self._start, self._made = start, team
        self.crew: Crew | None = None
        self.drafted: Counter[str] = Counter()
        self.restarts: Callable[[], bool] = lambda: False
        self.team: Team[S] | None = None
        self.leaving: dict[Key, tuple[set[int], Callable[[], None]]] = {}

    @property
    def name(self) -> str:
        """As errors call it."""
        return f"{self.role.name.lower()} worker {self.number}"

    def start(self) -> None:
        """Start its ranks, in place of those that were lost."""
        self.team, self.crew = None, self._start()
        self.crew.drafted, self.crew.again = self.drafted, self.restarts

    def assemble(self, on_record: Callable[[OutputRecord], None]) -> bool:
        """Go on with the start; whether it is up now. Raises as :class:`Crew`."""
        assert self.crew is not None
        if self.team is None and self.crew.assemble():
            self.team = self._made(self.crew, on_record)
            self.leaving.clear()
        return self.team is not None

    @property
    def scheduler(self) -> S:
        """Of one that is up."""
        assert self.team is not None
        return self.team.schedulers[0]

    @property
    def ranks(self) -> range:
        """Of one that is up."""
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
        """Tell its ranks why they are refused."""
        if self.crew is not None:
            self.crew.line.say(Verdict(error.what, error.cure, refused=True))

    def release(self, key: Key, then: Callable[[], None], over: frozenset[int] = frozenset()) -> None:
        """Have the ranks drop an attempt, and do ``then`` when they have. ``over``: ranks that have said so before."""
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

    def lose(self) -> None:
        """Its ranks have ended."""
        self.crew, self.team = None, None
        self.leaving.clear()
