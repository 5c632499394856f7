"""The caller's watch over an engine process, by the beats of its channel, which name the step in progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hal_engine.timeouts import TIMEOUTS

if TYPE_CHECKING:
    from hal_engine.transport.channel import Channel


class PulseWatch:
    """Counts how long an engine process was silent, and how long its step lasts. ``clock``: seconds. Of a time in which
    the caller itself was stopped a quarter of each limit counts at most."""

    def __init__(self, channel: Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel, self._clock = channel, clock
        self._heard = channel.heard
        self._looked = clock()
        self._silence = self._in_step = 0.0
        self._step = 0

    def begin(self) -> None:
        """Let the silence count from now on."""
        self._silence, self._looked = 0.0, self._clock()

    def look(self) -> None:
        """Count the time since the last look."""
        now = self._clock()
        passed, self._looked = now - self._looked, now
        silence, in_step = (min(passed, limit / 4) for limit in (TIMEOUTS.process_silence, TIMEOUTS.step))
        self._silence = self._silence + silence if self._channel.heard == self._heard else 0.0
        self._heard, step = self._channel.heard, self._channel.number
        self._in_step = self._in_step + in_step if step == self._step else 0.0
        self._step = step

    @property
    def silent(self) -> bool:
        """Whether no beat has come for ``TIMEOUTS.process_silence``."""
        return self._silence > TIMEOUTS.process_silence

    @property
    def late(self) -> int:
        """The number of a step that has lasted longer than ``TIMEOUTS.step``, as far as known; 0 without one."""
        return self._step if self._in_step > TIMEOUTS.step else 0
