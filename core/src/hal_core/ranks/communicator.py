"""The collectives of one group on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..memory.views import ByteRange, Memory
from ..streams import Stream
from ..tickets import Ticket


class Communicator(Protocol):
    """The collectives of one group on a device.

    One may have ``announce(memory, place, header)`` too: it sets the header of the next broadcast of a part of
    ``memory`` that begins with ``place``, b"" on ranks that are not the source. That broadcast writes the header on the
    source and copies out the received one: its ticket has ``header``, the ``CopyTicket`` of the copy.
    """

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Make ``part`` of ``memory`` equal to that of the group's first rank, in one collective."""

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Send this rank's block to every rank of the group and return all by global rank; all have the same size."""

    def close(self) -> None:
        """Release the device's resources for the group; the process's own connections stay open."""
