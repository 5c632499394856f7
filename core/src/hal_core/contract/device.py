"""What a plugin implements: the class an entry point names, and the device object that it opens."""

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
    from ..slots.state import SlotState
    from ..slots.step import Step
    from ..slots.tasks import TaskBatch
    from ..streams import Event, Stream
    from ..tickets import Ticket
    from .counters import Counters


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer of ``Plugin.probe()``: usable here, or the reason why not and the cure (each one line).

    ``present``: something of the device is on this machine (a chip, a driver, a build for it), whether it can be used
    or not. Automatic selection says what it passes over; a device that is not present it passes over without a word.
    """

    available: bool
    reason: str = ""
    cure: str = ""
    present: bool = True

    @classmethod
    def yes(cls, reason: str = "") -> Probe:
        """The device can be opened; ``reason`` may say what was found."""
        return cls(True, reason)

    @classmethod
    def no(cls, reason: str, cure: str) -> Probe:
        """The device cannot be opened here."""
        return cls(False, reason, cure)

    @classmethod
    def absent(cls, reason: str, cure: str) -> Probe:
        """There is no such device on this machine: nobody can have expected it to be used."""
        return cls(False, reason, cure, present=False)


class Plugin(ABC):
    """The class that an entry point of group ``hal.devices`` names.

    Its module imports the standard library and light parts of ``hal_core`` alone, so that listing devices stays
    cheap; frameworks and drivers are imported by :meth:`open`.

    ``kind``: the word by which Paddle's launcher tells a rank which of these devices is its own
    (``FLAGS_selected_<kind>s``); "" where it has none.

    ``resource``: the name under which Ray counts these devices on a node and assigns them ("GPU"); "" where Ray does
    not assign them.

    ``name`` must equal the entry point's name. Its priority for auto-selection is in the distribution's metadata alone,
    in the entry-point group ``hal.priorities``; without a line there the device is selected by name only.
    """

    name: ClassVar[str]
    kind: ClassVar[str] = ""
    resource: ClassVar[str] = ""

    @classmethod
    def count(cls) -> int:
        """How many such devices the ranks on this host share out, one each, by index from 0; 0 where any number of
        processes may open the same one (host memory, what is simulated). Called before ``open``; may import as it."""
        return 0

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Say whether the device can be used here; must import neither NumPy nor any framework."""

    @classmethod
    @abstractmethod
    def open(cls, index: int, options: Mapping[str, object]) -> Device:
        """Open device ``index``. Raises :class:`hal_core.errors.Unavailable` with the cure where it cannot."""


class Hooks(Protocol):
    """The four hooks with their types; what each guarantees stands in :mod:`hal_core.contract.hookspecs`.

    An opened device has them, and so has what calls it by way of its observers.
    """

    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Make all ranks of a tensor-parallel group agree with its first rank."""

    def save_output(self, device: Device, state: SlotState, step: Step, sink: Sink, stream: Stream) -> Ticket:
        """Hand the step's tokens to the engine: copied out, and put into ``sink`` once."""

    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write a value into a view of device memory."""

    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Put prefill, decode, preempted and aborted requests into their slots."""


class Device(Hooks, Protocol):
    """An opened device. Its hooks and primitives are called from one thread; tickets are waited for from any.

    ``name`` is the plugin's, or ``name (substituted: X)`` with the ``X`` of its capabilities.

    The four hooks are methods marked with :data:`hal_core.hookimpl`; :class:`hal_core.devices.DeviceBase` writes them
    in terms of the primitives below.
    """

    name: str
    index: int
    capabilities: Capabilities

    def allocate(self, nbytes: int) -> Memory:
        """A block of device memory, at least 64-byte aligned; the contents are undefined."""

    def register_state(self, state: SlotState) -> None:
        """Make ready what the device needs for a state (maps, parameters), once, so that no hook has to wait for it."""

    def on_admit(self, state: SlotState, request: AdmittedRequest) -> None:
        """A request was just admitted for a state: the device may take its bytes ahead of the insertion, or do nothing.

        From any thread. It knows what it took again by ``request.admission_id``, and never changes the request.
        """

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Write a plan in stream order. The plan's arrays may be changed by the caller once this returns (G2)."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy byte ranges to the host as they are after the work that is on ``stream`` now.

        Work put on the stream later does not change what is copied, and is not held up on the host. No other stream is
        waited for, and none waits. ``parts`` may be changed by the caller once this returns.
        """

    def order_after_reads(self, stream: Stream, memory: Memory | None = None) -> None:
        """Let ``stream`` wait for copies out that still read ``memory`` (None: any), before others' work writes there;
        the host does not wait. What the device itself writes is ordered so by itself."""

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Do to the state what a step changes by itself; see :mod:`hal_core.slots.update`."""

    def check_stream(self, stream: Stream) -> None:
        """Raise InvalidValue for a stream on which nothing may be put now: its work goes into a graph."""

    def capture_update(self, state: SlotState, stream: Stream, *, speculative: bool) -> None:
        """Put what :meth:`update_inputs` does into the graph that ``stream`` is captured into; nothing is executed.

        Raises CapabilityMissing where there are no graphs, InvalidValue where the stream is not captured."""

    def replayed(self, event: Event) -> Ticket:
        """Count a launch of a graph with a captured update in it; its ticket, of the event recorded behind it."""

    def resolve(self, target: object) -> View:
        """A view of a tensor that the device can write. Raises InvalidValue for another device's or a freed one."""

    def tensor(self, view: View, framework: str = "") -> object:
        """A framework's tensor over a view's memory; see :meth:`hal_core.SlotState.tensor`. Raises Unavailable where
        the device has none."""

    def is_device_value(self, value: object) -> bool:
        """True for a value that is already on this device (read in stream order, not inspected: G6)."""

    def stream(self) -> Stream:
        """A new stream."""

    @property
    def default_stream(self) -> Stream:
        """The stream on which the framework computes."""

    def event(self, stream: Stream) -> Event:
        """An event after everything that is on ``stream`` now."""

    def communicator(self, group: Group) -> Communicator:
        """Open a group; all its ranks call this in one order. Raises where the device has no collectives.

        A group whose opening raised :class:`hal_core.errors.GroupLost` raises it again at every later call, at once.
        """

    def hold_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Keep ``stream`` from executing until the context ends. Raises CapabilityMissing where it cannot."""

    def counters(self) -> Counters:
        """Counts since the device was opened."""

    def close(self) -> None:
        """Give everything back; calling it again does nothing."""
