"""One group's collectives on memory that the host may touch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ...ranks.groups import OpenGroup, opened
from ...tickets import DONE, Ticket

if TYPE_CHECKING:
    from ...group import Group
    from ...memory.views import ByteRange, Memory
    from ...streams import Stream

BytesOf = Callable[["Memory", "ByteRange"], memoryview]


class HostCommunicator:
    """One group's collectives on the host; see :class:`hal_core.ranks.communicator.Communicator`.

    ``bytes_of(memory, part)`` returns the bytes themselves, contiguous and writable.
    """

    def __init__(self, group: Group, open_group: OpenGroup, bytes_of: BytesOf) -> None:
        self.group, self._open, self._bytes_of = group, open_group, bytes_of
        self._root = open_group.ranks.index(group.source)

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Make ``part`` of ``memory`` equal to that of the group's first rank, in one collective, in place."""
        self._open.watched(self._open.process_group.broadcast, self._bytes_of(memory, part), self._root)
        return DONE

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Return every rank's block, by global rank."""
        size, found = len(block), memoryview(bytearray(len(block) * self.group.size))
        self._open.watched(self._open.process_group.all_gather, memoryview(block), found)
        parts = (found[at * size : (at + 1) * size].tobytes() for at in range(self.group.size))
        return dict(zip(self._open.ranks, parts, strict=True))

    def close(self) -> None:
        """Do nothing: the group stays open for the process (:func:`hal_core.devices.close_groups`)."""


def host_communicator(group: Group, bytes_of: BytesOf) -> HostCommunicator:
    """Return the group's collectives over hal's own library. It opens a group of all ranks of the job."""
    return HostCommunicator(group, opened(group), bytes_of)
