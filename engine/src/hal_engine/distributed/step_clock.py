"""Detects a group whose step lasts longer than allowed."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepClock:
    """Measures the oldest step in flight of each of ``groups``. ``clock``: seconds. Of a time in which the engine
    itself was stopped, perhaps with its ranks, a quarter of the limit counts at most."""

    def __init__(self, groups: int, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self._clock, self._looked = limit, clock, clock()
        self._under_way, self._seconds = [0] * groups, [0.0] * groups

    def given(self, group: int) -> None:
        """Note that a step was sent to a group."""
        self._look()
        self._under_way[group] += 1

    def taken(self, group: int) -> None:
        """Note the output of a group's oldest step; the next one begins."""
        self._look()
        self._under_way[group] -= 1
        self._seconds[group] = 0.0

    def late(self) -> int | None:
        """Return a group whose step has lasted longer than the limit, or None."""
        self._look()
        return next((group for group, seconds in enumerate(self._seconds) if seconds > self.limit), None)

    def _look(self) -> None:
        now = self._clock()
        passed, self._looked = min(now - self._looked, self.limit / 4), now
        for group, count in enumerate(self._under_way):
            if count > 0:
                self._seconds[group] += passed
