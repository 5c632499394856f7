"""Liars about order: late work, tickets that are done early, calls that wait. Most need streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hal_core.contract.markers import hookimpl
from hal_core.tickets import DONE, Ticket

from . import Lie, liar

if TYPE_CHECKING:
    from hal_core.contract.counters import Counters
    from hal_core.contract.device import Device
    from hal_core.memory.copies import CopyTicket
    from hal_core.memory.plan import WritePlan
    from hal_core.memory.values import Value
    from hal_core.memory.views import ByteRange, Memory, View
    from hal_core.streams import Stream

HELD = ("async_h2d", "can_hold_stream")


@liar(1, "a write is only carried out by the next write")
class WritesLate(Lie):
    """A queue that is never flushed."""

    waiting: Callable[[], Ticket] | None = None

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Execute the previous write."""
        earlier = self.waiting
        self.waiting = lambda: super(WritesLate, self).async_set_value(device, target, value, stream)  # type: ignore[misc]
        return earlier() if earlier else DONE


@liar(3, "a ticket is done while its work still runs", requires=HELD, seen="torch openreg: stream query")
class DoneEarly(Lie):
    """A ticket of the queue, not of the work."""

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Submit, and drop the ticket."""
        super().submit(plan, stream)  # type: ignore[misc]
        return DONE


@liar(3, "an asynchronous copy waits for the stream before it returns", requires=HELD, seen="Paddle 78162")
class WaitsInside(Lie):
    """A hidden synchronisation."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Wait if the device writes values in its own way."""
        ticket = super().async_set_value(device, target, value, stream)  # type: ignore[misc]
        stream.synchronize()
        return ticket  # type: ignore[no-any-return]

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Wait for everything on the stream."""
        ticket = super().submit(plan, stream)  # type: ignore[misc]
        stream.synchronize()
        return ticket  # type: ignore[no-any-return]


@liar(10, "submissions are counted once for all of a call", requires="probe_counts")
class CountsOne(Lie):
    """Counters that are too small."""

    def counters(self) -> Counters:
        """Report half of the submissions."""
        from dataclasses import replace

        true: Counters = super().counters()  # type: ignore[misc]
        return replace(true, submissions=true.submissions // 2)


@liar(
    23, "the copy out waits for the compute stream", requires=("async_d2h", "can_hold_stream"), seen="FastDeploy 7221"
)
class CopiesWhileHeld(Lie):
    """A blocking copy instead of an ordered one."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Wait for the copy."""
        copied: Any = super().copy_out(memory, parts, stream)  # type: ignore[misc]
        copied.wait()
        return copied  # type: ignore[no-any-return]
