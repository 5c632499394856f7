"""Liars that are right up to a size, a number of requests or slots, or a number of outputs in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from hal_core.contract.markers import hookimpl
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.plan import WritePlan
from hal_core.memory.views import View
from hal_core.tickets import Mode, Ticket

from . import Lie, Patch, liar
from .proxies import HELD, HELD_COPIES

if TYPE_CHECKING:
    from hal_core.contract.device import Device
    from hal_core.memory.copies import CopyTicket
    from hal_core.memory.values import Value
    from hal_core.memory.views import ByteRange, Memory
    from hal_core.output.sinks import Sink
    from hal_core.slots.state import SlotState
    from hal_core.slots.step import Step
    from hal_core.streams import Event, Stream

LARGE = 64 << 10
"""Bytes from which a value has a copy engine of its own."""
BUSY = 32 << 20
"""Bytes that such an engine copies first: it is slower than the stream that does not wait for it."""


def nbytes_of(view: View) -> int:
    """Return the bytes of a view's elements."""
    return view.size * view.dtype.itemsize


# -- values on the device (G1) -----------------------------------------------------------------------------------------


class Engine(Lie):
    """Base: large values on the device are copied by an engine, which is a stream of its own."""

    late: ClassVar[bool]

    def copy_within(self, target: View, value: View, stream: Stream) -> Ticket:
        """Copy large values there; one of the two streams waits for the other."""
        device: Any = self
        copy = super().copy_within  # type: ignore[misc]
        if nbytes_of(target) < LARGE:
            return copy(target, value, stream)  # type: ignore[no-any-return]
        if "_engine" not in self.__dict__:
            room = View.contiguous(device.allocate(2 * BUSY), 0, (2, BUSY), dtype_of("uint8"))
            self.__dict__.update(_engine=device.stream(), _room=room)
        engine, room = self.__dict__["_engine"], self.__dict__["_room"]
        if self.late:
            engine.wait(device.event(stream))
            copy(room[0], room[1], engine)
        ticket: Ticket = copy(target, value, engine)
        if not self.late:
            stream.wait(device.event(engine))
        return ticket


@liar(1, "the stream does not wait for the engine that copies a device value of 64 KiB or more", requires=HELD)
class EngineIsLate(Engine):
    """Its ticket is right, and so are small values. It has other work to do first."""

    late = True


@liar(1, "the engine that copies a device value of 64 KiB or more does not wait for the stream", requires=HELD)
class EngineIsEarly(Engine):
    """The stream waits for it: later work sees what was taken too early."""

    late = False


# -- synchronous values (G7) -------------------------------------------------------------------------------------------


class Postponed(Ticket):
    """A ticket of a write that is made once it is looked at."""

    __slots__ = ("_catch_up",)
    mode: Mode = "sync"

    def __init__(self, catch_up: Callable[[], None]) -> None:
        super().__init__()
        self._catch_up = catch_up

    def done(self) -> bool:
        """Write, and return True."""
        self._catch_up()
        return True

    def _block(self, timeout: float | None) -> bool:
        return self.done()

    def failure(self) -> BaseException | None:
        """Return no error."""
        return None


class Later(Lie):
    """Base: some values are written when their ticket is looked at, or by the next call."""

    def postponed(self, target: View, value: Value) -> bool:
        """Return True for a value that is."""
        raise NotImplementedError

    def catch_up(self) -> None:
        """Write the remaining values."""
        left: list[Callable[[], object]] = self.__dict__.setdefault("_left", [])
        while left:
            left.pop(0)()

    def own(self, value: Value, stream: Stream) -> Value:
        """Return the value as it is at the call: only the time of its write is wrong."""
        if not isinstance(value, View):
            return value.copy()
        device: Any = self
        kept = View.contiguous(device.allocate(nbytes_of(value)), 0, value.shape, value.dtype)
        super().async_set_value(device, kept, value, stream)  # type: ignore[misc]
        return kept

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Put the write off."""
        self.catch_up()
        write = super().async_set_value  # type: ignore[misc]
        if not self.postponed(target, value):
            return write(device, target, value, stream)  # type: ignore[no-any-return]
        self.__dict__["_left"].append(partial(write, device, target, self.own(value, stream), stream))
        return Postponed(self.catch_up)

    def submit_all(self, plans: Sequence[WritePlan], stream: Stream) -> Ticket:
        """Catch up first."""
        self.catch_up()
        return super().submit_all(plans, stream)  # type: ignore[misc,no-any-return]

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Catch up first."""
        self.catch_up()
        return super().submit(plan, stream)  # type: ignore[misc,no-any-return]

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Catch up first."""
        self.catch_up()
        return super().copy_out(memory, parts, stream)  # type: ignore[misc,no-any-return]

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Catch up first."""
        self.catch_up()
        return super().update_inputs(state, step, stream)  # type: ignore[misc,no-any-return]

    def close(self) -> None:
        """Catch up first."""
        self.catch_up()
        super().close()  # type: ignore[misc]


PAGE = 4096


@liar(
    7,
    "an array of 4 KiB or more is written when its ticket is looked at, or by the next call",
    requires="not async_h2d",
)
class PagesComeLater(Later):
    """A queue on the host, which the device's own calls empty."""

    def postponed(self, target: View, value: Value) -> bool:
        """Return whether it is."""
        return isinstance(value, np.ndarray) and nbytes_of(target) >= PAGE


@liar(
    7,
    "4 KiB or more that lie on the device are copied when the ticket is looked at, or by the next call",
    requires="not async_h2d",
)
class CopiesComeLater(Later):
    """The same of values on the device."""

    def postponed(self, target: View, value: Value) -> bool:
        """Return whether it is."""
        return isinstance(value, View) and nbytes_of(target) >= PAGE


# -- insertions (G10) --------------------------------------------------------------------------------------------------


class CountedOnce(Lie):
    """Base: a plan is submitted in parts, and ``counters()`` has one submission of them."""

    def parts(self, plan: WritePlan) -> list[WritePlan]:
        """Return the parts; one is honest."""
        raise NotImplementedError

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Submit each."""
        write, counts = super().submit, self.__dict__["_counts"]  # type: ignore[misc]
        first, *others = self.parts(plan)
        ticket: Ticket = write(first, stream)
        kept = dict(counts)
        for part in others:
            ticket = write(part, stream)
        counts.update({name: kept.get(name, 0) for name in ("submissions", "uploads", "launches")})
        return ticket


@liar(
    10,
    "an insertion is a launch for each 64 requests, of which one is counted",
    requires=("fused_scatter", "probe_counts"),
)
class WavefrontsCountOnce(CountedOnce):
    """The loop is below the counter."""

    def parts(self, plan: WritePlan) -> list[WritePlan]:
        """Return 64 records each."""
        records = plan.records
        if records is None or len(records.slots) <= 64:
            return [plan]
        some = [
            replace(records, slots=records.slots[at : at + 64], data=records.data[at : at + 64])
            for at in range(0, len(records.slots), 64)
        ]
        rest = [WritePlan(plan.memory, plan.writes[:0], [b""], part) for part in some[1:]]
        return [WritePlan(plan.memory, plan.writes, plan.pieces, some[0]), *rest]


@liar(
    10,
    "the rows of more than 256 requests are a submission of their own, which is not counted",
    requires=("fused_scatter", "probe_counts"),
)
class RowsCountNothing(CountedOnce):
    """Two kernels from a size on."""

    def parts(self, plan: WritePlan) -> list[WritePlan]:
        """Return the records, and the rows."""
        if plan.records is None or len(plan.records.slots) <= 256 or not len(plan.writes):
            return [plan]
        return [
            WritePlan(plan.memory, plan.writes[:0], [b""], plan.records),
            WritePlan(plan.memory, plan.writes, plan.pieces),
        ]


# -- steps over many slots (G18) ---------------------------------------------------------------------------------------


class FirstCleaned(Patch):
    """Base: the clean-up is that of the first slots of a step."""

    seam = "clean-up of a step"
    most: ClassVar[int]

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Leave the rest out."""
        return lambda state, slots: true(state, slots[: cls.most])


@liar(18, "the clean-up of a step is one block of 1,024 threads, a slot each")
class CleanUpOfOneBlock(FirstCleaned):
    """The rest keeps its marks."""

    most = 1024


@liar(18, "the clean-up of a step leaves out slots from 2,048 on")
class CleanUpOfLowSlots(Patch):
    """A bit for each, in a word of fixed length."""

    seam = "clean-up of a step"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Leave them out."""
        return lambda state, slots: true(state, slots[slots < 2048])


# -- outputs in flight (G23) -------------------------------------------------------------------------------------------


class Blocks(Lie):
    """Base: so many outputs may be in flight; the next one waits on the host."""

    most = 0

    def wait_for(self, flying: deque[Event]) -> None:
        """Wait until there is room."""
        raise NotImplementedError

    @hookimpl
    def save_output(self, device: Device, state: SlotState, step: Step, sink: Sink, stream: Stream) -> Ticket:
        """Wait for room first."""
        flying: deque[Event] = self.__dict__.setdefault("_flying", deque())
        while flying and flying[0].done():
            flying.popleft()
        if len(flying) >= self.most:
            self.wait_for(flying)
        ticket: Ticket = super().save_output(device, state, step, sink, stream)  # type: ignore[misc]
        flying.append(device.event(stream))
        return ticket


@liar(23, "the ninth output in flight waits on the host for the oldest", requires=HELD_COPIES)
class EightInFlight(Blocks):
    """Eight blocks of locked memory."""

    most = 8

    def wait_for(self, flying: deque[Event]) -> None:
        """Wait for one, and say so."""
        device: Any = self
        device.count("host_waits")
        flying.popleft().wait(device.staging.deadline)


@liar(23, "after 64 outputs in flight the next one waits on the host for all of them", requires=HELD_COPIES)
class SixtyFourInFlight(Blocks):
    """A pool that is emptied as a whole, and no counter."""

    most = 64

    def wait_for(self, flying: deque[Event]) -> None:
        """Wait for the newest."""
        flying[-1].wait()
        flying.clear()
