"""What a plugin implements: the class an entry point names, and the device object that it opens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from .capabilities import Capabilities

if TYPE_CHECKING:
    from .counters import Counters
    from .group import Group
    from .layout import ByteRange
    from .plan import WritePlan
    from .requests import AdmittedRequest
    from .state import SlotState
    from .steps import Step
    from .tickets import Ticket
    from .transfers import CopyTicket
    from .views import Memory, View


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer of ``Plugin.probe()``: usable here, or the reason why not and the cure (each one line)."""

    available: bool
    reason: str = ""
    cure: str = ""

    @classmethod
    def yes(cls, reason: str = "") -> Probe:
        """The device can be opened; ``reason`` may say what was found."""
        return cls(True, reason)

    @classmethod
    def no(cls, reason: str, cure: str) -> Probe:
        """The device cannot be opened here."""
        return cls(False, reason, cure)


class Plugin(ABC):
    """The class that an entry point of group ``hal.devices`` names.

    Its module imports the standard library and light parts of ``hal_core`` alone, so that listing devices stays
    cheap; frameworks and drivers are imported by :meth:`open`.

    ``name`` must equal the entry point's name. ``priority``: auto-selection goes down it, and leaves out devices of
    a priority below 0 (simulated or substituted ones).
    """

    name: ClassVar[str]
    priority: ClassVar[int]

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Say whether the device can be used here; must import neither NumPy nor any framework."""

    @classmethod
    @abstractmethod
    def open(cls, index: int, options: Mapping[str, object]) -> Device:
        """Open device ``index``. Raises :class:`hal_core.errors.Unavailable` with the cure where it cannot."""


class Event(Protocol):
    """A point in a stream's order."""

    def done(self) -> bool:
        """True once everything before the event has been executed."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block the host for at most ``timeout`` seconds; True when done."""


class Stream(Protocol):
    """A queue of device work that is executed in order. ``handle`` is the device's own number for it."""

    @property
    def handle(self) -> int: ...

    def record(self) -> Event:
        """An event after everything that is on the stream now."""

    def wait(self, event: Event) -> None:
        """Let work put on the stream from now on wait for ``event``; the host does not wait."""

    def synchronize(self, timeout: float | None = None) -> None:
        """Block the host until the stream is empty; :class:`hal_core.errors.TicketTimeout` after ``timeout`` s."""


class Communicator(Protocol):
    """One group's collectives on a device."""

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Make ``part`` of ``memory`` equal to that of the group's first rank, in one collective."""

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Give every rank of the group this rank's block, of one size on all, and return all by global rank."""

    def close(self) -> None:
        """Give back what this device holds for the group; the process's own connections stay."""


class Device(Protocol):
    """An opened device. Its hooks and primitives are called from one thread; tickets are waited for from any.

    The four hooks are methods marked with :data:`hal_core.hookimpl`; :class:`hal_core.base.DeviceBase` writes them in
    terms of the primitives below.
    """

    name: str
    index: int
    capabilities: Capabilities

    def allocate(self, nbytes: int) -> Memory:
        """A block of device memory, at least 64-byte aligned; the contents are undefined."""

    def adopt(self, state: SlotState) -> None:
        """Make ready what the device needs for a state (maps, parameters), once, so that no hook has to wait for it."""

    def stage(self, state: SlotState, request: AdmittedRequest) -> None:
        """A request was just admitted for a state: the device may take its bytes ahead of the insertion, or do nothing.

        From any thread. What it took is known again by the number that it gives to ``request.stage``.
        """

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Write a plan in stream order. The plan's arrays may be changed by the caller once this returns (G2)."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy byte ranges to the host as they are after the work that is on ``stream`` now.

        Work put on the stream later does not change what is copied, and is not held up on the host.
        """

    def advance(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Do to the state what a step changes by itself; see :mod:`hal_core.advance`."""

    def resolve(self, target: object) -> View:
        """A view of a tensor that the device can write. Raises InvalidValue for another device's or a freed one."""

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
        """Open a group; all its ranks call this in one order. Raises where the device has no collectives."""

    def hold(self, stream: Stream) -> AbstractContextManager[None]:
        """Keep ``stream`` from executing until the context ends. Raises CapabilityMissing where it cannot."""

    def counters(self) -> Counters:
        """Counts since the device was opened."""

    def close(self) -> None:
        """Give everything back; calling it again does nothing."""
