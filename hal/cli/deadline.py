"""The deadline of a signal: a command that has not ended so long after the first one is ended by force.

The interpreter runs a signal's handler in the main thread, between two of its instructions: a main thread that waits in
a library never gets there, and one whose step hangs has noted the signal and still waits. So a thread reads the
signals' numbers from a pipe, which the interpreter writes at once (``signal.set_wakeup_fd``).
"""

from __future__ import annotations

import os
import signal
import threading

from hal.timeouts import TIMEOUTS

TYPE_CHECKING = False  # as in hal
if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class Deadline:
    """Calls ``force`` with the number of the first of ``signals``, ``TIMEOUTS.signal`` seconds after it came, in a
    thread of its own. To be made and closed in the main thread."""

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
                if not self._closed.wait(TIMEOUTS.signal):
                    self._force(first)
                return

    def close(self) -> None:
        """Watch no longer."""
        signal.set_wakeup_fd(self._former)
        self._closed.set()
        os.close(self._writing)
        self._thread.join()
        os.close(self._reading)


def _leave_to_parent() -> None:
    """In a forked child, whose signals are not the parent's: the pipe is shared."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_to_parent)
