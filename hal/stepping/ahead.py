"""The loop of a rank that is told its steps by an engine elsewhere: each is taken once the next one is launched."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hal_core import Task

    from .stepper import Launched, Stepper


class StepsAhead:
    """The steps of one rank that are under way, at most one after each :meth:`step`."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._under_way: deque[Launched] = deque()

    def step(self, tasks: Sequence[Task], taken: int) -> None:
        """Launch the next step, and take the one before.

        ``taken``: of how many steps the engine had taken the output when it made ``tasks``. What ended with those
        leaves its slots first, so that others may enter. Raises as :class:`hal.stepping.Stepper` does.
        """
        while self._under_way and self._under_way[0].step.number < taken:
            self._stepper.take(self._under_way.popleft())
        launched = self._stepper.launch(tasks)
        while self._under_way:
            self._stepper.take(self._under_way.popleft())
        self._under_way.append(launched)
        if launched.trouble is not None:
            raise launched.trouble

    @property
    def waiting(self) -> bool:
        """True while a step is under way whose output nobody has waited for."""
        return bool(self._under_way) and not self._under_way[-1].ticket.ready()

    def idle(self) -> None:
        """No further step comes for now: wait for the output of the last one, as whoever else is to have it may need
        this rank's part. It is not taken: what ended with it leaves its slot when the engine knows."""
        for launched in self._under_way:
            launched.ticket.record()
