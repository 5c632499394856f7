"""The loop of a rank that is told its steps by an engine elsewhere: each is taken once the next one is launched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hal_core import OutputRecord, Task

    from .stepper import Launched, Stepper


class StepsAhead:
    """The steps of one rank that are under way, at most one after each :meth:`step`.

    ``told``: is handed the output of each step, once, as soon as it was waited for.
    """

    def __init__(self, stepper: Stepper, told: Callable[[OutputRecord], None] = lambda _: None) -> None:
        self._stepper, self._told = stepper, told
        self._under_way: deque[Launched] = deque()
        self._told_number = -1

    def step(self, tasks: Sequence[Task], taken: int) -> None:
        """Launch the next step, and take the one before.

        ``taken``: of how many steps the engine had taken the output when it made ``tasks``. What ended with those
        leaves its slots first, so that others may enter. Raises as :class:`hal.stepping.Stepper` does.
        """
        self.catch_up(taken)
        launched = self._stepper.launch(tasks)
        while self._under_way:
            self._take()
        self._under_way.append(launched)
        if launched.trouble is not None:
            raise launched.trouble

    def catch_up(self, taken: int) -> None:
        """Take the steps of which the engine had taken the output, as it had that of ``taken``."""
        while self._under_way and self._under_way[0].step.number < taken:
            self._take()

    @property
    def waiting(self) -> bool:
        """True while a step is under way whose output nobody has waited for."""
        return bool(self._under_way) and not self._under_way[-1].ticket.ready()

    @property
    def untold(self) -> bool:
        """True while a step is under way whose output was not told."""
        return bool(self._under_way) and self._under_way[-1].step.number > self._told_number

    def tell(self) -> None:
        """Tell the output of steps that are done, without waiting for the others."""
        for launched in self._under_way:
            if launched.ticket.ready():
                self._tell(launched, launched.ticket.record())

    def idle(self) -> None:
        """No further step comes for now: wait for the output of the last one, as whoever else is to have it may need
        this rank's part. It is not taken: what ended with it leaves its slot when the engine knows."""
        for launched in self._under_way:
            self._tell(launched, launched.ticket.record())

    def _take(self) -> None:
        launched = self._under_way.popleft()
        self._tell(launched, self._stepper.take(launched))

    def _tell(self, launched: Launched, record: OutputRecord) -> None:
        if launched.step.number > self._told_number:
            self._told_number = launched.step.number
            self._told(record)
