"""Liars that work on the thread alone that opened the device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hal_core.contract.markers import hookimpl

from . import Lie, liar

if TYPE_CHECKING:
    from hal_core.contract.device import Device
    from hal_core.memory.copies import CopyTicket
    from hal_core.memory.plan import WritePlan
    from hal_core.memory.values import Value
    from hal_core.memory.views import ByteRange, Memory, View
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket


class Bound(Lie):
    """Base: the runtime's context belongs to one thread."""

    def laid(self) -> None:
        """Keep the opener's thread."""
        self.__dict__["opener"] = threading.get_ident()

    def enter(self) -> None:
        """Raise what the runtime raises elsewhere."""
        if threading.get_ident() != self.__dict__["opener"]:
            raise RuntimeError("error 201: invalid device context")


@liar(26, "writes work on the opener's thread alone", seen="CUDA_ERROR_INVALID_CONTEXT on a worker's thread")
class WritesOfTheOpener(Bound):
    """The context is made current when the device is opened, and nowhere else."""

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Enter, and submit."""
        self.enter()
        return super().submit(plan, stream)  # type: ignore[misc,no-any-return]

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Enter, and write."""
        self.enter()
        return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]


@liar(26, "copies to the host work on the opener's thread alone")
class CopiesOfTheOpener(Bound):
    """One call of many lacks the context."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Enter, and copy."""
        self.enter()
        return super().copy_out(memory, parts, stream)  # type: ignore[misc,no-any-return]


@liar(26, "memory is allocated on the opener's thread alone")
class MemoryOfTheOpener(Bound):
    """The call that is made least."""

    def allocate(self, nbytes: int) -> Memory:
        """Enter, and allocate."""
        self.enter()
        return super().allocate(nbytes)  # type: ignore[misc,no-any-return]
