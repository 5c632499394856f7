"""Copies out of an asynchronous place: the ticket that carries the bytes, and the reads that later writes wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..tickets import Mode
from ..transfers import CopyTicket
from .memory import Bytes, PaddleMemory
from .streams import PaddleEvent, PaddleStream, PaddleTicket


class PaddleCopy(PaddleTicket, CopyTicket):
    """A copy under way into host arrays that the event keeps alive, as a driver writes them when the copy runs."""

    __slots__ = ("_data",)
    mode: Mode = "async"

    def __init__(self, event: PaddleEvent, data: Sequence[Bytes]) -> None:
        super().__init__(event)
        self._data = data

    @property
    def data(self) -> Sequence[Bytes]:
        return self._data


class UnderWay:
    """What copies out still read and where they write: writes to that memory wait for them, and it is not freed."""

    def __init__(self) -> None:
        self._reads: list[tuple[PaddleMemory, PaddleEvent]] = []

    def add(self, memory: PaddleMemory, event: PaddleEvent, targets: Any) -> None:  # noqa: ANN401 (what to keep alive)
        """Remember that the copy up to ``event`` reads ``memory`` into ``targets``."""
        event.keep = targets
        self._reads = [(read, earlier) for read, earlier in self._reads if not earlier.done()]
        self._reads.append((memory, event))

    def order(self, memory: PaddleMemory, stream: PaddleStream) -> None:
        """Let ``stream`` wait for the copies that still read ``memory``; the host does not wait."""
        left = []
        for read, event in self._reads:
            if event.done():
                continue
            left.append((read, event))
            if read is memory:
                stream.wait(event)
        self._reads = left

    def close(self, timeout: float) -> None:
        """Wait for all of them."""
        for _, event in self._reads:
            event.wait(timeout)
        self._reads.clear()
