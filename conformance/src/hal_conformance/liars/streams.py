"""Liars about streams: work, events and copies on another stream than the given one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal_core.contract.markers import hookimpl
from hal_core.memory.views import View
from hal_core.tickets import Ticket

from . import Lie, liar
from .proxies import HELD, HELD_COPIES, EventTicket, ProxyEvent, given

if TYPE_CHECKING:
    from hal_core.contract.device import Device
    from hal_core.memory.copies import CopyTicket
    from hal_core.memory.values import Value
    from hal_core.memory.views import ByteRange, Memory
    from hal_core.slots.state import SlotState
    from hal_core.slots.step import Step
    from hal_core.slots.tasks import TaskBatch
    from hal_core.streams import Event, Stream

DEFAULT = "the default stream instead of the one given"


@liar(1, f"values are written on {DEFAULT}", requires=(*HELD, *HELD_COPIES), seen="Paddle's copy_")
class WritesOnTheDefaultStream(Lie):
    """A framework's copy without a stream argument."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write on the other stream."""
        return super().async_set_value(device, target, value, device.default_stream)  # type: ignore[misc,no-any-return]


@liar(4, f"tasks are inserted on {DEFAULT}", requires=(*HELD, *HELD_COPIES))
class InsertsOnTheDefaultStream(Lie):
    """An insertion from a scheduler with one stream."""

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Insert on the other stream."""
        return super().insert_tasks(device, state, tasks, device.default_stream)  # type: ignore[misc,no-any-return]


@liar(1, f"copies out follow the work of {DEFAULT}", requires=(*HELD, *HELD_COPIES), seen="sglang 28034")
class CopiesOfTheDefaultStream(Lie):
    """A copy of bytes that the given stream had not written yet."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy after the other stream."""
        return super().copy_out(memory, parts, self.default_stream)  # type: ignore[misc,attr-defined,no-any-return]


@liar(4, f"a step is advanced on {DEFAULT}", requires=(*HELD, *HELD_COPIES, "overlapped_update"))
class AdvancesOnTheDefaultStream(Lie):
    """A kernel launched without its last argument."""

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Advance on the other stream."""
        return super().update_inputs(state, step, self.default_stream)  # type: ignore[misc,attr-defined,no-any-return]


@liar(28, f"events are those of {DEFAULT}", requires=(*HELD, "overlapped_update"), seen="sglang 18746")
class EventsOfTheDefaultStream(Lie):
    """A slot that counts as free while the step that reads it has not begun."""

    def event(self, stream: Stream) -> Event:
        """Record on the other stream."""
        return super().event(self.default_stream)  # type: ignore[misc,attr-defined,no-any-return]


class _TimedOnTheHost(ProxyEvent):
    def __init__(self, true: Event) -> None:
        super().__init__(true)
        self.at = time.monotonic()

    def seconds_since(self, earlier: _TimedOnTheHost) -> float:
        return self.at - earlier.at


@liar(4, "timed events note when they were recorded, on the host's clock", requires=("timed_events", "can_hold_stream"))
class TimesOfTheHost(Lie):
    """A step's time that is the time of its launches."""

    def timed_event(self, stream: Stream) -> _TimedOnTheHost:
        """Note the time now."""
        return _TimedOnTheHost(super().timed_event(stream))  # type: ignore[misc]


class _InMilliseconds(ProxyEvent):
    def seconds_since(self, earlier: _InMilliseconds) -> float:
        return 1e3 * self.true.seconds_since(earlier.true)  # type: ignore[attr-defined,no-any-return]


@liar(4, "the time between timed events is in milliseconds", requires="timed_events", seen="cudaEventElapsedTime")
class MillisecondsAsSeconds(Lie):
    """The driver's number as it comes."""

    def timed_event(self, stream: Stream) -> _InMilliseconds:
        """Record an event with another unit."""
        return _InMilliseconds(super().timed_event(stream))  # type: ignore[misc]


@liar(1, f"the ticket of a write asks {DEFAULT}", requires=HELD)
class TicketsOfTheDefaultStream(Lie):
    """Work on the right stream, its event on another."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write, and record elsewhere."""
        super().async_set_value(device, target, value, stream)  # type: ignore[misc]
        return EventTicket(device.default_stream.record())


def _wait_here(stream: Stream, event: Event) -> None:
    event.wait(60.0)
    honest: Any = super(type(stream), stream)
    honest.wait(event)


@liar(3, "a stream that is to wait for an event keeps the host until then", requires=HELD)
class WaitBlocksTheHost(Lie):
    """A wait on the host, as the vendor has no other."""

    @property
    def default_stream(self) -> Stream:
        """The default stream, with such a wait."""
        found: Stream = given(super().default_stream, "wait", _wait_here)  # type: ignore[misc]
        return found

    def stream(self) -> Stream:
        """Create a stream with such a wait."""
        found: Stream = given(super().stream(), "wait", _wait_here)  # type: ignore[misc]
        return found

    def foreign_stream(self, stream: Stream) -> Stream:
        """Accept such a stream: its class is another, but it is still one of the device's own."""
        if type(stream).__dict__.get("wait") is _wait_here:
            return stream
        return super().foreign_stream(stream)  # type: ignore[misc,no-any-return]


@liar(
    2,
    "a value on the device is copied on a stream of its own, before the work that makes it",
    requires=(*HELD, *HELD_COPIES),
    seen="Paddle: copies between devices",
)
class DeviceValueOnAnotherStream(Lie):
    """A copy for which later work waits, but which itself does not wait."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Copy beside the stream."""
        write = super().async_set_value  # type: ignore[misc]
        if not isinstance(value, View):
            return write(device, target, value, stream)  # type: ignore[no-any-return]
        beside: Any = self.__dict__.setdefault("beside", None) or device.stream()
        self.__dict__["beside"] = beside
        ticket: Ticket = write(device, target, value, beside)
        stream.wait(beside.record())
        return ticket
