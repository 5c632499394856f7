"""The base class of devices: the four hooks and ``update_inputs``, written with a device's primitives.

A device derived from :class:`DeviceBase` defines how bytes move (``allocate``, ``submit``, ``copy_out``) and its
streams (or derives from :class:`hal_core.devices.sync.SyncDevice`).
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
from .framework_tensors import tensor_over
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
    from ..slots.batch_admission import AdmittedColumns
    from ..slots.native_columns import NativeColumns
    from ..slots.state import SlotState
    from ..slots.step import Step
    from ..slots.tasks import TaskBatch
    from ..streams import Event, Stream, TimedEvent


class DeviceBase(ABC):
    """Base of all devices. Subclasses set ``name`` and ``capabilities`` and implement the abstract methods."""

    name: str
    capabilities: Capabilities
    native_columns: NativeColumns | None = None
    """Native functions for batches, token ids and rows, if the device has some."""
    note: str = ""
    """A remark about an opened device, one line, shown by ``hal devices --open``."""

    dlpack_type: ClassVar[int] = 0
    """The ``DLDeviceType`` of memory whose addresses other libraries can use; 0 if they cannot."""
    stream_pool: object = None
    """What each stream that this device makes has as ``pool``, and no stream of another opened device; by it a call
    refuses theirs. None: the device's own class of streams has no pool, and the device refuses them itself."""
    deadline: float | None = None
    """Seconds that a call waits for the device at most, before it raises; None for a device that no call waits for."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._counts: dict[str, int] = dict.fromkeys(Counters.__slots__, 0)
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        self._never_opened: dict[tuple[int, ...], GroupLost] = {}
        self._closed = False

    # -- primitives ---------------------------------------------------------------------------------------------

    @abstractmethod
    def allocate(self, nbytes: int) -> Memory:
        """Allocate device memory; see :class:`hal_core.contract.device.Device`."""

    def register_state(self, state: SlotState) -> None:  # noqa: B027 (optional)
        """Prepare the device's resources for a state; none by default."""

    def on_admit(self, state: SlotState, request: AdmittedRequest) -> None:  # noqa: B027 (optional)
        """Take an admitted request's bytes ahead of its insertion; ignored by default."""

    def on_admit_all(self, state: SlotState, columns: AdmittedColumns) -> None:
        """The same of requests that were admitted together; by default one by one."""
        if type(self).on_admit is not DeviceBase.on_admit:
            for request in columns.requests:
                self.on_admit(state, request)

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
        """Copy byte ranges to the host, as they are after the work that is now on ``stream``."""

    @abstractmethod
    def stream(self) -> Stream:
        """Create a stream."""

    @property
    @abstractmethod
    def default_stream(self) -> Stream:
        """The stream on which the framework computes."""

    def resolve(self, target: object) -> View:
        """Return a view of a tensor that the device can write; by default without a framework, for views only.

        :raises InvalidValue: for an object that is no tensor of this device.
        """
        if isinstance(target, View):
            return target
        raise InvalidValue(
            f"{type(target).__name__} is not a tensor of this device", cure="give a view of a state", argument="target"
        )

    @property
    def dlpack_device(self) -> tuple[int, int] | None:
        """``(DLDeviceType, index)`` of this device's memory, None if DLPack does not support it."""
        return (self.dlpack_type, self.index) if self.dlpack_type else None

    def before_consumer(self, stream: int | None) -> None:  # noqa: B027 (optional)
        """Make a DLPack consumer's stream wait for this device's queued work; by default there is none.

        ``stream`` as in ``__dlpack__``: a handle, None for the library's default stream, -1 for no order at all.
        """

    def tensor(self, view: View, framework: str = "") -> Any:  # noqa: ANN401 (a framework's)
        """Return a framework's tensor over a view's memory; see :meth:`hal_core.SlotState.tensor`."""
        self.check_open()
        return tensor_over(view, framework)

    def close(self) -> None:
        """Leave the groups; memory lives as long as its references. Idempotent. Subclasses release further
        resources."""
        self._closed = True
        while self._communicators:
            self._communicators.popitem()[1].close()

    def check_open(self) -> None:
        """Raise :class:`DeviceClosed` after :meth:`close`; called at the beginning of primitives."""
        if self._closed:
            raise DeviceClosed("the device is closed", cure="open it again", device=f"{self.name}:{self.index}")

    def is_device_value(self, value: object) -> bool:
        """Return True for a value that is on this device; False by default."""
        return False

    def event(self, stream: Stream) -> Event:
        """Return an event after all work that is now on ``stream``."""
        return stream.record()

    def timed_event(self, stream: Stream) -> TimedEvent | None:
        """Return None: by default a device has no clock."""
        return None

    def communicator(self, group: Group) -> Communicator:
        """Return the group's collectives, opened once. A group whose opening was lost stays lost for this device (G16).

        A second opening would wait the whole timeout again at each call, and a late rank would meet a second opening
        while it is at its first.

        :raises GroupLost: if a rank does not come, and at each later call.
        :raises CapabilityMissing: if the device has no collectives.
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
        """Open a group, of all ranks that call this in the same order. By default a device has no collectives.

        :raises CapabilityMissing: if it has none.
        """
        raise CapabilityMissing(
            f"has no collectives, but the group {group.ranks} has {group.size} ranks",
            cure="run one rank, or choose a device whose capabilities name a collective",
            device=f"{self.name}:{self.index}",
            hook="broadcast_tokens",
            argument="group",
        )

    def hold_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Hold a stream. By default a device cannot.

        :raises CapabilityMissing: if it cannot.
        """
        raise CapabilityMissing(
            "cannot hold a stream", cure="check capabilities.can_hold_stream first", device=f"{self.name}:{self.index}"
        )

    def counters(self) -> Counters:
        """Return the counts since the device was opened; each wait of a staging ring is also a wait of the host."""
        waits = getattr(getattr(self, "staging", None), "waits", 0)
        return Counters(**self._counts | {"ring_waits": waits, "host_waits": self._counts["host_waits"] + waits})

    def count(self, name: str, by: int = 1) -> None:
        """Add to one of the counts."""
        self._counts[name] += by

    def fall_back(self, hook: str) -> None:
        """Count a call of a hook that has a fallback in the capabilities."""
        if hook in self.capabilities.fallbacks:
            self._counts["fallbacks"] += 1

    def order_after_reads(self, stream: Stream, memory: Memory | None = None) -> None:  # noqa: B027 (optional)
        """Return at once: copies out are done when :meth:`copy_out` returns, unless a subclass overrides this."""

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Run the reference on a copy of the state and write it back as one plan; waits for the device once or
        twice."""
        return update_by_copy(self, state, step, stream)

    def check_stream(self, stream: Stream) -> None:  # noqa: B027 (most devices have no graphs)
        """Raise :class:`InvalidValue` for a stream that is being captured into a graph; by default there are no
        graphs."""

    def capture_update(self, state: SlotState, stream: Stream, *, speculative: bool) -> None:
        """Put an update into the graph that ``stream`` is captured into. By default a device has no graphs.

        :raises CapabilityMissing: if it has none.
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
        """Return the ticket of a graph's launch; implemented if :meth:`capture_update` is."""
        raise NotImplementedError

    # -- hooks --------------------------------------------------------------------------------------------------

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Write one plan for all fields of all requests."""
        self.fall_back("insert_tasks")
        return self.submit(plan_insert(state, tasks), stream)

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write one plan for all runs of the target."""
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

        By default through the host, which waits for the copy out.
        """
        low, high = value.bounds()
        copied = self.copy_out(value.memory, [ByteRange(low, high - low)], stream)
        copied.wait(self.deadline)
        self.count("host_waits")
        strided = np.ndarray(value.shape, value.dtype.storage, copied.data[0], value.offset - low, value.strides)
        return self.submit_value(target, np.ascontiguousarray(strided).reshape(target.shape), stream)

    @hookimpl
    def save_output(self, device: Device, state: SlotState, step: Step, sink: Sink, stream: Stream) -> Ticket:
        """Copy the adjacent output fields once; the record is built when the copy has arrived."""
        if self.capabilities.fallbacks:
            self.fall_back("save_output")
        part = state.output_range(topk=step.logprobs is not None)
        ticket = OutputTicket(state, step, self.copy_out(state.memory, [part], stream), part)
        sink.put(ticket)
        return ticket

    @hookimpl
    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Run one collective over the state's broadcast slice."""
        self.fall_back("broadcast_tokens")
        return self.communicator(group).broadcast(state.memory, state.broadcast_range(), stream)


def others_stream() -> InvalidValue:
    """Return the error for a stream that another opened device made."""
    return InvalidValue(
        "the stream is of another opened device",
        cure="give a stream of this device: device.default_stream, or one that its stream() made",
        argument="stream",
    )


def check_index(device: str, index: int, count: int) -> None:
    """Raise :class:`InvalidValue` for an index without a device."""
    if not 0 <= index < count:
        only = f"there is only {device}:0" if count else "no device was found"
        there = f"indices go from 0 to {count - 1}" if count > 1 else only
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
    """Return the plan that writes a host value to all runs of a view: an array of its shape, or one element that
    fills."""
    builder = PlanBuilder(target.memory)
    offsets, nbytes = target.runs()
    if isinstance(value, np.ndarray):
        builder.copy(offsets, nbytes, value.reshape(-1).view(np.uint8))
    else:
        builder.fill(offsets, nbytes, value)
    return builder.build()
