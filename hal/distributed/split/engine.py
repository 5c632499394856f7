"""The engine of a prefill/decode split: one front, workers of two roles, and requests that move between them.

A prefill worker with room takes the first request that waits; a decode worker is asked for room at once, and again
until one has it. Blocks move from rank to rank; what the engine hears and decides of that is in
:mod:`hal.distributed.split.moves`, by the table of :mod:`hal.distributed.split.states`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import zmq
from hal_core import FinishReason, HalError, InvalidValue, OutputRecord, Request, SplitRole, Unavailable
from hal_core.handover import check_facts

from hal.distributed.errors import RankLost
from hal.engine import Finished
from hal.engine.roles import DecodeScheduler, PrefillScheduler

from .moves import Bounds, Moves
from .states import HELD, State
from .worker import SplitWorker

if TYPE_CHECKING:
    from hal.distributed.abilities import Abilities

_WAIT_SECONDS = 0.1
Worker: TypeAlias = SplitWorker[PrefillScheduler] | SplitWorker[DecodeScheduler]
Wait = Callable[[Sequence[Any], float], None]


def wait_for(sockets: Sequence[Any], seconds: float) -> None:
    """Wait until one of ``sockets`` can be read, at most so many seconds."""
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    poller.poll(int(1000 * seconds))


class SplitEngine:
    """Generates for any number of requests at once, as :class:`hal.distributed.engine.RanksEngine` does. One thread
    calls it.

    - ``workers``: those of both roles, started here. Each that is lost is started again while ``restarts`` last, all
      workers together; the others go on meanwhile.
    - ``check``: raises :class:`InvalidValue` for a request that can never run.
    - ``on_record``: is handed each record that is delivered, in the order of its request.
    - ``note``: is told of each worker that is lost, in words. ``drafts`` False: those of a first token stay behind, as
      they must where what they were drawn from counts.
    - ``bounds``, ``clock``, ``wait``: how long is waited for what, by which clock, and how.
    """

    def __init__(
        self,
        prefill: Sequence[SplitWorker[PrefillScheduler]],
        decode: Sequence[SplitWorker[DecodeScheduler]],
        check: Callable[[Request], object],
        *,
        restarts: int = 0,
        on_record: Callable[[OutputRecord], None] | None = None,
        note: Callable[[str], None] = lambda _: None,
        drafts: bool = True,
        bounds: Bounds | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Wait = wait_for,
    ) -> None:
        self.workers: tuple[Worker, ...] = (*prefill, *decode)
        self._check, self._restarts_left, self.restarts = check, restarts, 0
        self._on_record = on_record or (lambda record: None)
        self._bounds, self._clock, self._wait = bounds or Bounds(), clock, wait
        self._ended: list[Finished] = []
        self.moves = Moves(clock, self._bounds, self._ended.append)
        self.steps = 0
        self._note, self._with_drafts = note, drafts
        self._last_loss = "none came up"
        self.undelivered: list[tuple[str, int, int]] = []
        """What the reader of a sink besides the engine's has not acknowledged."""
        self._former = (0, 0, 0), 0, 0  # drafts, preemptions, most running of crews that were lost
        self._alone_since: dict[SplitRole, float] = {}
        self._changed = False
        self.drafted: Counter[str] = Counter()
        """How many drafts were made for each request; complete when its end is told."""
        try:
            for worker in self.workers:
                worker.drafted, worker.restarts = self.drafted, lambda: self._restarts_left > 0
                worker.start()
            while any(worker.team is None for worker in self.workers):
                self._start_all()
            self._compare()
        except BaseException as error:
            if isinstance(error, InvalidValue | Unavailable):
                for worker in self.workers:
                    worker.refuse(error)
            self.close()
            raise

    # -- the start ------------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        """Go on with the first start, of which a loss is an error unless workers may be started again."""
        for worker in self.workers:
            if worker.team is None:
                try:
                    worker.assemble(self._on_record)
                except (RankLost, Unavailable):
                    if not self._may_restart():
                        raise
                    worker.start()
        self._sort_workers()
        self._wait_for_workers(_WAIT_SECONDS)

    def _compare(self) -> None:
        """Raise :class:`InvalidValue` for ranks whose blocks are not alike, by the first fact that differs (G31)."""
        first = self.workers[0]
        for worker in self.workers[1:]:
            for rank, (mine, its) in enumerate(zip(first.peers, worker.peers, strict=True)):
                check_facts(mine.facts, its.facts, f"{worker.name}, rank {rank},", "--split")

    def _sort_workers(self) -> None:
        up = [worker for worker in self.workers if worker.team is not None]
        self.moves.prefill = [one for one in up if one.role is SplitRole.PREFILL]  # type: ignore[misc]
        self.moves.decode = [one for one in up if one.role is SplitRole.DECODE]  # type: ignore[misc]

    def _may_restart(self) -> bool:
        if not self._restarts_left:
            return False
        self._restarts_left -= 1
        self.restarts += 1
        return True

    # -- what is known --------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while there is something that ``step`` has to do or to tell."""
        return bool(self.moves.journeys or self._ended)

    @property
    def abilities(self) -> Abilities:
        """Of the workers' device."""
        crews = [worker.crew for worker in self.workers if worker.crew is not None and worker.team is not None]
        return crews[0].abilities

    @property
    def preemptions(self) -> int:
        """How many there were on all workers."""
        return self._former[1] + sum(one.team.preemptions for one in self.workers if one.team is not None)

    @property
    def most_running(self) -> int:
        """Most requests in decode workers' slots at once, each worker's own most together."""
        teams = [worker.team for worker in self.moves.decode if worker.team is not None]
        return max(self._former[2], sum(team.most_running for team in teams))

    @property
    def drafts(self) -> tuple[int, int, int]:
        """What became of drafts, as ranks told at each step: fed, accepted, turns of a slot that decodes."""
        told = [self._former[0]] + [worker.crew.drafts for worker in self.workers if worker.crew is not None]
        fed, accepted, turns = (sum(column) for column in zip(*told, strict=True))
        return fed, accepted, turns

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Take a request. One that can never run ends with an error, told by the next step; others are unaffected."""
        try:
            if request.request_id in self.moves.journeys:
                raise InvalidValue(
                    "a request of that name has not ended yet",
                    cure="choose another name",
                    argument=f"request {request.request_id!r}",
                )
            self._check(request)
        except InvalidValue as error:
            tokens = tuple(request.output)
            self._ended.append(Finished(request.request_id, tokens, FinishReason.ERROR, str(error), reported=False))
        else:
            self.moves.add(request)
        self._changed = True

    def abort(self, request_id: str) -> None:
        """End a request; its end is told by a later step. One that has ended, or never was, is nothing to do."""
        self.moves.abort(request_id)
        self._changed = True

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self) -> list[Finished]:
        """Wait for what comes first, do what follows of it, and give each worker its next step; who has ended."""
        self._wait_for_workers(0.0 if self._changed or self._ended else _WAIT_SECONDS)
        self._changed = False
        for worker in self.workers:
            try:
                self._hear(worker)
            except RankLost as error:
                self._lost(worker, error)
        self.moves.expire()
        self._give_up_alone()
        self.moves.go_on()
        for worker in self.workers:
            try:
                while (team := worker.team) is not None and worker.scheduler.busy and team.waits(0):
                    team.give(0)
            except RankLost as error:
                self._lost(worker, error)
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def run(self) -> Iterator[Finished]:
        """Step until every request has ended; each as it ends."""
        while self.busy:
            yield from self.step()

    def _wait_for_workers(self, seconds: float) -> None:
        self._wait([socket for one in self.workers if one.crew is not None for socket in one.crew.sockets], seconds)

    def _hear(self, worker: Worker) -> None:
        """Take what the worker's ranks have sent; go on with the start of one that is not up."""
        if worker.crew is None:
            return
        if worker.team is None:
            self._go_on_starting(worker)
            return
        crew = worker.crew
        while (found := crew.receive(0.0)) is not None:
            self._take(worker, found[1])
        while crew.said:
            self.moves.hear(crew.said.popleft(), worker)

    def _take(self, worker: Worker, record: OutputRecord) -> None:
        self.steps += 1
        assert worker.team is not None
        ended = worker.team.take(0, record)
        if worker.role is SplitRole.DECODE:
            self.moves.inserted(worker, record)  # type: ignore[arg-type]
        for finished in ended:
            self.moves.finish(finished)
        if worker.role is SplitRole.PREFILL:
            rows = record.rows() if self._with_drafts and record.drafts is not None else ()
            drafts = {row.request_id: tuple(row.drafts.tolist()) for row in rows if row.drafts is not None}
            self.moves.first_tokens(worker, drafts)  # type: ignore[arg-type]

    # -- losses ---------------------------------------------------------------------------------------------------

    def _go_on_starting(self, worker: Worker) -> None:
        try:
            if worker.assemble(self._on_record):
                self._sort_workers()
                self._compare_one(worker)
        except (RankLost, Unavailable, InvalidValue) as error:
            if isinstance(error, InvalidValue):
                worker.refuse(error)
            if worker.crew is not None:
                worker.crew.close()
            worker.lose()
            self._sort_workers()
            self._start_again(worker, error)

    def _compare_one(self, worker: Worker) -> None:
        for other in self.workers:
            if other is not worker and other.team is not None:
                for mine, its in zip(other.peers, worker.peers, strict=True):
                    check_facts(mine.facts, its.facts, worker.name, "--split")

    def _lost(self, worker: Worker, error: RankLost) -> None:
        """A worker is gone: its requests go on with what was delivered, the others do not notice."""
        team, crew = worker.team, worker.crew
        assert team is not None
        assert crew is not None
        team.lose(error, lambda number, record: self._take(worker, record))
        self.undelivered += [one for one in crew.undelivered if one not in self.undelivered]
        drafts = self._former[0]
        self._former = (
            (drafts[0] + crew.drafts[0], drafts[1] + crew.drafts[1], drafts[2] + crew.drafts[2]),
            self._former[1] + team.preemptions,
            self.most_running,
        )
        if worker.role is SplitRole.PREFILL:
            self.moves.lost_prefill(worker)  # type: ignore[arg-type]
        else:
            self.moves.lost_decode(worker)  # type: ignore[arg-type]
        worker.lose()
        self._sort_workers()
        self._start_again(worker, error)

    def _start_again(self, worker: Worker, error: HalError) -> None:
        self._last_loss = f"{worker.name} was lost: {error.what}"
        again = self._may_restart()
        self._note(self._last_loss + ("; it is started again" if again else ""))
        if again:
            try:
                worker.start()
            except (RankLost, Unavailable, InvalidValue) as failed:
                self._note(f"{worker.name} could not be started again: {failed.what}")
                worker.lose()
        self._changed = True

    def _give_up_alone(self) -> None:
        """End requests that need a role of which there has been no worker for too long, and none will come."""
        for role, up in ((SplitRole.PREFILL, self.moves.prefill), (SplitRole.DECODE, self.moves.decode)):
            if up:
                self._alone_since.pop(role, None)
                continue
            since = self._alone_since.setdefault(role, self._clock())
            coming = any(worker.crew is not None for worker in self.workers if worker.role is role)
            if coming and self._clock() - since <= self._bounds.alone:
                continue
            states = frozenset({State.WAITING}) if role is SplitRole.PREFILL else HELD | {State.WAITING}
            why = f"no {role.name.lower()} worker is left" + ("" if not coming else f" for {self._bounds.alone:g} s")
            self.moves.fail(states, f"{why} ({self._last_loss}); give more workers, or --restart")

    # -- the end --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Have all workers end in order, everything sent."""
        for worker in self.workers:
            if worker.crew is not None and worker.team is not None:
                worker.crew.stop()
                self.undelivered += worker.crew.undelivered
        self.close()

    def close(self) -> None:
        """End all workers, at once where they cannot end in order. Idempotent."""
        for worker in self.workers:
            if worker.crew is not None:
                worker.crew.close()
