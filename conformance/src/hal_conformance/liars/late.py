"""Liars about rows that are known late, and about the order of a worker's own writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hal_core.output.records import OutputRecord, SlotStatus
from hal_core.runtime.policy import Policy

from . import Lie, liar
from .outputs import Told

if TYPE_CHECKING:
    from hal_core.contract.device import Device, Hooks
    from hal_core.memory.plan import WritePlan
    from hal_core.memory.views import Memory
    from hal_core.output.sinks import Sink
    from hal_core.slots.state import SlotState
    from hal_core.slots.step import Step
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket

COPIES = ("async_d2h", "can_hold_stream")
WRITTEN = ("async_h2d", *COPIES)
Read = tuple[int, int, int]
"""A key of the base's copies in flight: stream, begin, end."""


@liar(19, "late errors are read at the call", requires=COPIES)
class LateErrorsReadEarly(Policy):
    """They read fields that are not on the host yet."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Call it at once."""
        if step.late_errors is not None:
            step.late_errors()
        return super().save_output(device, hooks, state, step, sink, stream)


@liar(19, "late errors are left out")
class LateErrorsDropped(Policy):
    """A record is built before they are known."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Save the step without them."""
        return super().save_output(device, hooks, state, replace(step, late_errors=None), sink, stream)


@liar(19, "a recovered request is reported as failed")
class RecoveredAsError(Told):
    """One status for both."""

    @classmethod
    def change(cls, record: OutputRecord) -> OutputRecord:
        """Report ERROR."""
        status = record.status.copy()
        status[status == SlotStatus.RECOVERED] = SlotStatus.ERROR
        return replace(record, status=status)


@liar(23, "a worker's own writes wait for copies of all memory", requires=COPIES)
class OrdersAfterEveryCopy(Lie):
    """The compute stream stalls for somebody else's output."""

    def order_after_reads(self, stream: Stream, memory: Memory | None = None) -> None:
        """Of any memory."""
        super().order_after_reads(stream, None)  # type: ignore[misc]


@liar(23, "a worker's own writes wait for no copy", requires=COPIES)
class OrdersAfterNoCopy(Lie):
    """Written over while it is being copied."""

    def order_after_reads(self, stream: Stream, memory: Memory | None = None) -> None:
        """Return at once."""


@liar(23, "a worker's own writes wait for no copy where no memory is named", requires=COPIES)
class OrdersAfterNamedCopies(Lie):
    """None is taken as no memory, not as every memory."""

    def order_after_reads(self, stream: Stream, memory: Memory | None = None) -> None:
        """Of the memory that is given."""
        if memory is not None:
            super().order_after_reads(stream, memory)  # type: ignore[misc]


class SomeReads(Lie):
    """Base: a stream is ordered after some of the copies that read the memory."""

    def order_after_reads(self, stream: Stream, memory: Memory | None = None) -> None:
        """Hide the rest meanwhile."""
        device: Any = self
        every = device.reads.under_way
        device.reads.under_way = {key: every[key] for key in self.some([*every], memory)}
        super().order_after_reads(stream, memory)  # type: ignore[misc]
        device.reads.under_way = {key: event for key, event in every.items() if not event.done()}

    def some(self, reads: list[Read], memory: Memory | None) -> list[Read]:
        """Choose."""
        raise NotImplementedError


@liar(23, "a worker's own writes wait for the newest copy", requires=(*COPIES, "primitives"))
class OrdersAfterTheNewestCopy(SomeReads):
    """One event a memory."""

    def some(self, reads: list[Read], memory: Memory | None) -> list[Read]:
        """The last one."""
        return reads[-1:]


@liar(23, "a worker's own writes wait for copies that begin where the memory does", requires=(*COPIES, "primitives"))
class OrdersAfterWholeCopies(SomeReads):
    """A table of reads by address."""

    def some(self, reads: list[Read], memory: Memory | None) -> list[Read]:
        """Those of its address."""
        return reads if memory is None else [read for read in reads if read[1] == memory.address]


@liar(22, "a write waits for the newest copy that reads its memory", requires=(*WRITTEN, "primitives"))
class WaitsForTheNewestCopy(SomeReads):
    """One event a memory, which a later copy replaces."""

    def some(self, reads: list[Read], memory: Memory | None) -> list[Read]:
        """The last one of that memory."""
        if memory is None:
            return reads
        end = memory.address + memory.nbytes
        return [read for read in reads if read[1] < end and memory.address < read[2]][-1:]


@liar(22, "of the memories of one write, the first alone waits for copies", requires=(*WRITTEN, "several_memories"))
class OtherMemoriesUnordered(Lie):
    """A loop whose first turn orders the stream."""

    ordered = True

    def submit_all(self, plans: Sequence[WritePlan], stream: Stream) -> Ticket:
        """Write the rest without an order."""
        device: Any = self
        ticket: Ticket = device.submit(plans[0], stream)
        self.ordered = False
        try:
            for plan in plans[1:]:
                ticket = device.submit(plan, stream)
        finally:
            self.ordered = True
        return ticket

    def order_after_reads(self, stream: Stream, memory: Memory | None = None) -> None:
        """Leave it out."""
        if self.ordered:
            super().order_after_reads(stream, memory)  # type: ignore[misc]
