"""A worker as the engine sees it: an executor, and a scheduler for each of its groups."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hal_core import GroupLost, HalError, OutputRecord, Request, SplitRole

from .generation import Finished
from .scheduler import Scheduler

if TYPE_CHECKING:
    from hal_core import SinkClosed, SinkFull

    from .executor import Executor

S = TypeVar("S", bound=Scheduler)
_NOTHING: deque[Any] = deque()


class EngineWorker(Generic[S]):
    """One whose executor runs as long as the engine; :class:`hal_engine.distributed.worker.RankWorker` may be lost.

    - ``schedulers``: one for each group; ``in_flight``: steps of each whose output was not received.
    """

    role = SplitRole.MIXED
    executor: Executor
    schedulers: Sequence[S] = ()
    up = True

    def __init__(self, executor: Executor, scheduler: S) -> None:
        self.executor = executor
        self.take_steps([scheduler], overlap=scheduler.overlap)

    def take_steps(self, schedulers: Sequence[S], *, overlap: bool) -> None:
        """Take steps of these schedulers, none of which has one in flight."""
        self.schedulers, self.in_flight = schedulers, [0] * len(schedulers)
        self._depth = 2 if overlap else 1
        for scheduler in schedulers:
            scheduler.overlap = overlap

    @property
    def scheduler(self) -> S:
        """The scheduler of the first group."""
        return self.schedulers[0]

    @property
    def busy(self) -> bool:
        """True while a request has not ended."""
        return any(scheduler.busy for scheduler in self.schedulers)

    @property
    def due(self) -> list[int]:
        """The groups that have something to do and may be given one step more."""
        depth, schedulers = self._depth, self.schedulers
        return [number for number, steps in enumerate(self.in_flight) if steps < depth and schedulers[number].busy]

    def give(self) -> SinkFull | SinkClosed | None:
        """Give each group that is due one step; return the sink's error or None. Raises :class:`GroupLost`."""
        trouble = None
        for number in self.due:
            scheduler = self.schedulers[number]
            raised = self.executor.order(number, scheduler.schedule(), scheduler.taken)
            self.in_flight[number] += 1
            trouble = trouble or raised
        return trouble

    def take(self, number: int, record: OutputRecord) -> list[Finished]:
        """Take over a group's output; return the requests that ended with it."""
        self.in_flight[number] -= 1
        return self.schedulers[number].update(record)

    def withdraw(self) -> tuple[list[Request], list[Finished]]:
        """Take all requests back: as they continue elsewhere, by group, and the ends of those to be aborted."""
        found = [scheduler.withdraw() for scheduler in self.schedulers]
        return [one for going_on, _ in found for one in going_on], [one for _, ended in found for one in ended]

    # -- ranks ----------------------------------------------------------------------------------------------------

    drafted: Counter[str]
    """Where ranks count the drafts that they make for each request; the engine's."""
    restarts: Callable[[], bool]
    """Whether the engine starts the worker again if it is lost."""

    @property
    def name(self) -> str:
        """As errors call it."""
        return "the worker"

    @property
    def drafts(self) -> tuple[int, ...]:
        """Drafts that were fed and accepted, and turns of a slot that decodes."""
        return self.executor.drafts

    @property
    def spent(self) -> tuple[float | None, float | None]:
        """Seconds so far: processor time of the ranks that report theirs, and the device's; None if not measured."""
        return None, self.executor.device_seconds

    @property
    def undelivered(self) -> Sequence[tuple[str, int, int]]:
        """Request, position and count of tokens that a reader besides the engine has not acknowledged."""
        return ()

    @property
    def sockets(self) -> Sequence[Any]:
        """See :class:`Executor`; empty while no step runs."""
        return self.executor.sockets

    @property
    def progress(self) -> deque[Any]:
        """Messages about requests that move between workers; the engine removes them."""
        return _NOTHING

    def start(self) -> None:
        """Begin to start the ranks, in place of those that were lost."""

    def assemble(self) -> bool:
        """Continue the start, if there is one; return whether the worker is up. Raises what ended the start."""
        return self.up

    def refuse(self, error: HalError) -> None:
        """Send the ranks the reason of their refusal."""

    def rest(self, error: GroupLost) -> Iterator[tuple[int, OutputRecord]]:
        """After a loss: the outputs that still come, until all ranks have ended. Raises ``error`` if it is final."""
        raise error

    def lose(self) -> None:
        """Take note that all ranks have ended, and end them if they have not."""

    def stop(self) -> None:
        """End the ranks in order, everything sent."""

    def close(self) -> None:
        """End the ranks at once where they cannot end in order. Idempotent."""
