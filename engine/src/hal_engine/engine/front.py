"""Where requests wait before a worker has them, and what decides which worker gets each."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hal_core import FinishReason, HalError, OutputRecord, Request

from .generation import Finished, Generation

if TYPE_CHECKING:
    from .scheduler import Admitted, Scheduler
    from .worker import EngineWorker

End = Callable[[Finished], None]
"""Books the end of a request, once."""


def _priority(generation: Generation) -> int:
    return generation.request.priority


class Front(Protocol):
    """Decides which worker has which request. :class:`Queue` is for one worker; a prefill/decode split moves requests
    between several (:class:`hal_engine.distributed.split.migration.Migration`)."""

    def begin(self) -> None:
        """Take note that all workers are up. Raises :class:`InvalidValue` if they do not fit together."""

    def admit_all(self, requests: Sequence[Request]) -> Sequence[Admitted]:
        """Admit requests by one call, for :meth:`add`; None for each that is admitted there."""

    def add(self, request: Request, admitted: Admitted = None) -> None:
        """Take a request. Raises :class:`InvalidValue`, with the cure, if it can never run."""

    def abort(self, request_id: str) -> None:
        """End a request, now or with a later record. Unknown names are ignored."""

    def go_on(self) -> None:
        """Hand requests to workers that have room."""

    def came_up(self, worker: Any) -> None:  # noqa: ANN401 (each front has workers of its own kind)
        """Take note that a worker was started again. Raises :class:`InvalidValue` if it does not fit the other ones."""

    def took(self, worker: Any, record: OutputRecord, ended: list[Finished]) -> None:  # noqa: ANN401
        """Take note of a worker's output, which was taken over, and of the requests that ended with it."""

    def on_message(self, message: Any, worker: Any) -> None:  # noqa: ANN401
        """Take a message of a rank about a request that moves."""

    def lost(self, worker: Any, error: HalError) -> None:  # noqa: ANN401
        """Take back the requests of a worker that is lost."""

    def forsaken(self, error: HalError) -> None:
        """Handle a worker that is not restarted; raise ``error`` if no request can continue."""


class Queue:
    """Serves by priority, the lower first, then in the order of arrival, in front of one worker. A request goes to the
    least busy group that has a slot and blocks for it now, and stays there; no request overtakes the first one waiting.
    One group has its own queue."""

    def __init__(self, workers: Sequence[EngineWorker[Scheduler]], end: End) -> None:
        (self._worker,) = workers
        self._end = end
        self._waiting: deque[Generation] = deque()

    def begin(self) -> None:
        """One worker fits itself."""

    def came_up(self, worker: EngineWorker[Scheduler]) -> None:
        """As :meth:`begin`."""

    def admit_all(self, requests: Sequence[Request]) -> Sequence[Admitted]:
        """See :class:`Front`."""
        return self._worker.scheduler.admit_all(requests)

    def add(self, request: Request, admitted: Admitted = None) -> None:
        """See :class:`Front`."""
        self._wait(request, admitted)
        self.go_on()

    def _wait(self, request: Request, admitted: Admitted = None) -> None:
        checked = self._worker.scheduler.check(request, admitted)
        self._waiting.insert(bisect(self._waiting, request.priority, key=_priority), checked)

    def abort(self, request_id: str) -> None:
        """See :class:`Front`."""
        for one in self._waiting:
            if one.request_id == request_id:
                self._waiting.remove(one)
                self._end(one.finished(FinishReason.ABORT, reported=False))
                return
        for scheduler in self._worker.schedulers:
            if (ended := scheduler.abort(request_id)) is not None:
                self._end(ended)

    def go_on(self) -> None:
        """Hand over requests until the first one finds no room."""
        schedulers = self._worker.schedulers
        while self._waiting and self._worker.up:
            first = self._waiting[0]
            room = [one for one in schedulers if len(schedulers) == 1 or one.has_room(first.request)]
            if not room:
                return
            min(room, key=lambda scheduler: scheduler.load).enqueue(self._waiting.popleft())

    def took(self, worker: EngineWorker[Scheduler], record: OutputRecord, ended: list[Finished]) -> None:
        """See :class:`Front`."""
        for finished in ended:
            self._end(finished)

    def on_message(self, message: object, worker: EngineWorker[Scheduler]) -> None:
        """No request moves."""

    def lost(self, worker: EngineWorker[Scheduler], error: HalError) -> None:
        """See :class:`Front`; ``error.undelivered`` then names the tokens that were not delivered."""
        unfinished = [one for scheduler in worker.schedulers for one in scheduler.unfinished]
        missing = [(one.request_id, len(one.generated), -1) for one in (*unfinished, *self._waiting)]
        error.undelivered = (*worker.undelivered, *missing)  # type: ignore[attr-defined]
        for request in self.withdraw():
            self._wait(request)

    def forsaken(self, error: HalError) -> None:
        """The only worker is lost."""
        raise error

    def withdraw(self) -> list[Request]:
        """Take all requests back, as they continue elsewhere, the oldest first; those to be aborted end."""
        going_on, ended = self._worker.withdraw()
        for finished in ended:
            self._end(finished)
        found = [*going_on, *(one.request for one in self._waiting)]
        self._waiting.clear()
        return found
