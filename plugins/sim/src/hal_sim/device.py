"""The sim device: the simulated accelerator behind the contract, with nothing done by the host that a device can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from hal_core.base import DeviceBase
from hal_core.capabilities import Capabilities
from hal_core.counters import Counters
from hal_core.errors import DeviceClosed, HalError, InvalidValue
from hal_core.markers import hookimpl
from hal_core.staging import StagingRing
from hal_core.tickets import DONE, Ticket
from hal_core.views import View

from hal_sim.accelerator import Accelerator
from hal_sim.communicator import SimCommunicator, job_name
from hal_sim.copies import Lease, OutputBlocks, PendingReads, SimCopy
from hal_sim.device_options import Options
from hal_sim.memory import Limbo, PinnedBlock, SimMemory
from hal_sim.ordering import EventPool, Health, SimEvent, SimStream, SimTicket
from hal_sim.paddle_env import current_stream
from hal_sim.records import Report
from hal_sim.stepping import StepKernel
from hal_sim.streams import Stream as RawStream
from hal_sim.targets import is_on_accelerator, loaded_paddle, resolve
from hal_sim.writing import Writer

if TYPE_CHECKING:
    from hal_core.device import Device, Stream
    from hal_core.group import Group
    from hal_core.layout import ByteRange
    from hal_core.plan import WritePlan
    from hal_core.state import SlotState
    from hal_core.steps import Step
    from hal_core.transfers import CopyTicket
    from hal_core.values import Value
    from hal_core.views import Memory

P = ParamSpec("P")
T = TypeVar("T")


def primitive(call: Callable[Concatenate[SimDevice, P], T]) -> Callable[Concatenate[SimDevice, P], T]:
    """A call that a closed or faulty device refuses, and whose errors name this device by its index."""

    @wraps(call)
    def checked(device: SimDevice, /, *arguments: P.args, **named: P.kwargs) -> T:
        try:
            if device.closed:
                raise DeviceClosed("the device is closed", cure="open it again")
            device.health.check()
            return call(device, *arguments, **named)
        except HalError as error:
            error.device = device.located
            raise

    return checked


class SimDevice(DeviceBase):
    """One simulated device. Targets are state views, :class:`SimTensor` and Paddle tensors on the accelerator."""

    name = "sim"
    capabilities = Capabilities(
        async_h2d=True,
        async_d2h=True,
        fused_scatter=True,
        pinned_host=True,
        can_hold_stream=True,
        collective="shared memory",
    )

    def __init__(self, index: int, options: Mapping[str, object]) -> None:
        super().__init__(index)
        self.located = f"sim:{index}"
        chosen = Options.of(options)
        self.accelerator = Accelerator(index)
        self.health, self.limbo, self.closed = Health(self.located), Limbo(), False
        self.events = EventPool(self.health)
        self.staging = StagingRing(
            lambda nbytes: PinnedBlock(self.accelerator, self.limbo, nbytes, mirrored=True),
            start=chosen.ring_start,
            limit=chosen.ring_limit,
            deadline=chosen.deadline,
        )
        self.blocks = OutputBlocks(self.accelerator, self.limbo)
        self.reads = PendingReads()
        self.writer = Writer(self)
        self.steps = StepKernel(self.accelerator)
        self.job = chosen.job or job_name()
        self._own, self._copies = self.stream(), self.stream()
        self._adopted: dict[int, SimStream] = {}
        self._below = self._native_counts()

    # -- streams ------------------------------------------------------------------------------------------------

    def stream(self) -> SimStream:
        """A new stream with a worker of its own."""
        return SimStream(self.events, self.accelerator.stream())

    @property
    def default_stream(self) -> SimStream:
        """Paddle's current stream where Paddle computes on this accelerator, else one of our own."""
        known = loaded_paddle()
        return self._own if known is None else self.wrap(current_stream(self.index, known[1]).handle)

    def wrap(self, handle: int) -> SimStream:
        """A stream that somebody else made, such as Paddle. Raises :class:`InvalidValue` for one of another device."""
        found = self._adopted.get(handle)
        if found is None:
            raw = RawStream.adopt(handle)
            if raw.device != self.index:
                raise InvalidValue(
                    f"stream {handle:#x} belongs to device {raw.device}",
                    cure=f"give a stream of device {self.index}",
                    device=self.located,
                    argument="stream",
                )
            found = self._adopted[handle] = SimStream(self.events, raw)
        return found

    def own(self, stream: object) -> SimStream:
        """The stream as ours: a SimStream of this device, or something with the handle of one."""
        if isinstance(stream, SimStream) and stream.stream.device == self.index:
            return stream
        handle = stream if isinstance(stream, int) else getattr(stream, "handle", getattr(stream, "raw_stream", None))
        if not isinstance(handle, int):
            raise InvalidValue(
                f"{type(stream).__name__} is no stream of this device", cure="use device.stream()", argument="stream"
            )
        return self.wrap(handle)

    @contextmanager
    def hold(self, stream: Stream) -> Iterator[None]:
        """Let nothing on ``stream`` begin until the context ends; an event recorded meanwhile has not passed."""
        own = self.own(stream)
        other = self._own if own.handle == self._copies.handle else self._copies
        with own.stream.held():
            own.wait(other.record())  # the accelerator's gate stops work alone: here is some, to stand before events
            yield

    # -- memory -------------------------------------------------------------------------------------------------

    @primitive
    def allocate(self, nbytes: int) -> SimMemory:
        """A block of device memory, which the host cannot touch."""
        memory = SimMemory.allocate(self, self.accelerator, self.limbo, nbytes)
        self.count("allocations")
        return memory

    @primitive
    def adopt(self, state: SlotState) -> None:
        """Put the map of the state's records where kernels find it."""
        assert isinstance(state.memory, SimMemory)
        state.memory.table(state.spread)

    @primitive
    def resolve(self, target: object) -> View:
        """A view over a tensor's own memory."""
        return target if isinstance(target, View) else resolve(self, target)

    def is_device_value(self, value: object) -> bool:
        """True for a tensor in the accelerator's memory."""
        return is_on_accelerator(value)

    def holds(self, address: int) -> bool:
        """True for an address in live memory of the accelerator."""
        return bool(self.accelerator._native.is_device_memory(address))

    # -- work ---------------------------------------------------------------------------------------------------

    @primitive
    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """One upload and one launch for the staging block that the plan fills."""
        return DONE if plan.empty else self.writer.submit(plan, self.own(stream))

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """A fill, one upload, or an upload and a strided copy, by what value and target are."""
        return self._set_value(target, value, stream)

    @primitive
    def _set_value(self, target: View, value: Value, stream: Stream) -> Ticket:
        return self.writer.set_value(target, value, self.own(stream))

    @primitive
    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy on the copy stream, after an event on ``stream``, which does not wait."""
        copies, places, at = self._copies, [], 0
        if any(part.offset < 0 or part.end > memory.nbytes for part in parts):
            raise InvalidValue(f"{parts} of a block of {memory.nbytes} bytes", cure="stay inside", argument="parts")
        lease = Lease(self.blocks, self.blocks.take(sum(part.nbytes for part in parts)))
        copies.wait(self.own(stream).record())
        try:
            for part in parts:
                if part.nbytes:
                    source = memory.address + part.offset
                    self.accelerator.d2h(lease.block.address + at, source, part.nbytes, copies.stream)
                    self.count("copies_out")
                places.append((at, part.nbytes))
                at += part.nbytes
        finally:
            event = lease.event = copies.record()
            if isinstance(memory, SimMemory) and parts:
                memory.used(copies, event)
                self.reads.add(memory, parts, event)
        return SimCopy(event, lease, places)

    @primitive
    def advance(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """One kernel over all slots; the host takes no part."""
        own, memory = self.own(stream), state.memory
        assert isinstance(memory, SimMemory)
        self.reads.order(memory, own)
        self.steps.launch(state, own, speculative=step.speculative)
        event = own.record()
        memory.used(own, event)
        return SimTicket(event)

    def order_after_reads(self, stream: Stream) -> None:
        """Let ``stream`` wait for copies out under way, before kernels of the caller's own write what they read."""
        self.reads.order(None, self.own(stream))

    @primitive
    def communicator(self, group: Group) -> SimCommunicator:
        """The group over shared memory; opened once."""
        found = self.health.communicators.get(group.ranks)
        if found is None:
            found = self.health.communicators[group.ranks] = SimCommunicator(self, group)
        return found

    # -- counts and the checker ---------------------------------------------------------------------------------

    def counters(self) -> Counters:
        """Counts since the device was opened."""
        waits = self.staging.waits
        counts = self._counts | {"ring_waits": waits, "host_waits": self._counts["host_waits"] + waits}
        return Counters(**counts)

    def probe_counts(self) -> Counters:
        """The same from the accelerator's own trace, for the conformance kit. It counts for the whole process."""
        now = self._native_counts()
        return Counters(**{name: now[name] - self._below[name] for name in now})

    def _native_counts(self) -> dict[str, int]:
        counted = self.accelerator.counters()
        launches = counted["launches"] - counted["kernel_function"]  # advance, which is no write
        return {
            "submissions": counted["async_h2d"] + launches,
            "uploads": counted["async_h2d"],
            "launches": launches,
            "copies_out": counted["async_d2h"],
            "collectives": counted["broadcast"],
            "allocations": counted["allocate"],
        }

    def races(self) -> list[Report]:
        """What the happens-before checker has found in this process."""
        return self.accelerator.races()

    def close(self) -> None:
        """Wait for the work that is under way, then give everything back."""
        if self.closed:
            return
        self.closed = True
        for communicator in self.health.communicators.values():
            communicator.close()
        ends: list[SimEvent] = [stream.record() for stream in (self._own, self._copies, *self._adopted.values())]
        with suppress(HalError):  # what it met was told by tickets; a stream that is held keeps its memory
            if all(end.wait(self.staging.deadline) for end in ends):
                self.staging.close()
        self.blocks.close()
        self.limbo.reap()
        self.events.close()
