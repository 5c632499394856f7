"""The part of an opened device that moves bytes, used by states, groups and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..streams import Stream
from ..tickets import Ticket
from .copies import CopyTicket
from .plan import WritePlan
from .views import ByteRange, Memory


class MemoryDevice(Protocol):
    """Memory of an opened device, written by plans and read by copies; see :class:`hal_core.contract.device.Device`."""

    name: str
    index: int

    @property
    def deadline(self) -> float | None:
        """Seconds that a call waits for the device at most; None for one that no call waits for."""

    def allocate(self, nbytes: int) -> Memory:
        """Allocate device memory, at least 64-byte aligned; its contents are undefined."""

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Write a plan in stream order. The plan's arrays may be changed by the caller once this returns (G2)."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy byte ranges to the host, as they are after the work that is now on ``stream``.

        Work put on the stream later does not change the copy, and does not wait on the host.
        """
