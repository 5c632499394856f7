"""A group of two ranks of which the other one is pretended, so that one process shows the stream of a broadcast."""

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
    """The communicator of rank 1 whose rank 0 is nowhere: what that would send is written in stream order."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.streams: list[Stream] = []

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Receive the header that is due, and other fields than there are."""
        self.streams.append(stream)
        header = self._rig.state.channels[PAIR.ranks].expected
        sent = header + noise(5, part.nbytes - HEADER_BYTES).tobytes()
        self._rig.model.block[part.offset : part.end] = np.frombuffer(sent, np.uint8)
        return backdoor.put(self._rig.device, memory, [(part.offset, sent)], stream)

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Rank 0 says the same."""
        return dict.fromkeys(PAIR.ranks, block)

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def far_from_its_source(rig: Rig) -> Iterator[None]:
    """Within it, groups of the device are of two ranks, of which the other one is pretended."""
    far, device = FarSource(rig), rig.device
    device.communicator = lambda group: far  # type: ignore[method-assign]
    try:
        yield
    finally:
        del device.communicator


def can_pretend(kit: Kit) -> bool:
    """True where the device's hook is the base's, which asks ``communicator`` for the group."""
    kinds = [kind for kind in type(kit.device).__mro__ if not issubclass(kind, Lie)]
    return next((kind for kind in kinds if "broadcast_tokens" in vars(kind)), None) is DeviceBase
