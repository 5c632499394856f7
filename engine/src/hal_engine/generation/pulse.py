"""Heartbeat of an engine process through a pipe, with the number of the step that it is in."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable

from hal_engine.timeouts import TIMEOUTS

_BEAT = struct.Struct("<q")
_READ = _BEAT.size * 512


class Pulse:
    """The engine process's end: a thread of its own beats, whatever the process's steps do. ``step``: the number of the
    step in progress, from 1; 0 between steps. The owner sets it."""

    def __init__(self, descriptor: int) -> None:
        self.step = 0
        self._descriptor, self._over = descriptor, threading.Event()
        os.set_blocking(descriptor, False)
        threading.Thread(target=self._beat, name="hal-engine-pulse", daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(TIMEOUTS.process_beat):
            with contextlib.suppress(BlockingIOError):  # the caller reads nothing: it is stopped
                os.write(self._descriptor, _BEAT.pack(self.step))

    def close(self) -> None:
        """Beat no more."""
        self._over.set()


class PulseWatch:
    """The caller's end. ``clock``: seconds. Time in which the caller itself was stopped does not count."""

    def __init__(self, descriptor: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._descriptor, self._clock = descriptor, clock
        os.set_blocking(descriptor, False)
        self._looked = clock()
        self._silence = self._in_step = 0.0
        self._step = 0

    def begin(self) -> None:
        """Let the silence count from now on."""
        self._silence, self._looked = 0.0, self._clock()

    def look(self) -> None:
        """Read what came, and count the time since the last look."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, TIMEOUTS.longest_look), now
        beats = b""
        with contextlib.suppress(BlockingIOError):
            beats = os.read(self._descriptor, _READ)
        self._silence = 0.0 if beats else self._silence + passed
        (step,) = _BEAT.unpack(beats[-_BEAT.size :]) if beats else (self._step,)
        self._in_step = self._in_step + passed if step == self._step else 0.0
        self._step = step

    @property
    def silent(self) -> bool:
        """Whether no beat has come for ``TIMEOUTS.process_silence``."""
        return self._silence > TIMEOUTS.process_silence

    @property
    def late(self) -> int:
        """The number of a step that has lasted longer than ``TIMEOUTS.step``, as far as known; 0 without one."""
        return self._step if self._in_step > TIMEOUTS.step else 0
