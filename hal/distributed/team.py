"""The ranks of one crew with a scheduler for each of its groups: steps given and taken, and what is left of a loss.

Every engine of ranks is made of these: :class:`hal.distributed.engine.RanksEngine` has one, whose groups serve alike,
:class:`hal.distributed.split.SplitEngine` one for each worker, whose losses are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from hal_core import OutputRecord, Request

from hal.engine import Finished, Scheduler

from .errors import RankLost
from .steps import orders_of

if TYPE_CHECKING:
    from .crew import Crew

S = TypeVar("S", bound=Scheduler)


class Team(Generic[S]):
    """One thread uses it.

    - ``schedulers``: one for each group, in their order; ``in_flight``: steps of each whose output has not come.
    - ``on_record``: is handed each record when it was taken over.
    """

    def __init__(self, crew: Crew, schedulers: Sequence[S], on_record: Callable[[OutputRecord], None]) -> None:
        """``crew`` is up."""
        self.crew, self.schedulers = crew, schedulers
        self.in_flight = [0] * len(schedulers)
        self.steps = 0
        self._on_record = on_record
        overlap = crew.abilities.overlap
        self._ahead = 2 if overlap else 1
        for scheduler in schedulers:
            scheduler.overlap = overlap

    def waits(self, number: int) -> bool:
        """Whether a group may be given one step more."""
        return self.in_flight[number] < self._ahead

    def give(self, number: int) -> None:
        """Give a group its next step. Raises :class:`RankLost`."""
        scheduler = self.schedulers[number]
        tasks = scheduler.schedule()
        self.in_flight[number] += 1
        self.crew.order(number, orders_of(tasks), scheduler.taken)

    def take(self, number: int, record: OutputRecord) -> list[Finished]:
        """Take a group's output over; the requests that ended with it."""
        self.steps += 1
        self.in_flight[number] -= 1
        ended = self.schedulers[number].update(record)
        self._on_record(record)
        return ended

    def lose(self, error: RankLost, take: Callable[[int, OutputRecord], None]) -> None:
        """After a loss: have what is still delivered taken, end the crew, and have ``error`` name what was not."""
        for number, record in self.crew.rest():
            if self.in_flight[number]:
                take(number, record)
        unfinished = [one for scheduler in self.schedulers for one in scheduler.unfinished]
        missing = [(one.request_id, len(one.generated), -1) for one in unfinished]
        error.undelivered = (*self.crew.undelivered, *missing)
        self.crew.close()

    def withdraw(self) -> tuple[list[Request], list[Finished]]:
        """Of a team that is lost: the requests as they go on elsewhere, in the order of groups, and the ends of those
        that were to be aborted."""
        found = [scheduler.withdraw() for scheduler in self.schedulers]
        return [one for going_on, _ in found for one in going_on], [one for _, ended in found for one in ended]

    @property
    def preemptions(self) -> int:
        """How many there were in all groups."""
        return sum(scheduler.preemptions for scheduler in self.schedulers)

    @property
    def most_running(self) -> int:
        """Most requests that ran at once, each group's own most together."""
        return sum(scheduler.most_running for scheduler in self.schedulers)
