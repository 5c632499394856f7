"""The engine of several groups of ranks: one front where requests wait, a scheduler for each group behind it.

A request goes to the first group that has a slot and blocks for it now, the least busy first; nobody overtakes the
first one waiting. It stays there, preemptions included. Groups take their steps each at its own pace; with ``dp_sync``
all of them take each step, those without requests with nothing in it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hal_core import FinishReason, InvalidValue, OutputRecord, Request, StateLayout, Unavailable, admit

from hal.engine import Finished, Scheduler
from hal.engine.budget import DEFAULT_CHUNK

from .errors import RankLost
from .team import Team

if TYPE_CHECKING:
    from .abilities import Abilities
    from .crew import Crew
    from .words import Delivery

_WAIT_SECONDS = 0.2


class RanksEngine:
    """Generates for any number of requests at once, as :class:`hal.engine.Engine` does, on ranks. One thread calls it.

    - ``start`` makes the ranks, and makes them anew, at most ``restarts`` times, when some are lost: requests then go
      on from what was delivered.
    - ``on_record`` is handed each record that is delivered, in the order of its request.
    - ``vocab_size``: token ids go from 0 to this number less one; less, where the ranks' runner has fewer.
    """

    def __init__(
        self,
        start: Callable[[], Crew],
        layout: StateLayout,
        blocks: int,
        groups: int,
        *,
        vocab_size: int,
        chunk: int = DEFAULT_CHUNK,
        step_tokens: int | None = None,
        dp_sync: bool = False,
        restarts: int = 0,
        on_record: Callable[[OutputRecord], None] | None = None,
    ) -> None:
        self._start, self._layout, self._blocks, self._groups = start, layout, blocks, groups
        self._vocab_size = vocab_size
        self._chunk, self._step_tokens, self._sync, self._restarts_left = chunk, step_tokens, dp_sync, restarts
        self._on_record = on_record or (lambda record: None)
        self._front: deque[Request] = deque()
        self._names: set[str] = set()
        self._ended: list[Finished] = []
        self._former_preemptions = self._former_running = self.restarts = 0
        self._former_drafts = (0, 0, 0)
        self._former_undelivered: list[Delivery] = []
        self.steps = 0
        self.drafted: Counter[str] = Counter()
        """How many drafts were made for each request; complete when its end is told."""
        self._begin()

    def _begin(self) -> None:
        while True:
            try:
                crew = self._start()
                break
            except (RankLost, Unavailable):
                if not self._restarts_left:
                    raise
                self._count_restart()
        crew.drafted, crew.again = self.drafted, lambda: self._restarts_left > 0
        vocabulary = min(self._vocab_size, crew.abilities.vocab_size)
        admits = partial(admit, layout=self._layout, vocab_size=vocabulary)
        schedulers = [
            Scheduler(self._layout, self._blocks, chunk=self._chunk, step_tokens=self._step_tokens, admit=admits)
            for _ in range(self._groups)
        ]
        self.team = Team(crew, schedulers, self._on_record)

    def _count_restart(self) -> None:
        self._restarts_left -= 1
        self.restarts += 1

    @property
    def crew(self) -> Crew:
        """The ranks that there are now."""
        return self.team.crew

    @property
    def abilities(self) -> Abilities:
        """Of the ranks' device."""
        return self.crew.abilities

    @property
    def undelivered(self) -> Sequence[Delivery]:
        """What the reader of a sink besides the engine's has not acknowledged, of lost ranks too."""
        return [*self._former_undelivered, *self.crew.undelivered]

    def stop(self) -> None:
        """Have the ranks end in order, everything sent."""
        self.crew.stop()

    def close(self) -> None:
        """End the ranks, at once where they cannot end in order. Idempotent."""
        self.crew.close()

    @property
    def schedulers(self) -> Sequence[Scheduler]:
        """One for each group."""
        return self.team.schedulers

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while there is something that ``step`` has to do or to tell."""
        return bool(self._front or self._ended) or any(scheduler.busy for scheduler in self.schedulers)

    @property
    def preemptions(self) -> int:
        """How many there were in all groups."""
        return self._former_preemptions + self.team.preemptions

    @property
    def drafts(self) -> tuple[int, int, int]:
        """What became of drafts, as ranks told at each step, those that were lost before too: fed, accepted, turns of a
        slot that decodes. Of a first rank that is lost the step that it was in does not count."""
        (fed, accepted, turns), more = self._former_drafts, self.crew.drafts
        return fed + more[0], accepted + more[1], turns + more[2]

    @property
    def most_running(self) -> int:
        """Most requests that ran at once, each group's own most together."""
        return max(self._former_running, self.team.most_running)

    def submit(self, request: Request) -> None:
        """Take a request. One that can never run ends with an error, told by the next step; others are unaffected."""
        try:
            if request.request_id in self._names:
                raise InvalidValue(
                    "a request of that name has not ended yet",
                    cure="choose another name",
                    argument=f"request {request.request_id!r}",
                )
            self.schedulers[0].check(request)
        except InvalidValue as error:
            tokens = tuple(request.output)
            self._ended.append(Finished(request.request_id, tokens, FinishReason.ERROR, str(error), reported=False))
        else:
            self._names.add(request.request_id)
            self._front.append(request)

    def abort(self, request_id: str) -> None:
        """End a request; its end is told by a later step. One that has ended, or never was, is nothing to do."""
        for request in self._front:
            if request.request_id == request_id:
                self._front.remove(request)
                self._end(Finished(request_id, tuple(request.output), FinishReason.ABORT, reported=False))
                return
        for scheduler in self.schedulers:
            if (ended := scheduler.abort(request_id)) is not None:
                self._end(ended)

    def _end(self, ended: Finished) -> None:
        self._names.discard(ended.request_id)
        self._ended.append(ended)

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self) -> list[Finished]:
        """Give each group that waits for one its next step, and take what comes first; the requests that have ended.

        Raises :class:`RankLost`, with what was not delivered, when ranks are lost and may not be started again.
        """
        try:
            self._place()
            self._give_steps()
            if any(self.team.in_flight) and (found := self.crew.receive(_WAIT_SECONDS)) is not None:
                self._take(*found)
        except RankLost as error:
            self._recover(error)
        ended, self._ended = self._ended, []
        return ended

    def run(self) -> Iterator[Finished]:
        """Step until every request has ended; each as it ends."""
        while self.busy:
            yield from self.step()

    def _place(self) -> None:
        """Hand the requests of the front to groups that have room, until the first one finds none."""
        while self._front:
            room = [scheduler for scheduler in self.schedulers if scheduler.has_room(self._front[0])]
            if not room:
                return
            min(room, key=lambda scheduler: scheduler.load).add(self._front.popleft())

    def _give_steps(self) -> None:
        """Give groups steps until each has as many under way as it may."""
        while due := self._due():
            for number in due:
                self.team.give(number)

    def _due(self) -> list[int]:
        """The groups that have something to do and may be given one step more."""
        waits = [number for number in range(self._groups) if self.team.waits(number)]
        if not self._sync:
            return [number for number in waits if self.schedulers[number].busy]
        busy = any(scheduler.busy for scheduler in self.schedulers)  # all or none: a forward of one is a forward of all
        return waits if busy and len(waits) == self._groups else []

    def _take(self, number: int, record: OutputRecord) -> None:
        self.steps += 1
        for finished in self.team.take(number, record):
            self._end(finished)

    # -- losses ---------------------------------------------------------------------------------------------------

    def _recover(self, error: RankLost) -> None:
        """Take what is still delivered, then start anew with the requests as they are, or end."""
        self.team.lose(error, self._take)
        if not self._restarts_left:
            waiting = [(request.request_id, len(request.output), -1) for request in self._front]
            error.undelivered = (*error.undelivered, *waiting)
            raise error
        self._count_restart()
        self._former_undelivered += self.crew.undelivered
        self._former_drafts = self.drafts
        self._former_preemptions, self._former_running = self.preemptions, self.most_running
        resumed, ended = self.team.withdraw()
        self._front.extendleft(reversed(resumed))
        for finished in ended:
            self._end(finished)
        try:
            self._begin()
        except (RankLost, Unavailable) as failed:
            missing = [(request.request_id, len(request.output), -1) for request in self._front]
            rank, step = (failed.rank, failed.step) if isinstance(failed, RankLost) else (error.rank, error.step)
            raise RankLost(failed.what, rank, step, missing, cure=failed.cure) from error
