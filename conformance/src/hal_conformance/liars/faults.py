"""Injected faults for any device: an honest device on which one operation fails at a chosen time.

A fault is a mixin over the class of an opened device, as liars are, but it does not lie. A failure raises an error with
fact and cure, and has no effect::

    device = lay(opened, OutOfRoom)
    device.fault.at = 3                  # the third allocation from now raises

``hal conform NAME --fault DelayedCopies`` runs the whole kit with a fault; the other faults are inactive until armed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hal_core.contract.markers import hookimpl
from hal_core.errors import GroupLost, HalError, InvalidValue, OutOfMemory
from hal_core.memory.copies import Bytes, CopyTicket
from hal_core.tickets import Mode, Ticket

from . import Lie, lay_over
from .rows import Call, How, first, lay_ways

if TYPE_CHECKING:
    from hal_core.contract.capabilities import Capabilities
    from hal_core.contract.device import Device
    from hal_core.group import Group
    from hal_core.memory.views import ByteRange, Memory
    from hal_core.ranks.communicator import Communicator
    from hal_core.slots.state import SlotState
    from hal_core.streams import Stream


class CopyFailed(HalError, RuntimeError):
    """A copy that the driver refused; no work was queued."""


@dataclass
class Fuse:
    """The time of a failure: the ``at``-th chance from now; 0: never. ``met`` counts the failures."""

    at: int = 0
    met: int = 0
    ripe: threading.Event = field(default_factory=threading.Event)
    """Set when work that fails late has ended; clear while it is in flight."""

    def __post_init__(self) -> None:
        self.ripe.set()

    def burns(self) -> bool:
        """Count one chance; return true if it is the chosen one."""
        if self.at == 0:
            return False
        self.at -= 1
        self.met += self.at == 0
        return self.at == 0


class Fault(Lie):
    """Base of faults. ``fault`` determines when the one laid last strikes; each has a fuse of its own."""

    fault: Fuse

    def fuse(self, kind: type[Fault]) -> Fuse:
        """Return the fuse of the fault of this kind that was laid last."""
        fuses: dict[type[Fault], Fuse] = self.__dict__["fuses"]
        return next(fuses[laid] for laid in reversed(fuses) if issubclass(laid, kind))


def refused(what: str) -> CopyFailed:
    """Return the error of a driver that did no work."""
    return CopyFailed(f"the driver refused {what}", cure="try again", argument="stream")


class LateWrites(Fault):
    """A queued write or step whose ticket fails when it has ended, as if the driver found the error later.

    ``error(what)`` makes the error; ``fault.ripe`` is set when the work has ended.
    """

    error: Any = staticmethod(refused)


def _late(what: str) -> How:
    def fail_later(call: Call) -> object:
        fuse = call.me.fuse(LateWrites)
        met, ticket = fuse.met, call()
        if fuse.met > met or not fuse.burns():  # not twice, if a hook calls a primitive
            return ticket
        return LateTicket(ticket, fuse, type(call.me).error(f"{what}, number {fuse.met}"))

    return fail_later


lay_ways(
    LateWrites,
    {
        "submit": _late("a copy to the device"),
        "async_set_value": _late("a value"),
        "insert_tasks": _late("a batch"),
        "update_inputs": _late("a step"),
    },
)


class LateTicket(Ticket):
    """The ticket of work that fails once it is ``ripe``."""

    __slots__ = ("_error", "_fuse", "_inner")
    mode: Mode = "async"

    def __init__(self, inner: Ticket, fuse: Fuse, error: BaseException) -> None:
        super().__init__()
        self._inner, self._fuse, self._error = inner, fuse, error

    def done(self) -> bool:
        return self._fuse.ripe.is_set() and self._inner.done()

    def _block(self, timeout: float | None) -> bool:
        return self._fuse.ripe.wait(timeout) and self._inner._block(timeout)

    def failure(self) -> BaseException | None:
        return self._error if self.done() else None


class FailingWrites(Fault):
    """A write, by either hook or by a plan, that the driver refuses."""


def _strike(call: Call) -> None:
    if call.me.fuse(FailingWrites).burns():
        raise refused("a copy to the device")


lay_ways(FailingWrites, dict.fromkeys(("submit", "async_set_value", "insert_tasks"), first(_strike)))


class FailingCopies(Fault):
    """A copy to the host that is refused at the call, or whose ticket fails when it should be done (``late``)."""

    late = False

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Fail now, or later."""
        if not self.fuse(FailingCopies).burns():
            return super().copy_out(memory, parts, stream)  # type: ignore[misc,no-any-return]
        error = CopyFailed("the driver refused a copy to the host", cure="save the next step", argument="stream")
        if not self.late:
            raise error
        return LateCopy(super().copy_out(memory, parts, stream), error)  # type: ignore[misc]


class OutOfRoom(Fault):
    """An allocation that finds no memory. ``given``: weak references to earlier allocations."""

    raw = False
    """Raise Python's own MemoryError, as a library without hal's errors does."""

    def allocate(self, nbytes: int) -> Memory:
        """Refuse."""
        if self.fuse(OutOfRoom).burns():
            if self.raw:
                raise MemoryError(f"no room for {nbytes} bytes")
            raise OutOfMemory(
                f"no room for {nbytes} bytes", cure="give a state fewer slots, or close another", argument="nbytes"
            )
        memory: Memory = super().allocate(nbytes)  # type: ignore[misc]
        self.__dict__.setdefault("given", []).append(weakref.ref(memory))
        return memory


class LostPeer(Fault):
    """The other ranks of a group agree and take part until one is lost; from then on the group is unusable.

    It needs no other process: groups that contain only this rank's device are simulated.
    """

    def open_communicator(self, group: Group) -> Communicator:
        """Return a group whose other ranks are simulated."""
        return Pretended(self.fuse(LostPeer), group)

    @hookimpl
    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Run one collective of the simulated group."""
        ticket: Ticket = device.communicator(group).broadcast(state.memory, state.broadcast_range(), stream)
        return ticket


class Pretended:
    """A group whose ranks hold the same as this one, which is the first."""

    def __init__(self, fault: Fuse, group: Group) -> None:
        self._fault, self.group = fault, group

    def _strike(self) -> None:
        if self._fault.met or self._fault.burns():
            raise GroupLost("the process of rank 1 has ended", cure="start all ranks again", argument="group")

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Move no data: this rank is the source."""
        from hal_core.tickets import DONE

        self._strike()
        return DONE

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Return the same block for all ranks."""
        self._strike()
        return dict.fromkeys(self.group.ranks, block)

    def close(self) -> None:
        """Return at once."""


LOOKS = 8
"""How often a late copy answers that it is not done, before it answers for its work."""


class DelayedCopies(Fault):
    """Copies to the host are late: not there until somebody waits for them, or has asked :data:`LOOKS` times.

    A ticket that is never done without a wait would break G3.
    """

    @property
    def capabilities(self) -> Capabilities:
        """The device's capabilities; with such copies it is asynchronous."""
        own: Capabilities = self.__dict__.get("capabilities") or super().capabilities  # type: ignore[misc]
        return replace(own, async_d2h=True)

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy in order, but report it late."""
        return LateCopy(super().copy_out(memory, parts, stream))  # type: ignore[misc]


class LateCopy(CopyTicket):
    """A copy that is done once it is waited for, or was asked several times; it may have failed then."""

    __slots__ = ("_error", "_inner", "_looks", "_waited", "mode")

    def __init__(self, inner: CopyTicket, error: HalError | None = None) -> None:
        super().__init__()
        self._inner, self._error, self._waited, self._looks = inner, error, False, 0
        self.mode: Mode = "async"  # it is not done when the call returns, whatever the device below claims

    @property
    def data(self) -> Sequence[Bytes]:
        if not self._waited:
            raise AssertionError("the data of a copy was read before the copy was there")
        return self._inner.data

    def done(self) -> bool:
        if not self._waited:
            self._looks += 1
            self._waited = self._looks > LOOKS and self._inner.done()
        return self._waited

    def _block(self, timeout: float | None) -> bool:
        self._waited = self._waited or self._inner._block(timeout)
        return self._waited

    def failure(self) -> BaseException | None:
        return (self._error or self._inner.failure()) if self._waited else None


FAULTS = (FailingWrites, LateWrites, FailingCopies, OutOfRoom, LostPeer, DelayedCopies)


def named(name: str) -> type[Fault]:
    """Return the fault with that name."""
    for fault in FAULTS:
        if fault.__name__ == name:
            return fault
    known = ", ".join(fault.__name__ for fault in FAULTS)
    raise InvalidValue(f"no fault {name!r}", cure=f"one of {known}", argument="fault")


def lay(device: Device, fault: type[Fault]) -> Any:  # noqa: ANN401 (a Device that is also a Fault)
    """Lay a fault over an opened device, once; below a liar, so that the failure passes through the liar."""
    laid: Any = device
    if not isinstance(device, fault):
        kind, lies = type(device), []
        while len(kind.__bases__) == 2 and issubclass(kind.__bases__[0], Lie):  # as lay_over() makes them
            lies.append(kind.__bases__[0])
            kind = kind.__bases__[1]
        device.__class__ = kind
        for mixin in (fault, *reversed(lies)):
            laid = lay_over(device, mixin)
    fuses = laid.__dict__.setdefault("fuses", {})
    fuses.pop(fault, None)  # the newest stands last
    fuses[fault] = laid.fault = Fuse()
    return laid
