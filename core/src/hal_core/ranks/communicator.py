"""The collectives of one group on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..memory.views import ByteRange, Memory
from ..streams import Stream
from ..tickets import Ticket


class Communicator(Protocol):
    """One group's collectives on a device."""

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Make ``part`` of ``memory`` equal to that of the group's first rank, in one collective."""

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Give every rank of the group this rank's block, of one size on all, and return all by global rank."""

    def close(self) -> None:
        """Give back what this device holds for the group; the process's own connections stay."""


class HeadedCommunicator(Communicator, Protocol):
    """One whose broadcast also writes the slice's header on the source, and copies out what came, in the same call.

    Its ticket has ``header``: the :class:`hal_core.memory.copies.CopyTicket` of that copy.
    """

    def announce(self, memory: Memory, place: ByteRange, header: bytes) -> None:
        """The next broadcast, of a part of ``memory`` that begins with ``place``, begins with ``header``; b"" on ranks
        that are not the source. It replaces what was announced before."""
