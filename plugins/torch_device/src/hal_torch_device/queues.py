"""The substitute ``queue``: torch's operations on the CPU, on streams that are worker threads and can be held.

What the device queues, keeps and orders is that of a chip; torch's own streams and events are not.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from hal_core import Capabilities
from hal_core.devices import AsyncDevice, AsyncStream

from .device import TorchDevice
from .primitives import TorchPrimitives, numbers

if TYPE_CHECKING:
    import torch
    from hal_core import Stream


class Queue:
    """A stream: calls in order, on a thread of its own."""

    def __init__(self, ran: Counter[str]) -> None:
        self.handle, self.ran = next(numbers), ran
        self.error: Exception | None = None
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=f"queue {self.handle}", daemon=True).start()

    def put(self, call: Callable[[], object] | None, name: str = "") -> None:
        """Queue a call, counted as ``name``; None ends the thread."""
        if name:
            self.ran[name] += 1
        self._calls.put(call)

    def _run(self) -> None:
        for call in iter(self._calls.get, None):
            try:
                call()
            except Exception as error:  # noqa: BLE001 (the first is raised by the events after it)
                self.error = self.error or error
            del call


class Mark:
    """An event; ``passed`` belongs to its last record."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.passed.set()
        self.queue: Queue | None = None

    def record(self, queue: Queue) -> None:
        """Pass when the work that is now on ``queue`` is done."""
        self.passed, self.queue = threading.Event(), queue
        queue.put(self.passed.set)


class QueuePrimitives(TorchPrimitives):
    """torch's operations as calls on queues."""

    rerecords = True

    def __init__(self, device: torch.device, new_stream: Callable[[torch.device], Any]) -> None:
        super().__init__(device, new_stream)
        self.events = True

    def run(self, stream: Queue, work: Callable[[], object], name: str) -> None:
        stream.put(work, name)

    def stream_create(self) -> Queue:
        return Queue(self.ran)

    def stream_destroy(self, stream: Queue) -> None:
        stream.put(None)

    def stream_handle(self, stream: Queue) -> int:
        return stream.handle

    def stream_wait(self, stream: Queue, event: Mark) -> None:
        stream.put(event.passed.wait)

    def event_create(self) -> Mark:
        return Mark()

    def event_record(self, event: Mark, stream: Queue) -> None:
        event.record(stream)

    def event_query(self, event: Mark) -> bool:
        return event.passed.is_set()

    def event_synchronize(self, event: Mark, timeout: float | None) -> bool:
        return event.passed.wait(timeout)

    def event_error(self, event: Mark) -> Exception | None:
        return event.queue.error if event.queue else None


class QueueDevice(TorchDevice):
    """The device over them."""

    primitives_type = QueuePrimitives

    def found_capabilities(self, substitute: str) -> Capabilities:
        """Return the base's, and that a stream can be held."""
        return replace(super().found_capabilities(substitute), can_hold_stream=True)

    default_stream = AsyncDevice.default_stream

    def foreign_stream(self, stream: object) -> AsyncStream:
        """Refuse: torch's CPU has no streams."""
        return AsyncDevice.foreign_stream(self, stream)

    def check_stream(self, stream: Stream) -> None:
        """Return at once: there are no graphs."""

    def before_consumer(self, stream: int | None) -> None:
        """Return at once: a consumer of host memory waits itself."""

    @contextmanager
    def hold_stream(self, stream: Stream) -> Iterator[None]:
        """Let the stream wait until the context ends."""
        gate = threading.Event()
        self.own_stream(stream).raw.put(gate.wait)
        try:
            yield
        finally:
            gate.set()
