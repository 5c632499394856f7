"""The engine: drives one worker, step by step, until every request has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from hal_core import (
    AdmittedRequest,
    FinishReason,
    HalError,
    InvalidValue,
    OutputRecord,
    Request,
    StateLayout,
    Task,
)

from hal.stepping import Launched

from .budget import DEFAULT_CHUNK
from .generation import Finished
from .scheduler import Scheduler


class Steps(Protocol):
    """What the engine asks of a worker; :class:`hal.stepping.Stepper` is one."""

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

    def launch(self, tasks: list[Task]) -> Launched:
        """Put a step on the device."""

    def take(self, launched: Launched) -> OutputRecord:
        """Wait for a step's output and take it over; each step once, in their order."""


class Engine:
    """Generates for any number of requests at once. One thread calls it.

    ``step`` returns the requests that have ended, each once: with an end token or stop sequence, at their length,
    aborted, or with an error and its message. Tokens leave through the worker's sink as they come.

    ``overlap``: while the device runs a step, the host takes over the one before it and schedules, inserts and launches
    the next one; the end of a request is then known one step later (:func:`hal.stepping.overlap_of` says whether it can
    be). The host waits for the output of the step before, and for nothing else.
    ``on_record`` is called with each record that was taken, in the order of the steps.
    """

    def __init__(
        self,
        worker: Steps,
        *,
        chunk: int = DEFAULT_CHUNK,
        step_tokens: int | None = None,
        overlap: bool = False,
        on_record: Callable[[OutputRecord], None] | None = None,
    ) -> None:
        self.worker, self.overlap = worker, overlap
        self._on_record = on_record or (lambda record: None)
        self.scheduler = Scheduler(
            worker.layout, worker.blocks, chunk=chunk, step_tokens=step_tokens, admit=worker.admit, overlap=overlap
        )
        self.steps = 0
        self._before: Launched | None = None
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
        """End a request; its end is told by a later step. One that has ended, or never was, is nothing to do."""
        if (ended := self.scheduler.abort(request_id)) is not None:
            self._ended.append(ended)

    def step(self) -> list[Finished]:
        """One turn of the loop if there is work; the requests that have ended since the step before.

        Raises what launching or taking a step does. After :class:`hal_core.errors.SinkFull` and
        :class:`hal_core.errors.SinkClosed` it is launched all the same, and who catches that may go on.
        """
        if self.scheduler.busy:
            self._turn(self._before)
        ended, self._ended = self._ended, []
        return ended

    def withdraw(self) -> tuple[list[Request], list[Finished]]:
        """Take all requests back, of a worker that is lost or will take no more steps: each as it goes on elsewhere,
        the oldest first, and the ends that were not told yet. What the step under way has given counts, if it is whole.
        """
        before, self._before = self._before, None
        if before is not None:
            with contextlib.suppress(HalError):
                self._take(before)
        going_on, ended = self.scheduler.withdraw()
        ended, self._ended = self._ended + ended, []
        return going_on, ended

    def run(self) -> Iterator[Finished]:
        """Step until every request has ended; each as it ends."""
        while self.busy:
            yield from self.step()

    def _turn(self, before: Launched | None) -> None:
        """Launch the next step, then take over the step before, which ran until now."""
        launched = self.worker.launch(self.scheduler.schedule())
        self._before, due = None, before if self.overlap else launched
        if due is not None:
            self._take(due)
        if self.overlap:
            self._before = launched
        if launched.trouble is not None:
            raise launched.trouble

    def _take(self, launched: Launched) -> None:
        record = self.worker.take(launched)
        self._ended += self.scheduler.update(record)
        self.steps += 1
        self._on_record(record)
