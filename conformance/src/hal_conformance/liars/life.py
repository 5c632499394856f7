"""Liars about a device's life: capabilities, faults, memory, forks, closing, and departures of requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from hal_core.contract.markers import hookimpl
from hal_core.devices.retired_memory import DeviceMemory
from hal_core.errors import DeviceClosed, HalError, OutOfMemory, SinkFull
from hal_core.memory.copies import Bytes, CopyTicket
from hal_core.runtime.policy import Policy
from hal_core.slots.tasks import LEAVING, Task, TaskBatch
from hal_core.tickets import PromiseTicket, Ticket

from . import Lie, Patch, liar
from .proxies import HELD, HELD_COPIES, RING, Proxy

if TYPE_CHECKING:
    from hal_core.contract.device import Device, Hooks
    from hal_core.memory.values import Value
    from hal_core.memory.views import ByteRange, Memory, View
    from hal_core.output.sinks import Sink
    from hal_core.slots.state import SlotState
    from hal_core.slots.step import Step
    from hal_core.streams import Stream


def settled(error: BaseException | None = None) -> Ticket:
    """Return a ticket with mode "async" of finished work."""
    ticket = PromiseTicket("async")
    ticket.complete(error)
    return ticket


@liar(7, "a synchronous device's tickets have the mode async", requires="not async_h2d")
class SyncCalledAsync(Lie):
    """A mode by class, not by work."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write, and return another mode."""
        super().async_set_value(device, target, value, stream)  # type: ignore[misc]
        return settled()


@liar(7, "an asynchronous device's tickets have the mode sync", requires=HELD)
class AsyncCalledSync(Lie):
    """A mode copied as a constant from another plugin."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write, and return another mode."""
        ticket = Proxy(super().async_set_value(device, target, value, stream))  # type: ignore[misc]
        ticket.mode = "sync"
        return ticket


@liar(7, "a fallback is logged at every call", requires="not async_h2d")
class LogsEveryCall(Lie):
    """A warning in the hot path."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write, and warn."""
        reason = device.capabilities.fallbacks.get("async_set_value", "")
        logging.getLogger("hal").warning("%s works with fallbacks: async_set_value: %s", device.name, reason)
        return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]


@liar(26, "a fault of the device in a write is logged, and the call goes well", seen="vLLM 48277")
class SwallowsFaults(Lie):
    """``except Exception``."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write, and ignore errors."""
        try:
            return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]
        except DeviceClosed:
            raise
        except HalError:
            logging.getLogger("hal").debug("a write failed", exc_info=True)
            return settled()

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Insert, and ignore errors."""
        try:
            return super().insert_tasks(device, state, tasks, stream)  # type: ignore[misc,no-any-return]
        except DeviceClosed:
            raise
        except HalError:
            logging.getLogger("hal").debug("an insertion failed", exc_info=True)
            return settled()


@liar(26, "an error for values out of bounds counts as observed, though its ticket was never waited for")
class UnseenCountsAsSeen(Policy):
    """A next call that does not raise the last one's error."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Mark the error as observed."""
        ticket = super().save_output(device, hooks, state, step, sink, stream)
        ticket.observed = True
        return ticket


class _Ended(Proxy):
    __slots__ = ("__weakref__", "ended")

    def __init__(self, inner: Ticket, nbytes: Sequence[int]) -> None:
        super().__init__(inner, nbytes)
        self.ended: list[Bytes] | None = None

    def end(self) -> None:
        """Drop what has not arrived when the device is closed, and mark the ticket as done."""
        if not self.inner.done():
            self.ended = list(super().data)

    @property
    def data(self) -> Sequence[Bytes]:
        return super().data if self.ended is None else self.ended

    def done(self) -> bool:
        return self.ended is not None or super().done()

    def _block(self, timeout: float | None) -> bool:
        return self.ended is not None or super()._block(timeout)


@liar(19, "closing drops the copies in flight, and their tickets are done", requires=HELD_COPIES)
class CloseDropsCopies(Lie):
    """Zeros as the tokens of the last steps, without an error."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Keep the ticket."""
        ticket = _Ended(super().copy_out(memory, parts, stream), [part.nbytes for part in parts])  # type: ignore[misc]
        self.__dict__.setdefault("under_way", WeakSet()).add(ticket)
        return ticket

    def close(self) -> None:
        """End pending copies."""
        for ticket in list(self.__dict__.get("under_way", ())):
            ticket.end()
        super().close()  # type: ignore[misc]


@liar(26, "after a fork the child continues with the parent's device")
class ForkGoesOn(Patch):
    """A missing check for a fork, which streams and threads do not survive."""

    seam = "begin of a call"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Refuse only a closed device."""

        def begin(bound: Any) -> None:  # noqa: ANN401 (the bound device)
            if "fork" in bound._refusal:
                bound._refusal = ""
            true(bound)

        return begin


@liar(26, "each write takes device memory for its value, and keeps it")
class LeaksDeviceMemory(Lie):
    """One leaked allocation per call."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write through memory that is never freed."""
        kept = device.allocate(max(64, target.size * target.dtype.itemsize))
        self.__dict__.setdefault("kept", []).append(kept)
        return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]


class _Forgotten(dict[int, Any]):
    def values(self) -> Any:  # noqa: ANN401 (no event at all)
        return ()


@liar(2, "memory is freed when it is unreferenced, whatever work still uses it", requires=RING)
class FreedUnderWork(Lie):
    """An allocator that reuses dropped memory of the same size at once, as a framework's does for its own stream.

    The memory does not go back to the system: the process would end if device memory is host memory.
    """

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Use a dropped block if there is one."""
        dropped: list[int] = self.__dict__.setdefault("dropped", {}).setdefault(nbytes, [])
        self.retired.reap()  # type: ignore[attr-defined]
        memory: Any = DeviceMemory(self, dropped.pop(), nbytes) if dropped else super().allocate(nbytes)  # type: ignore[arg-type, misc]
        memory._free = partial(dropped.append, memory.address)
        given: DeviceMemory = memory
        return given

    @property
    def last(self) -> dict[int, Any]:
        """The last events, none of which protects dropped memory."""
        true: dict[int, Any] = self.__dict__["last"]
        if not isinstance(true, _Forgotten):
            true = self.__dict__["last"] = _Forgotten(true)
        return true

    @last.setter
    def last(self, events: dict[int, Any]) -> None:
        self.__dict__["last"] = events


@liar(26, "each ticket is kept for ever, with its copied data")
class KeepsEveryTicket(Lie):
    """Host memory that grows from step to step."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Keep the copy."""
        copied: CopyTicket = super().copy_out(memory, parts, stream)  # type: ignore[misc]
        self.__dict__.setdefault("tickets", []).append(copied)
        return copied


@liar(26, "copies out are forgotten when something is written, and never otherwise")
class CopiesUntilAWrite(Lie):
    """A list of running reads that only the next write clears."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Remember the copy."""
        copied: CopyTicket = super().copy_out(memory, parts, stream)  # type: ignore[misc]
        self.__dict__.setdefault("unwritten", []).append(copied)
        return copied

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Forget all copies, and write."""
        self.__dict__.get("unwritten", []).clear()
        return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]


@liar(26, "device memory lies on boundaries of 16 bytes")
class AlignedToSixteen(Lie):
    """Memory on which vector stores of 64 bytes trap, or are split."""

    def allocate(self, nbytes: int) -> Memory:
        """Begin 16 bytes into a block."""
        memory: Any = super().allocate(nbytes + 64)  # type: ignore[misc]
        memory.address += 16
        memory.nbytes = nbytes
        if hasattr(memory, "buffer"):
            memory.buffer = memory.buffer[16 : 16 + nbytes]
        return memory  # type: ignore[no-any-return]


@liar(26, "no room in the staging ring is a bare MemoryError", requires=RING)
class OutOfMemoryIsBare(Lie):
    """The allocator's own error."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Lose the error's class, device and cure."""
        try:
            return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]
        except OutOfMemory as error:
            raise MemoryError(error.what) from None


@liar(19, "a preemption whose record met a full sink is reported by the next output too")
class PreemptionToldTwice(Policy):
    """A sender that believes that the sink did not keep the record."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Undo the booking of reported departures."""
        before = dict(state.host_table.preempted)
        try:
            return super().save_output(device, hooks, state, step, sink, stream)
        except SinkFull:
            state.host_table.preempted.update(before)
            raise


@liar(19, "an output forgets the preemptions of all slots, also of those that it does not name")
class ForgetsWhoWasNotNamed(Policy):
    """A table of departures that is cleared after each step."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Book every departure as reported."""
        try:
            return super().save_output(device, hooks, state, step, sink, stream)
        finally:
            state.host_table.reported(range(state.sizes.num_slots))


@liar(8, "leaving a slot that the request does not hold is accepted, without effect")
class LeavesWhatIsNotHeld(Policy):
    """A second abort that is accepted as harmless."""

    def insert_tasks(
        self, device: Device, hooks: Hooks, state: SlotState, tasks: TaskBatch | Sequence[Task], stream: Stream
    ) -> Ticket:
        """Leave such tasks out."""
        if not isinstance(tasks, TaskBatch):
            admission_ids = state.host_table.admission_ids.tolist()
            held = {slot: admission_id for slot, admission_id in enumerate(admission_ids) if admission_id}
            tasks = [one for one in tasks if one.kind not in LEAVING or held.get(one.slot) == one.request.admission_id]
        return super().insert_tasks(device, hooks, state, tasks, stream)
