"""A simulated vendor runtime: streams that are worker threads, events, and memory that only they touch."""

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from itertools import count
from queue import SimpleQueue
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
numbers = count(1)


class Queue:
    """A stream: calls in order, on a thread of its own. ``ran`` counts them by name; ``error`` is the first one met."""

    def __init__(self, ran: Counter[str]) -> None:
        self.handle, self.ran = next(numbers), ran
        self.error: Exception | None = None
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, call: Callable[[], object] | None, name: str = "") -> None:
        """Make a call when all before it were made; None ends the thread."""
        self.ran[name] += 1
        self._calls.put(call)

    def _run(self) -> None:
        for call in iter(self._calls.get, None):
            try:
                call()
            except Exception as error:  # noqa: BLE001 (told by the events after it, as a chip's are)
                self.error = self.error or error


class Mark:
    """An event. ``passed`` belongs to its last record alone: a wait for an earlier one holds that one's."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.passed.set()  # until it is recorded
        self.queue: Queue | None = None

    def record(self, queue: Queue) -> None:
        """Pass when all that is on the queue now was done."""
        self.passed, self.queue = threading.Event(), queue
        queue.put(self.passed.set)


def at(address: int, nbytes: int) -> Bytes:
    """Memory as the threads see it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
