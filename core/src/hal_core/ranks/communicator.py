"""The collectives of one group on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..memory.views import ByteRange, Memory
from ..streams import Stream
from ..tickets import Ticket


class Communicator(Protocol):
    """The collectives of one group on a device."""

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Make ``part`` of ``memory`` equal to that of the group's first rank, in one collective."""

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Send this rank's block to every rank of the group and return all by global rank; all have the same size."""

    def close(self) -> None:
        """Release the device's resources for the group; the process's own connections stay open."""


class HeadedCommunicator(Communicator, Protocol):
    """A communicator whose broadcast also writes the slice's header on the source and copies out the received one.

    Its ticket has ``header``: the :class:`hal_core.memory.copies.CopyTicket` of that copy.
    """

    def announce(self, memory: Memory, place: ByteRange, header: bytes) -> None:
        """Set the ``header`` of the next broadcast of a part of ``memory`` that begins with ``place``; b"" on ranks
        that are not the source. It replaces an earlier announced header."""
