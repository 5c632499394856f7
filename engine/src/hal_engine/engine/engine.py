"""Engine: takes requests and drives workers step by step until every request has ended."""

from __future__ import annotations

import contextlib
import select
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hal_core import (
    FinishReason,
    GroupLost,
    HalError,
    InvalidValue,
    OutputRecord,
    Request,
    SinkClosed,
    SinkFull,
    SplitRole,
    Unavailable,
)

from hal_engine.timeouts import TIMEOUTS

from .front import End, Front, Queue
from .generation import Finished
from .scheduler import NO_LIMITS, Admitted, Limits, Scheduler
from .worker import EngineWorker

if TYPE_CHECKING:
    from hal_engine.stepping import Stepper

Wait = Callable[[Sequence[Any], float], None]


def local_worker(executor: Stepper, limits: Limits = NO_LIMITS, *, overlap: bool = False) -> EngineWorker[Scheduler]:
    """Return the stepper of this process, with its scheduler."""
    scheduler = Scheduler(
        executor.layout,
        executor.blocks,
        limits=limits.preferring(executor.chunk),
        admit=partial(executor.state.admit, vocab_size=executor.vocab_size),  # again after a preemption
        admit_all=executor.admit_all,
        overlap=overlap,
    )
    return EngineWorker(executor, scheduler)


def wait_for(sockets: Sequence[Any], seconds: float) -> None:
    """Wait until one of ``sockets`` can be read, at most so many seconds."""
    poller = select.poll()
    for socket in sockets:
        poller.register(socket, select.POLLIN)
    poller.poll(int(1000 * seconds))


@dataclass(frozen=True)
class _Totals:
    """Counts over all workers, those that were lost among them."""

    drafts: tuple[int, int, int] = (0, 0, 0)
    preemptions: int = 0
    most_running: int = 0
    undelivered: tuple[tuple[str, int, int], ...] = ()


class Engine:
    """Generates for any number of requests at once. One thread calls it.

    ``step`` returns the requests that have ended, each once: with an end token or stop sequence, at their length,
    aborted, or with an error and its message. Tokens leave through the workers' sinks as they come.

    - ``workers``: an executor of this process, whose scheduler has these ``limits``; or workers with schedulers of
      their own, which are started here (:func:`hal_engine.distributed.engine.engine_of_ranks` makes those of ranks).
    - ``overlap``: while the device runs a step, the host takes over the one before it and schedules and launches the
      next one; the end of a request is then known one step later (:func:`hal_engine.stepping.overlap_of` returns
      whether a device and a runner can do so). The host waits for the output of the step before only.
    - ``front``: makes what decides which worker has which request.
    - ``restarts``: how often lost workers are started again. Their requests continue from the tokens that were
      delivered; the other workers keep running.
    - ``on_record``: is given each record that was taken over; ``note``: a line about each worker that is lost.
    """

    def __init__(
        self,
        workers: Stepper | Sequence[EngineWorker[Any]],
        limits: Limits = NO_LIMITS,
        *,
        overlap: bool = False,
        front: Callable[[Sequence[EngineWorker[Any]], End], Front] = Queue,
        restarts: int = 0,
        on_record: Callable[[OutputRecord], object] = lambda record: None,
        note: Callable[[str], object] = lambda text: None,
        wait: Wait = wait_for,
    ) -> None:
        if not isinstance(workers, Sequence):
            workers = (local_worker(workers, limits, overlap=overlap),)
        self.workers = workers
        self.steps = self.restarts = 0
        self.drafted: Counter[str] = Counter()
        """How many drafts ranks made for each request; complete when ``step`` returns its end."""
        self._restarts_left, self._on_record, self._note, self._wait = restarts, on_record, note, wait
        self._names: set[str] = set()
        self._ended: list[Finished] = []
        self._former = _Totals()
        self._losses: dict[str, str] = {}  # worker to how it was lost
        self.front = front(workers, self._end)
        self._start()

    # -- counters ------------------------------------------------------------------------------------------------

    @property
    def worker(self) -> Any:  # noqa: ANN401 (whatever was given)
        """The executor of this process."""
        return self.workers[0].executor

    @property
    def scheduler(self) -> Scheduler:
        """Its scheduler."""
        found: Scheduler = self.workers[0].scheduler
        return found

    @property
    def _totals(self) -> _Totals:
        former, up = self._former, [worker for worker in self.workers if worker.up]
        fed, accepted, turns = (sum(counts) for counts in zip(former.drafts, *(one.drafts for one in up), strict=True))
        serving = [one for worker in up if worker.role is not SplitRole.PREFILL for one in worker.schedulers]
        return _Totals(
            (fed, accepted, turns),
            former.preemptions + sum(one.preemptions for worker in up for one in worker.schedulers),
            max(former.most_running, sum(one.most_running for one in serving)),
            (*former.undelivered, *(one for worker in up for one in worker.undelivered)),
        )

    @property
    def preemptions(self) -> int:
        """How many there were."""
        return self._totals.preemptions

    def load(self) -> tuple[int, int, float]:
        """Return how many requests are in slots, how many wait, and the part of the KV blocks in use, 0 to 1."""
        schedulers = [one for worker in self.workers if worker.up for one in worker.schedulers]
        running = sum(len(one.running) for one in schedulers)
        blocks, free = sum(one.pool.size for one in schedulers), sum(one.pool.free for one in schedulers)
        return running, max(0, len(self._names) - running), 1 - free / blocks if blocks else 0.0

    @property
    def most_running(self) -> int:
        """Most requests in slots at once, each group's own most together; of a split, in those of decode workers."""
        return self._totals.most_running

    @property
    def drafts(self) -> tuple[int, int, int]:
        """What became of drafts so far: fed, accepted, turns of a slot that decodes. Of a first rank that is lost the
        step that it was in does not count."""
        return self._totals.drafts

    @property
    def spent(self) -> list[float | None]:
        """Seconds of all workers so far: processor time of their ranks, and the device's; None if not measured."""
        columns = zip(*(worker.spent for worker in self.workers), strict=True)
        known = [[value for value in column if value is not None] for column in columns]
        return [sum(column) if column else None for column in known]

    @property
    def lost(self) -> str:
        """Which workers are lost, how, and whether they are being started again; "" while all run."""
        down = [worker.name for worker in self.workers if not worker.up]
        return "; ".join(self._losses[name] for name in down if name in self._losses)

    @property
    def undelivered(self) -> Sequence[tuple[str, int, int]]:
        """Tokens that a reader besides the engine has not acknowledged: request, position and count."""
        return tuple(dict.fromkeys(self._totals.undelivered))

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while a request has not ended, or ``step`` has not returned its end."""
        return bool(self._names or self._ended)

    def submit(self, request: Request) -> None:
        """Take a request. If it can never run, the next step returns its end, with an error."""
        self.submit_all((request,))

    def submit_all(self, requests: Sequence[Request]) -> None:
        """Take requests, as :meth:`submit` each, admitted by one call where one worker runs them."""
        for request, admitted in zip(requests, self.front.admit_all(requests), strict=True):
            self._submit(request, admitted)

    def _submit(self, request: Request, admitted: Admitted) -> None:
        name = request.request_id
        try:
            if name in self._names:
                what, cure = "a request of that name has not ended yet", "choose another name"
                raise InvalidValue(what, cure=cure, argument=f"request {name!r}")
            self.front.add(request, admitted)
        except HalError as error:
            tokens, own = tuple(request.output), isinstance(error, InvalidValue)
            self._ended.append(Finished(name, tokens, FinishReason.ERROR, str(error), reported=False, refused=own))
        else:
            self._names.add(name)

    def abort(self, request_id: str) -> None:
        """End a request; a later step returns its end. A name that is unknown, or has ended, is ignored."""
        self.front.abort(request_id)

    def _end(self, ended: Finished) -> None:
        self._names.discard(ended.request_id)
        self._ended.append(ended)

    def withdraw(self) -> tuple[list[Request], list[Finished]]:
        """Take all requests back from a worker that is lost or will take no more steps.

        Returns the requests with their tokens so far, the oldest first, and the ends that no step has returned. The
        outputs of steps in flight are taken over first, as far as they can be read.
        """
        assert isinstance(self.front, Queue)
        with contextlib.suppress(HalError):
            while (found := self.workers[0].executor.receive(0.0)) is not None:
                self._take(self.workers[0], *found)
        going_on = self.front.withdraw()
        self._names.clear()
        ended, self._ended = self._ended, []
        return going_on, ended

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self) -> list[Finished]:
        """Give workers their next steps and take over outputs; return the requests that have ended.

        Raises the errors of launching and taking a step, and :class:`GroupLost`, with the tokens that were not
        delivered, if ranks are lost and not started again. After :class:`hal_core.errors.SinkFull` and
        :class:`hal_core.errors.SinkClosed` the step is launched all the same, and the caller may continue.
        """
        self.front.go_on()
        trouble: SinkFull | SinkClosed | None = None
        more: list[int] = []  # groups that may have another step before anything is waited for
        for worker in self.workers:
            try:
                trouble = worker.give() or trouble
                more += worker.due
            except GroupLost as error:
                self._lost(worker, error)
        if not more:
            self._receive()
        if trouble is not None:
            raise trouble
        ended, self._ended = self._ended, []
        return ended

    def run(self) -> Iterator[Finished]:
        """Step until every request has ended; each as it ends."""
        while self.busy:
            yield from self.step()

    def _receive(self) -> None:
        """Take over outputs; wait for one if requests run and no end is to be returned. Idle ranks are polled too: they
        may be lost, and those on other hosts need the engine's heartbeat."""
        patience = TIMEOUTS.look if self._names and not self._ended else 0.0
        alone = len(self.workers) == 1 and self.workers[0].up  # its executor waits, and gives one output at a time
        if not alone:
            self._wait([socket for worker in self.workers for socket in worker.sockets], patience)
        for worker in self.workers:
            try:
                if not worker.up:
                    self._assemble(worker)
                elif not alone:
                    while (found := worker.executor.receive(0.0)) is not None:
                        self._take(worker, *found)
                elif (worker.busy or worker.sockets) and (found := worker.executor.receive(patience)) is not None:
                    self._take(worker, *found)
                while worker.progress:
                    self.front.on_message(worker.progress.popleft(), worker)
            except GroupLost as error:
                self._lost(worker, error)

    def _take(self, worker: EngineWorker[Any], number: int, record: OutputRecord) -> None:
        self.steps += 1
        ended = worker.take(number, record)
        self._on_record(record)
        self.front.took(worker, record, ended)

    # -- starts and losses ----------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start all workers; a loss is an error here unless workers may be started again."""
        try:
            for worker in self.workers:
                worker.drafted, worker.restarts = self.drafted, lambda: self._restarts_left > 0
                self._begin(worker)
            while late := [worker for worker in self.workers if not self._assembled(worker)]:
                self._wait([socket for worker in late for socket in worker.sockets], TIMEOUTS.look)
            self.front.begin()
        except BaseException as error:
            if isinstance(error, InvalidValue | Unavailable):
                for worker in self.workers:
                    worker.refuse(error)
            self.close()
            raise

    def _begin(self, worker: EngineWorker[Any]) -> None:
        """Begin to start a worker, again while restarts are left."""
        while True:
            try:
                return worker.start()
            except (GroupLost, Unavailable):
                if not self._may_restart():
                    raise

    def _assembled(self, worker: EngineWorker[Any]) -> bool:
        try:
            return worker.assemble()
        except (GroupLost, Unavailable):
            if not self._may_restart():
                raise
            self._begin(worker)
            return False

    def _may_restart(self) -> bool:
        if not self._restarts_left:
            return False
        self._restarts_left -= 1
        self.restarts += 1
        return True

    def _assemble(self, worker: EngineWorker[Any]) -> None:
        """Continue the start of a worker that was lost, if it is started again."""
        try:
            if worker.assemble():
                self.front.came_up(worker)
        except (GroupLost, Unavailable, InvalidValue) as error:
            if isinstance(error, InvalidValue):
                worker.refuse(error)
            self._gone(worker, error)

    def _lost(self, worker: EngineWorker[Any], error: GroupLost) -> None:
        """Handle the loss of a worker: its requests continue from the tokens that were delivered."""
        for number, record in worker.rest(error):
            self._take(worker, number, record)
        self._former = self._totals
        self._gone(worker, error)

    def _gone(self, worker: EngineWorker[Any], error: HalError) -> None:
        while True:
            self.front.lost(worker, error)
            worker.lose()
            again = not isinstance(error, InvalidValue) and self._may_restart()
            self._losses[worker.name] = f"{worker.name} was lost: {error.what}" + "; it is started again" * again
            self._note(self._losses[worker.name])
            if not again:
                return self.front.forsaken(error)
            try:
                return worker.start()
            except (GroupLost, Unavailable, InvalidValue) as failed:
                error = failed

    # -- the end --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all ranks in order, everything sent; those that are not up at once."""
        self._all_at_once(lambda worker: worker.stop())

    def close(self) -> None:
        """End all ranks, at once where they cannot end in order. Idempotent."""
        self._all_at_once(lambda worker: worker.close())

    def _all_at_once(self, end: Callable[[EngineWorker[Any]], None]) -> None:
        """Call ``end`` for all workers at once: each waits for the end of its ranks."""
        if len(self.workers) == 1:
            return end(self.workers[0])
        with ThreadPoolExecutor(len(self.workers), "hal-worker-end") as threads:
            for done in [threads.submit(end, worker) for worker in self.workers]:
                done.result()
        return None
