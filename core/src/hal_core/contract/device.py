"""The interface of a plugin: the class named by an entry point, and the device object that it opens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from .capabilities import Capabilities

if TYPE_CHECKING:
    from ..group import Group
    from ..memory.copies import CopyTicket
    from ..memory.plan import WritePlan
    from ..memory.values import Value
    from ..memory.views import ByteRange, Memory, View
    from ..output.sinks import Sink
    from ..ranks.communicator import Communicator
    from ..slots.admission import AdmittedRequest
    from ..slots.batch_admission import AdmittedColumns
    from ..slots.state import SlotState
    from ..slots.step import Step
    from ..slots.tasks import TaskBatch
    from ..streams import Event, Stream, TimedEvent
    from ..tickets import Ticket
    from .counters import Counters


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of ``Plugin.probe()``: usable here, or the reason why not and the cure (one line each).

    ``present``: a part of the device is on this machine (a chip, a driver, a build for it), usable or not. Automatic
    selection reports a present device that it skips, and skips an absent one silently.
    """

    available: bool
    reason: str = ""
    cure: str = ""
    present: bool = True

    @classmethod
    def yes(cls, reason: str = "") -> Probe:
        """Return that the device can be opened; ``reason`` may describe the find."""
        return cls(True, reason)

    @classmethod
    def no(cls, reason: str, cure: str) -> Probe:
        """Return that the device cannot be opened here."""
        return cls(False, reason, cure)

    @classmethod
    def absent(cls, reason: str, cure: str) -> Probe:
        """Return that this machine has no such device, so that skipping it needs no message."""
        return cls(False, reason, cure, present=False)


class Plugin(ABC):
    """The class that an entry point of group ``hal.devices`` names.

    Its module imports only the standard library and light parts of ``hal_core``, so that listing devices stays cheap.
    :meth:`open` imports frameworks and drivers.

    ``kind``: the word in the variable with which Paddle's launcher gives a rank its device
    (``FLAGS_selected_<kind>s``), or "".

    ``resource``: the name under which Ray counts these devices on a node and assigns them ("GPU"), or "" if Ray does
    not assign them.

    ``name`` must equal the entry point's name. The priority for automatic selection is in the distribution's metadata,
    in the entry-point group ``hal.priorities``. A device without a priority is selected only by name.
    """

    name: ClassVar[str]
    kind: ClassVar[str] = ""
    resource: ClassVar[str] = ""

    @classmethod
    def count(cls) -> int:
        """Return how many such devices the ranks on this host share, one per rank, by index from 0.

        0 means that any number of processes may open the same one (host memory, simulated devices). Called before
        ``open``; it may import what ``open`` imports.
        """
        return 0

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Return whether the device can be used here; must import neither NumPy nor any framework."""

    @classmethod
    @abstractmethod
    def open(cls, index: int, options: Mapping[str, object]) -> Device:
        """Open device ``index``. Raises :class:`hal_core.errors.Unavailable` with the cure if it cannot be opened."""


class Hooks(Protocol):
    """The four hooks with their types; :mod:`hal_core.contract.hookspecs` has their guarantees.

    An opened device has them, and so has the wrapper that calls it through its observers.
    """

    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Make all ranks of a tensor-parallel group agree with its first rank."""

    def save_output(self, device: Device, state: SlotState, step: Step, sink: Sink, stream: Stream) -> Ticket:
        """Hand the step's tokens to the engine: copy them out and put them into ``sink`` once."""

    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write a value into a view of device memory."""

    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Put prefill, decode, preempted and aborted requests into their slots."""


class Device(Hooks, Protocol):
    """An opened device. Its hooks and primitives are called from one thread; tickets may be waited for from any.

    ``name`` is the plugin's, or ``name (substituted: X)`` with the ``X`` of its capabilities. The four hooks are
    methods marked with :data:`hal_core.hookimpl`. :class:`hal_core.devices.DeviceBase` implements them with the
    primitives below.
    """

    name: str
    index: int
    capabilities: Capabilities

    @property
    def deadline(self) -> float | None:
        """Seconds that a call waits for the device at most, before it raises; None if no call ever waits for it."""

    def allocate(self, nbytes: int) -> Memory:
        """Allocate device memory, at least 64-byte aligned; its contents are undefined."""

    def register_state(self, state: SlotState) -> None:
        """Prepare the device's resources for a state (maps, parameters), once, so that no hook has to wait for them."""

    def on_admit(self, state: SlotState, request: AdmittedRequest) -> None:
        """Handle the admission of a request for a state. The device may take its bytes ahead of the insertion, or
        ignore the call.

        Called from any thread. ``request.admission_id`` identifies the bytes at the insertion. The request must not be
        changed.
        """

    def on_admit_all(self, state: SlotState, columns: AdmittedColumns) -> None:
        """The same of requests that were admitted together, from columns that are valid until it returns."""

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Write a plan in stream order. The plan's arrays may be changed by the caller once this returns (G2)."""

    def submit_all(self, plans: Sequence[WritePlan], stream: Stream) -> Ticket:
        """Write plans of different memories in stream order: one submission with ``several_memories``."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy byte ranges to the host, as they are after the work that is now on ``stream``.

        Work put on the stream later does not change the copy, and does not wait on the host. Other streams neither wait
        nor are waited for. ``parts`` may be changed by the caller once this returns.
        """

    def order_after_reads(self, stream: Stream, memory: Memory | None = None) -> None:
        """Make ``stream`` wait for copies out that still read ``memory`` (None: any), before foreign work writes there.
        The host does not wait. The device's own writes are already ordered so."""

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Apply the changes of a step to the state; see :mod:`hal_core.slots.update`."""

    def check_stream(self, stream: Stream) -> None:
        """Raise InvalidValue for a stream that takes no work now, as it is being captured into a graph."""

    def capture_update(self, state: SlotState, stream: Stream, *, speculative: bool) -> None:
        """Put the work of :meth:`update_inputs` into the graph that ``stream`` is captured into, without executing it.

        Raises CapabilityMissing if the device has no graphs, InvalidValue if the stream is not captured.
        """

    def launch_graphs(self, graphs: Sequence[int], stream: Stream) -> None:
        """Launch graphs of the caller's, by their handles; see :meth:`hal_core.BoundDevice.launch_graphs`. Raises
        CapabilityMissing where there are no graphs."""

    def replayed(self, event: Event) -> Ticket:
        """Count a launch of a graph with a captured update; return its ticket, of the event recorded after it."""

    def resolve(self, target: object) -> View:
        """Return a view of a tensor that the device can write. Raises InvalidValue for a foreign or freed tensor."""

    def tensor(self, view: View, framework: str = "") -> object:
        """Return a framework's tensor over a view's memory; see :meth:`hal_core.SlotState.tensor`. Raises Unavailable
        if the device has none."""

    def is_device_value(self, value: object) -> bool:
        """Return True for a value that is already on this device (read in stream order, not inspected: G6)."""

    def stream(self) -> Stream:
        """Create a stream."""

    @property
    def default_stream(self) -> Stream:
        """The stream on which the framework computes."""

    def event(self, stream: Stream) -> Event:
        """Return an event after all work that is now on ``stream``."""

    def timed_event(self, stream: Stream) -> TimedEvent | None:
        """Return an event after all work that is now on ``stream`` and that notes the device's time; None without
        ``timed_events``."""

    def communicator(self, group: Group) -> Communicator:
        """Open a group; all its ranks call this in the same order. Raises if the device has no collectives.

        If opening a group raised :class:`hal_core.errors.GroupLost`, every later call raises it again at once.
        """

    def hold_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Keep ``stream`` from executing until the context ends. Raises CapabilityMissing if the device cannot."""

    def counters(self) -> Counters:
        """Counts since the device was opened."""

    def close(self) -> None:
        """Wait for the queued work of every stream, at most up to a deadline, and release everything. Idempotent."""
