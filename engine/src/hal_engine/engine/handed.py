"""Sink of a worker in the engine's own process: it passes records on in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from hal_core import SinkClosed
from hal_core.frames import complete_with, new_session

if TYPE_CHECKING:
    from hal_core import OutputRecord
    from hal_core.frames import PendingOutput


class HandedSink:
    """Sink whose output is complete when the engine has taken its record. ``to`` gets each: the engine calls
    :meth:`take`."""

    def __init__(self) -> None:
        self.session = new_session()
        self.to: Callable[[OutputRecord], object] = lambda record: None
        self._pending: deque[PendingOutput] = deque()
        self._closed = False

    def put(self, pending: PendingOutput) -> None:
        """Keep the output until the engine takes its record."""
        if self._closed:
            raise SinkClosed("the sink is closed", cure="open a new one", hook="save_output", argument="sink")
        self._pending.append(pending)

    def take(self, record: OutputRecord) -> None:
        """Pass the record on. The engine takes records in the order of their steps."""
        self._pending.popleft().complete(None)
        self.to(record)

    def close(self, timeout: float) -> None:
        """Complete the outputs that the engine has not taken, as of the step behind the last end; at 0 s fail them."""
        self._closed = True
        while self._pending:
            pending = self._pending.popleft()
            if not timeout:
                pending.complete(SinkClosed("the sink was closed first", hook="save_output", argument="sink"))
            elif complete_with(pending) is not None:
                pending.complete(None)
