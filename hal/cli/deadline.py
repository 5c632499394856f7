"""Deadline of a signal: ends a command by force if it is still running so long after the first signal.

The interpreter runs signal handlers in the main thread, between two instructions. A main thread that waits in a library
never runs them, and one whose step hangs has noted the signal and still waits. Therefore a thread reads signal numbers
from a pipe, which the interpreter writes at once (``signal.set_wakeup_fd``).
"""

from __future__ import annotations

import os
import signal
import sys
import threading

TYPE_CHECKING = False  # as in hal
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from hal.timeouts import Timeouts


grace = 0.0
"""Seconds that work may still take after a signal, before the deadline begins: ``hal serve --drain``."""


def durations() -> Timeouts | None:
    """Return the timeouts, or None until they are loaded. They need the core, whose import may fail or be interrupted;
    until then there is nothing to wait for or to clean up."""
    return getattr(sys.modules.get("hal.timeouts"), "TIMEOUTS", None)


class Deadline:
    """Calls ``force`` with the number of the first of ``signals``, ``TIMEOUTS.signal`` seconds after it arrived and
    :data:`grace` is over, in a thread of its own. Create and close it in the main thread."""

    def __init__(self, signals: Collection[int], force: Callable[[int], object]) -> None:
        self._signals, self._force = signals, force
        self._closed = threading.Event()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._former = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="hal-signals", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while numbers := os.read(self._reading, 64):
            first = next((number for number in numbers if number in self._signals), None)
            if first is not None:
                if (limits := durations()) is None or not self._closed.wait(grace + limits.signal):
                    self._force(first)
                return

    def close(self) -> None:
        """Stop watching."""
        signal.set_wakeup_fd(self._former)
        self._closed.set()
        os.close(self._writing)
        self._thread.join()
        os.close(self._reading)


def _leave_to_parent() -> None:
    """Detach a forked child from the pipe, which it shares with its parent."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_to_parent)
