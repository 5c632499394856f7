"""One beat a channel: the signs of life by which a peer that hangs, or whose host has vanished, is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.channel import Channel


class Beats:
    """A thread that sends signs of life on ``channels()``, whatever this process's other threads do, and what waits
    there. ``number``: is sent along. ``silence``: seconds after which a peer is lost (``TIMEOUTS.silence``); several
    signs come in them, even if they are fewer than ``TIMEOUTS.beat``."""

    def __init__(
        self,
        channels: Callable[[], Iterable[Channel]],
        number: Callable[[], int] = lambda: 0,
        silence: float | None = None,
    ) -> None:
        self._channels, self._number, self._silence, self._over = channels, number, silence, threading.Event()
        self._thread = threading.Thread(target=self._run, name="hal-beat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(min(TIMEOUTS.beat, (self._silence or TIMEOUTS.silence) / 4)):
            for channel in self._channels():
                channel.beat(self._number())
                channel.flush(0.0)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._over.set()
        self._thread.join()
