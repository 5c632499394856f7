"""The engine: drives one worker, step by step, until every request has ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from hal_core import (
    AdmittedRequest,
    FinishReason,
    InvalidValue,
    OutputRecord,
    Request,
    SinkClosed,
    SinkFull,
    StateLayout,
    Task,
)

from .generation import Finished
from .scheduler import DEFAULT_CHUNK, Scheduler


class Steps(Protocol):
    """What the engine asks of a worker; :class:`hal.worker.Worker` is one."""

    @property
    def layout(self) -> StateLayout:
        """The layout of the state that requests are admitted to."""

    @property
    def blocks(self) -> int:
        """KV blocks of the model's cache."""

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to this number less one."""

    def admit(self, request: Request) -> AdmittedRequest:
        """Check a request and pack it for the state."""

    def step(self, tasks: list[Task]) -> OutputRecord:
        """Run one step. On :class:`SinkFull` and :class:`SinkClosed` it is done, and its record is in ``last``."""

    @property
    def last(self) -> OutputRecord | None:
        """The record of the last step that was done."""


class Engine:
    """Generates for any number of requests at once. One thread calls it.

    ``step`` returns the requests that have ended, each once: with an end token or stop sequence, at their length,
    aborted, or with an error and its message. Tokens leave through the worker's sink as they come.
    """

    def __init__(self, worker: Steps, *, chunk: int = DEFAULT_CHUNK) -> None:
        self.worker = worker
        self.scheduler = Scheduler(worker.layout, worker.blocks, chunk=chunk, admit=worker.admit)
        self.steps = 0
        self._ended: list[Finished] = []

    @property
    def busy(self) -> bool:
        """True while there is something that ``step`` has to do or to tell."""
        return self.scheduler.busy or bool(self._ended)

    def submit(self, request: Request) -> None:
        """Take a request. One that can never run ends with an error, told by the next step; others are unaffected."""
        try:
            self.scheduler.add(request)
        except InvalidValue as error:
            tokens = tuple(request.output)
            self._ended.append(Finished(request.request_id, tokens, FinishReason.ERROR, str(error), reported=False))

    def abort(self, request_id: str) -> None:
        """End a request; its end is told by the next step. One that has ended, or never was, is nothing to do."""
        if (ended := self.scheduler.abort(request_id)) is not None:
            self._ended.append(ended)

    def step(self) -> list[Finished]:
        """Run one step of the worker if there is work; the requests that have ended since the step before."""
        ended, self._ended = self._ended, []
        if not self.scheduler.busy:
            return ended
        tasks = self.scheduler.schedule()
        try:
            record = self.worker.step(tasks)
        except (SinkFull, SinkClosed):  # the step is done all the same, and counts; who catches this may go on
            assert self.worker.last is not None
            self._ended = ended + self._take(self.worker.last)
            raise
        return ended + self._take(record)

    def run(self) -> Iterator[Finished]:
        """Step until every request has ended; each as it ends."""
        while self.busy:
            yield from self.step()

    def _take(self, record: OutputRecord) -> list[Finished]:
        self.steps += 1
        return self.scheduler.update(record)
