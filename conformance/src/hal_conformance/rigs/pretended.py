"""A group of two ranks whose other rank is simulated, so that one process can test the stream of a broadcast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from hal_core.devices.base import DeviceBase
from hal_core.group import Group
from hal_core.slots.fields import HEADER_BYTES

from ..harness import backdoor
from ..harness.bits import noise
from ..harness.lies import Lie
from ..kit import Kit
from .rig import Rig

if TYPE_CHECKING:
    from hal_core.memory.views import ByteRange, Memory
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket

PAIR = Group((0, 1), 1)


class FarSource:
    """The communicator of rank 1 with a simulated rank 0, whose data is written in stream order."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.streams: list[Stream] = []

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Receive the expected header, and fields that differ from the current ones."""
        self.streams.append(stream)
        header = self._rig.state.channels[PAIR.ranks].expected
        sent = header + noise(5, part.nbytes - HEADER_BYTES).tobytes()
        self._rig.model.block[part.offset : part.end] = np.frombuffer(sent, np.uint8)
        return backdoor.put(self._rig.device, memory, [(part.offset, sent)], stream)

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Return the same block for rank 0."""
        return dict.fromkeys(PAIR.ranks, block)

    def close(self) -> None:
        """Return at once."""


@contextmanager
def far_from_its_source(rig: Rig) -> Iterator[None]:
    """Context in which the device's groups have two ranks, of which the other is simulated."""
    far, device = FarSource(rig), rig.device
    device.communicator = lambda group: far  # type: ignore[method-assign]
    try:
        yield
    finally:
        del device.communicator


def can_pretend(kit: Kit) -> bool:
    """Return True if the device's hook is the base's, which asks ``communicator`` for the group."""
    kinds = [kind for kind in type(kit.device).__mro__ if not issubclass(kind, Lie)]
    return next((kind for kind in kinds if "broadcast_tokens" in vars(kind)), None) is DeviceBase
