"""One-step-ahead loop of a rank driven by a remote engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hal_core import OutputRecord, Task

    from .stepper import Launched, Stepper


class AsyncLoop:
    """The steps in flight of one rank, at most one after each :meth:`step`.

    ``on_record``: is called with the output of each step, once, as soon as that is available.
    """

    def __init__(self, stepper: Stepper, on_record: Callable[[OutputRecord], None] = lambda _: None) -> None:
        self._stepper, self._on_record = stepper, on_record
        self._under_way: deque[Launched] = deque()
        self._last_passed = -1

    def step(self, tasks: Sequence[Task], taken: int) -> None:
        """Launch the next step, and take the one before.

        ``taken``: of how many steps the engine had taken the output when it made ``tasks``. Requests that ended in
        those leave their slots first, so that new ones may enter. Raises as :class:`hal_engine.stepping.Stepper` does.
        """
        self.catch_up(taken)
        launched = self._stepper.launch(tasks)
        while self._under_way:
            self._take()
        self._under_way.append(launched)
        if launched.trouble is not None:
            raise launched.trouble

    def catch_up(self, taken: int) -> None:
        """Take the steps whose output the engine had taken."""
        while self._under_way and self._under_way[0].step.number < taken:
            self._take()

    @property
    def waiting(self) -> bool:
        """True if a step is in flight whose output was not waited for."""
        return bool(self._under_way) and not self._under_way[-1].ticket.ready()

    @property
    def untold(self) -> bool:
        """True if a step is in flight whose output was not passed on."""
        return bool(self._under_way) and self._under_way[-1].step.number > self._last_passed

    def tell(self) -> None:
        """Pass on the output of steps that are done, without waiting for the rest."""
        for launched in self._under_way:
            if launched.ticket.ready():
                self._tell(launched, launched.ticket.record())

    def idle(self) -> None:
        """Wait for the output of the last step when no further step comes, because other ranks may need this rank's
        part. The step is not taken yet: its ended requests leave their slots when the engine has the output."""
        for launched in self._under_way:
            self._tell(launched, launched.ticket.record())

    def _take(self) -> None:
        launched = self._under_way.popleft()
        self._tell(launched, self._stepper.take(launched))

    def _tell(self, launched: Launched, record: OutputRecord) -> None:
        if launched.step.number > self._last_passed:
            self._last_passed = launched.step.number
            self._on_record(record)
