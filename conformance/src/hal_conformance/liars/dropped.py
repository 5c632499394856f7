"""Liars about what nobody holds any more: memory freed under copies that read it, devices kept or released early."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from hal_core.devices.retired_memory import DeviceMemory

from . import Lie, liar
from .proxies import HELD_COPIES

if TYPE_CHECKING:
    from hal_core.memory.copies import CopyTicket
    from hal_core.memory.views import ByteRange, Memory
    from hal_core.streams import Stream


class Reuses(Lie):
    """Base: freed memory goes to the next allocation of its size, not to the system, so that no process ends."""

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Use a freed block if there is one."""
        device: Any = self
        freed: list[int] = self.__dict__.setdefault("freed", {}).setdefault(nbytes, [])
        self.look()
        memory: Any = DeviceMemory(device, freed.pop(), nbytes) if freed else super().allocate(nbytes)  # type: ignore[misc]
        memory._free = partial(freed.append, memory.address)
        given: DeviceMemory = memory
        return given

    def look(self) -> None:
        """Free dropped memory whose work is done."""
        device: Any = self
        device.retired.reap()


@liar(22, "the memory of a pending copy is freed when it is dropped", requires=(*HELD_COPIES, "primitives"))
class CopiesDoNotKeep(Reuses):
    """Only the streams of writes are asked whether they still use dropped memory."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy, and forget the copy's own stream."""
        device: Any = self
        copied = super().copy_out(memory, parts, stream)  # type: ignore[misc]
        device.last.pop(device.own(stream).beside.stream_key, None)
        return copied  # type: ignore[no-any-return]


@liar(22, "of dropped memory eight blocks are kept until their work is done", requires=(*HELD_COPIES, "primitives"))
class EightAreKept(Reuses):
    """A list of fixed length, whose oldest entry makes room."""

    def look(self) -> None:
        """Free those whose work is done, and the oldest of more than eight."""
        device: Any = self
        device.retired.reap()
        waiting = device.retired._waiting
        while len([entry for entry in waiting if entry[0]]) > 8:
            waiting.popleft()[1]()


@liar(26, "a device that is dropped without a close keeps its memory", requires="primitives")
class DroppedIsKept(Lie):
    """Nothing but a close releases it."""

    def __del__(self) -> None:
        """Leave everything."""


@liar(26, "a list of opened devices keeps each, with its memory")
class EveryDeviceIsListed(Lie):
    """For a report, or for the end of the process."""

    OPENED: ClassVar[list[Any]] = []

    def laid(self) -> None:
        """Enter it in the list."""
        self.OPENED.append(self)
