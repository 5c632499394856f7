"""The shared base of devices: the four hooks and ``update_inputs``, written in terms of a device's primitives.

A device that derives from :class:`DeviceBase` says how bytes move (``allocate``, ``submit``, ``copy_out``), what its
streams are (or derives from :class:`hal_core.devices.sync.SyncDevice`), and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..contract.counters import Counters
from ..contract.markers import hookimpl
from ..errors import CapabilityMissing, DeviceClosed, GroupLost, InvalidValue
from ..memory.plan import PlanBuilder, WritePlan
from ..memory.views import ByteRange, View
from ..output.ticket import OutputTicket
from ..slots.insertion import plan_insert
from ..tickets import DONE, Ticket
from .tensors import tensor_over
from .update_by_copy import update_by_copy

if TYPE_CHECKING:
    from ..contract.capabilities import Capabilities
    from ..contract.device import Device
    from ..group import Group
    from ..memory.copies import CopyTicket
    from ..memory.values import Value
    from ..memory.views import Memory
    from ..output.sinks import Sink
    from ..ranks.communicator import Communicator
    from ..slots.admission import AdmittedRequest
    from ..slots.state import SlotState
    from ..slots.step import Step
    from ..slots.tasks import TaskBatch
    from ..streams import Event, Stream


class DeviceBase(ABC):
    """What devices share. Subclasses set ``name`` and ``capabilities`` and implement the abstract methods."""

    name: str
    capabilities: Capabilities
    note: str = ""
    """What else is to be known of an opened device, one line; ``hal devices --open`` shows it."""

    dlpack_type: ClassVar[int] = 0
    """The ``DLDeviceType`` of memory whose addresses other libraries can use; 0: there is none."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._counts: dict[str, int] = dict.fromkeys(Counters.__slots__, 0)
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        self._never_opened: dict[tuple[int, ...], GroupLost] = {}
        self._closed = False

    # -- primitives ---------------------------------------------------------------------------------------------

    @abstractmethod
    def allocate(self, nbytes: int) -> Memory:
        """A block of device memory; see :class:`hal_core.contract.device.Device`."""

    def register_state(self, state: SlotState) -> None:  # noqa: B027 (most devices need nothing)
        """Make ready what the device needs for a state; by default nothing."""

    def on_admit(self, state: SlotState, request: AdmittedRequest) -> None:  # noqa: B027 (most devices take nothing)
        """Take an admitted request's bytes ahead of its insertion; by default nothing."""

    @abstractmethod
    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Write a plan in stream order."""

    def submit_all(self, plans: Sequence[WritePlan], stream: Stream) -> Ticket:
        """Write plans of different memories in stream order; by default one submission after the other."""
        ticket: Ticket = DONE
        for plan in plans:
            ticket = self.submit(plan, stream)
        return ticket

    @abstractmethod
    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy byte ranges to the host, as they are after the work that is on ``stream`` now."""

    @abstractmethod
    def stream(self) -> Stream:
        """A new stream."""

    @property
    @abstractmethod
    def default_stream(self) -> Stream:
        """The stream on which the framework computes."""

    def resolve(self, target: object) -> View:
        """A view of a tensor that the device can write; by default there is no framework, and views alone are taken.

        :raises InvalidValue: for what is no tensor of this device.
        """
        if isinstance(target, View):
            return target
        raise InvalidValue(
            f"{type(target).__name__} is no tensor of this device", cure="give a view of a state", argument="target"
        )

    @property
    def dlpack_device(self) -> tuple[int, int] | None:
        """``(DLDeviceType, index)`` of this device's memory, None where DLPack has no word for it."""
        return (self.dlpack_type, self.index) if self.dlpack_type else None

    def before_consumer(self, stream: int | None) -> None:  # noqa: B027 (most devices have nothing under way)
        """Let a DLPack consumer's stream wait for what this device has under way; by default nothing is.

        ``stream`` as in ``__dlpack__``: a handle, None for the library's default stream, -1 for no order at all.
        """

    def tensor(self, view: View, framework: str = "") -> Any:  # noqa: ANN401 (a framework's)
        """A tensor of a framework over a view's memory; see :meth:`hal_core.SlotState.tensor`."""
        self.check_open()
        return tensor_over(view, framework)

    def close(self) -> None:
        """Leave the groups; whoever holds memory keeps it. Idempotent. A device with more to give back adds that."""
        self._closed = True
        while self._communicators:
            self._communicators.popitem()[1].close()

    def check_open(self) -> None:
        """Raise :class:`DeviceClosed` after :meth:`close`; for primitives to begin with."""
        if self._closed:
            raise DeviceClosed("the device is closed", cure="open it again", device=f"{self.name}:{self.index}")

    def is_device_value(self, value: object) -> bool:
        """True for a value that is on this device; by default none is."""
        return False

    def event(self, stream: Stream) -> Event:
        """An event after everything that is on ``stream`` now."""
        return stream.record()

    def communicator(self, group: Group) -> Communicator:
        """The group's collectives; opened once. A group whose opening was lost stays lost for this device (G16).

        Waiting for its ranks once more would take the whole timeout again, at each call; and ranks that are late now
        would meet a second opening where the others are at their first.

        :raises GroupLost: where a rank does not come, and at each later call.
        :raises CapabilityMissing: where the device has no collectives.
        """
        found = self._communicators.get(group.ranks)
        if found is not None:
            return found
        self.check_open()
        if (lost := self._never_opened.get(group.ranks)) is not None:
            raise GroupLost(lost.what, cure=lost.cure, argument="group") from lost
        try:
            found = self._communicators[group.ranks] = self.open_communicator(group)
        except GroupLost as error:
            self._never_opened[group.ranks] = error
            raise
        return found

    def open_communicator(self, group: Group) -> Communicator:
        """Open a group, of all ranks that call this in one order. By default a device has no collectives.

        :raises CapabilityMissing: where it has none.
        """
        raise CapabilityMissing(
            f"has no collectives, and the group {group.ranks} has {group.size} ranks",
            cure="run one rank, or choose a device whose capabilities name a collective",
            device=f"{self.name}:{self.index}",
            hook="broadcast_tokens",
            argument="group",
        )

    def hold_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Hold a stream. By default a device cannot.

        :raises CapabilityMissing: where it cannot.
        """
        raise CapabilityMissing(
            "cannot hold a stream", cure="ask capabilities.can_hold_stream first", device=f"{self.name}:{self.index}"
        )

    def counters(self) -> Counters:
        """Counts since the device was opened; each wait of a staging ring is one of the host's, too."""
        waits = getattr(getattr(self, "staging", None), "waits", 0)
        return Counters(**self._counts | {"ring_waits": waits, "host_waits": self._counts["host_waits"] + waits})

    def count(self, name: str, by: int = 1) -> None:
        """Add to one of the counts."""
        self._counts[name] += by

    def fall_back(self, hook: str) -> None:
        """Count a call of a hook that the capabilities name a fallback for."""
        if hook in self.capabilities.fallbacks:
            self._counts["fallbacks"] += 1

    def order_after_reads(self, stream: Stream, memory: Memory | None = None) -> None:  # noqa: B027 (nothing is pending)
        """Copies out are over when :meth:`copy_out` returns, unless the device says otherwise."""

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """The reference on a copy of the state, written back as one plan; waits for the device once or twice."""
        return update_by_copy(self, state, step, stream)

    def check_stream(self, stream: Stream) -> None:  # noqa: B027 (most devices have no graphs)
        """Raise :class:`InvalidValue` for a stream whose work goes into a graph now; by default there are no graphs."""

    def capture_update(self, state: SlotState, stream: Stream, *, speculative: bool) -> None:
        """Put an update into the graph that ``stream`` is captured into. By default a device has no graphs.

        :raises CapabilityMissing: where it has none.
        """
        raise CapabilityMissing(
            "has no graphs", cure="call update_inputs in each step", device=f"{self.name}:{self.index}"
        )

    def launch_graphs(self, graphs: Sequence[int], stream: Stream) -> None:
        """Launch instantiated graphs, one after the other. By default a device has no graphs.

        :raises CapabilityMissing: where it has none.
        """
        raise CapabilityMissing(
            "has no graphs", cure="launch the work itself in each step", device=f"{self.name}:{self.index}"
        )

    def replayed(self, event: Event) -> Ticket:
        """The ticket of a graph's launch; where :meth:`capture_update` captures, so does this."""
        raise NotImplementedError

    # -- hooks --------------------------------------------------------------------------------------------------

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """One plan for all fields of all requests."""
        self.fall_back("insert_tasks")
        return self.submit(plan_insert(state, tasks), stream)

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """One plan for all runs of the target."""
        self.check_open()
        self.fall_back("async_set_value")
        if isinstance(value, View):
            return self.copy_within(target, value, stream)
        return self.submit_value(target, value, stream)

    def submit_value(self, target: View, value: np.ndarray[Any, Any] | np.generic, stream: Stream) -> Ticket:
        """Write a host value: an array of the target's shape, or one element that fills."""
        return self.submit(plan_value(target, value), stream)

    def copy_within(self, target: View, value: View, stream: Stream) -> Ticket:
        """Copy between two views of this device's memory in stream order, row-major element by element.

        By default by way of the host, which waits for the copy out.
        """
        low, high = value.bounds()
        copied = self.copy_out(value.memory, [ByteRange(low, high - low)], stream)
        copied.wait()
        self.count("host_waits")
        strided = np.ndarray(value.shape, value.dtype.storage, copied.data[0], value.offset - low, value.strides)
        return self.submit_value(target, np.ascontiguousarray(strided).reshape(target.shape), stream)

    @hookimpl
    def save_output(self, device: Device, state: SlotState, step: Step, sink: Sink, stream: Stream) -> Ticket:
        """One copy of the adjacent output fields; the record is built when the copy is there."""
        if self.capabilities.fallbacks:
            self.fall_back("save_output")
        part = state.output_range(topk=step.logprobs is not None)
        ticket = OutputTicket(state, step, self.copy_out(state.memory, [part], stream), part)
        sink.put(ticket)
        return ticket

    @hookimpl
    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """One collective over the state's broadcast slice."""
        self.fall_back("broadcast_tokens")
        return self.communicator(group).broadcast(state.memory, state.broadcast_range(), stream)


def check_index(device: str, index: int, count: int) -> None:
    """Raise :class:`InvalidValue` for an index of a device that is not there."""
    if not 0 <= index < count:
        there = f"indices go from 0 to {count - 1}" if count else "there is none"
        raise InvalidValue(
            f"no device {device}:{index}: {there}", cure="choose another", device=device, argument="index"
        )


def check_options(device: str, options: Mapping[str, object], known: Sequence[str] = ()) -> None:
    """Raise :class:`InvalidValue` for options that the device does not take."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        cure = f"known: {', '.join(known)}" if known else "give none"
        raise InvalidValue(f"unknown options {unknown}", cure=cure, device=device, argument="options")


def plan_value(target: View, value: np.ndarray[Any, Any] | np.generic) -> WritePlan:
    """The plan that writes a host value to all runs of a view: an array of its shape, or one element that fills."""
    builder = PlanBuilder(target.memory)
    offsets, nbytes = target.runs()
    if isinstance(value, np.ndarray):
        builder.copy(offsets, nbytes, value.reshape(-1).view(np.uint8))
    else:
        builder.fill(offsets, nbytes, value)
    return builder.build()
