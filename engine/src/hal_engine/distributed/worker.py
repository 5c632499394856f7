"""A worker on ranks, which are started, may be lost, and are restarted."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hal_core import GroupLost, HalError, SplitRole, Unavailable

from hal_engine.engine import Scheduler
from hal_engine.engine.worker import EngineWorker

from .control_messages import Delivery, Message, Progress, Release, Stop
from .errors import RankLost

if TYPE_CHECKING:
    from hal_core import OutputRecord
    from hal_core.handover import Description

    from hal_engine.engine.roles import Key

    from .rank_executor import RankExecutor

S = TypeVar("S", bound=Scheduler)


class RankWorker(EngineWorker[S]):
    """A worker's ranks, with a scheduler for each of their groups.

    - ``start``: begins to start the ranks, which are up when ``RankExecutor.assemble`` returns True.
    - ``schedulers``: makes the schedulers of ranks that are up.
    - ``role``, ``number``: its part of each request, and its number among the workers of that role.
    - ``rank_executor``: None without ranks. ``up``: False until the ranks are up.
    - ``leaving``: attempts that the engine released, the ranks that have not confirmed yet, and the callback for the
      end.
    """

    def __init__(
        self,
        role: SplitRole,
        number: int,
        start: Callable[[], RankExecutor],
        schedulers: Callable[[RankExecutor], Sequence[S]],
    ) -> None:
        self.role, self.number = role, number
        self._start, self._made = start, schedulers
        self.rank_executor: RankExecutor | None = None
        self.up = False
        self.drafted: Counter[str] = Counter()
        self.restarts: Callable[[], bool] = lambda: False
        self.leaving: dict[Key, tuple[set[int], Callable[[], None]]] = {}
        self._loss: GroupLost | None = None  # the last one

    @property
    def name(self) -> str:
        """Name of the worker in errors."""
        return f"{self.role.name.lower()} worker {self.number}"

    def start(self) -> None:
        """Start the ranks. Raises :class:`RankLost` for errors that a restart would meet again."""
        self.up = False
        try:
            self.rank_executor = self.executor = self._start()
        except Unavailable as error:
            if self._loss is None:
                raise
            rank, step = (self._loss.rank, self._loss.step) if isinstance(self._loss, RankLost) else (-1, 0)
            raise RankLost(error.what, rank, step, cure=error.cure) from error
        self.rank_executor.drafted, self.rank_executor.again = self.drafted, self.restarts

    def assemble(self) -> bool:
        """Continue the start. Return whether the ranks are up. Raises as :class:`RankExecutor`."""
        if not self.up and self.rank_executor is not None and self.rank_executor.assemble():
            self.take_steps(self._made(self.rank_executor), overlap=self.rank_executor.rank_info.overlap)
            self.leaving.clear()
            self.up = True
        return self.up

    def rest(self, error: GroupLost) -> Iterator[tuple[int, OutputRecord]]:
        """Yield the outputs that still come, then end the ranks."""
        assert self.rank_executor is not None
        self._loss = error
        for number, record in self.rank_executor.rest():
            if self.in_flight[number]:
                yield number, record
        self.rank_executor.close()

    def lose(self) -> None:
        """See :class:`EngineWorker`."""
        self.close()
        self.rank_executor, self.up = None, False
        self.leaving.clear()

    def stop(self) -> None:
        """See :class:`EngineWorker`."""
        if self.rank_executor is not None and self.up:
            self.rank_executor.stop()
        else:
            self.close()

    def close(self) -> None:
        """See :class:`EngineWorker`."""
        if self.rank_executor is not None:
            self.rank_executor.close()

    # -- messages -------------------------------------------------------------------------------------------------

    @property
    def drafts(self) -> tuple[int, ...]:
        """Return drafts fed and accepted, and turns of slots that decode."""
        return (0, 0, 0) if self.rank_executor is None else self.rank_executor.drafts

    @property
    def spent(self) -> tuple[float | None, float | None]:
        """See :class:`EngineWorker`."""
        ranks = self.rank_executor
        return (None, None) if ranks is None else (ranks.rank_seconds, ranks.device_seconds)

    @property
    def undelivered(self) -> Sequence[Delivery]:
        """Return tokens that an additional reader has not acknowledged."""
        return () if self.rank_executor is None else self.rank_executor.undelivered

    @property
    def sockets(self) -> Sequence[Any]:
        """Return sockets to poll."""
        return () if self.rank_executor is None else self.rank_executor.sockets

    @property
    def progress(self) -> deque[Progress]:
        """Return messages of ranks about KV transfer."""
        return super().progress if self.rank_executor is None else self.rank_executor.progress

    @property
    def ranks(self) -> range:
        """Return the ranks' numbers; none without ranks."""
        assert self.rank_executor is not None
        return range(self.rank_executor.layout.size)

    @property
    def peers(self) -> Sequence[Description]:
        """Return each rank's description for its peers."""
        assert self.rank_executor is not None
        return [peer for peer in self.rank_executor.peers if peer is not None]

    def send(self, message: Message, *ranks: int) -> None:
        """Send a message to ranks. A rank that cannot be reached is lost, which is detected elsewhere."""
        assert self.rank_executor is not None
        self.rank_executor.channel.send(message, *ranks)

    def refuse(self, error: HalError) -> None:
        """Send the ranks the reason of their refusal."""
        if self.rank_executor is not None:
            self.rank_executor.channel.send(Stop(error.what, error.cure, refused=True))

    def release(self, key: Key, then: Callable[[], None], over: frozenset[int] = frozenset()) -> None:
        """Release an attempt on all ranks, and call ``then`` when they have confirmed. ``over``: ranks that have."""
        waits = set(self.ranks) - over
        if not waits:
            then()
            return
        self.leaving[key] = waits, then
        self.send(Release(*key), *sorted(waits))

    def is_over(self, key: Key, rank: int) -> bool:
        """Handle a rank's confirmation. Return whether the engine had released the attempt."""
        if (found := self.leaving.get(key)) is None:
            return False
        waits, then = found
        waits.discard(rank)
        if not waits:
            del self.leaving[key]
            then()
        return True
