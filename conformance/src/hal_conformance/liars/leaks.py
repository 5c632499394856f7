"""Liars that lose a little device memory at each call, and more of the driver's objects than Python counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal_core.contract.markers import hookimpl
from hal_core.memory.views import View

from . import Lie, liar

if TYPE_CHECKING:
    from hal_core.contract.device import Device
    from hal_core.memory.copies import CopyTicket
    from hal_core.memory.plan import WritePlan
    from hal_core.memory.values import Value
    from hal_core.memory.views import ByteRange, Memory
    from hal_core.slots.state import SlotState
    from hal_core.slots.step import Step
    from hal_core.slots.tasks import TaskBatch
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket


@liar(26, "each step leaves 64 bytes of device memory", requires="primitives")
class StepsLeakScratch(Lie):
    """Scratch of a kernel that is allocated at each launch."""

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Allocate, and forget it."""
        device: Any = self
        device.primitives.allocate(64)
        return super().update_inputs(state, step, stream)  # type: ignore[misc,no-any-return]


@liar(26, "every second insertion leaves a table of slots in device memory")
class InsertionsLeakTables(Lie):
    """Memory that is held by a table which is never looked at again."""

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Keep a table."""
        kept: list[Any] = self.__dict__.setdefault("tables", [])
        kept.append(device.allocate(256) if len(kept) % 2 else None)
        return super().insert_tasks(device, state, tasks, stream)  # type: ignore[misc,no-any-return]


@liar(26, "each plan leaves an event of the runtime", requires="primitives")
class PlansLeakEvents(Lie):
    """An event that a former version recorded."""

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Create one, and forget it."""
        device: Any = self
        device.primitives.event_create()
        return super().submit(plan, stream)  # type: ignore[misc,no-any-return]


@liar(26, "a write that fails leaves its temporary")
class RefusedWritesLeak(Lie):
    """Freed behind the call, which an error skips."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Allocate, and free where it goes well."""
        temporary = device.allocate(64)
        try:
            return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]
        except Exception:
            self.__dict__.setdefault("refused", []).append(temporary)
            raise


@liar(26, "a copy out that fails leaves its temporary")
class FailedCopiesLeak(Lie):
    """The same of copies."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Allocate, and free where it goes well."""
        device: Any = self
        temporary = device.allocate(64)
        try:
            return super().copy_out(memory, parts, stream)  # type: ignore[misc,no-any-return]
        except Exception:
            self.__dict__.setdefault("refused", []).append(temporary)
            raise


@liar(26, "a copy onto an overlapping place keeps its temporary")
class OverlapsLeak(Lie):
    """A list of temporaries that nobody empties."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Allocate one more."""
        if isinstance(value, View) and value.memory is target.memory:
            low, high = value.bounds()
            first, end = target.bounds()
            if low < end and first < high:
                self.__dict__.setdefault("temporaries", []).append(device.allocate(high - low))
        return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]
