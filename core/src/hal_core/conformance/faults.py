"""Faults that any device can be run under: the device as it is, but for one thing that goes wrong at a chosen time.

A fault is a mixin that is laid over the class of an opened device, as liars are; but it lies about nothing. What goes
wrong is told by an error that says what and the cure, and nothing has been done then::

    device = lay(opened, OutOfRoom)
    device.fault.at = 3                  # the third allocation from now raises

``hal conform NAME --fault DelayedCopies`` runs the whole kit so; the other faults do nothing until they are armed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import GroupLost, HalError, InvalidValue, OutOfMemory
from ..markers import hookimpl
from ..tickets import Mode, Ticket
from ..transfers import Bytes, CopyTicket
from .liars import Lie, lay_over

if TYPE_CHECKING:
    from ..device import Communicator, Device, Stream
    from ..group import Group
    from ..layout import ByteRange
    from ..plan import WritePlan
    from ..state import SlotState
    from ..tasks import TaskBatch
    from ..values import Value
    from ..views import Memory, View


class CopyFailed(HalError, RuntimeError):
    """A copy that the driver refused; nothing was queued."""


@dataclass
class Fuse:
    """When something goes wrong: at the ``at``-th chance from now; 0: never. ``met`` counts how often it has."""

    at: int = 0
    met: int = 0

    def burns(self) -> bool:
        """Count one chance; true when this is the one."""
        if self.at == 0:
            return False
        self.at -= 1
        self.met += self.at == 0
        return self.at == 0


class Fault(Lie):
    """Base of faults. ``fault`` says when it strikes."""

    fault: Fuse


class FailingWrites(Fault):
    """A write, by either hook or by a plan, is refused by the driver."""

    def _strike(self) -> None:
        if self.fault.burns():
            raise CopyFailed("the driver refused a copy to the device", cure="try again", argument="stream")

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Fail before anything is queued."""
        self._strike()
        return super().submit(plan, stream)  # type: ignore[misc,no-any-return]

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Fail before anything is queued."""
        self._strike()
        return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Fail before anything is queued."""
        self._strike()
        return super().insert_tasks(device, state, tasks, stream)  # type: ignore[misc,no-any-return]


class FailingCopies(Fault):
    """A copy to the host is refused at the call, or its ticket fails when it should be there (``late``)."""

    late = False

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Fail now, or later."""
        if not self.fault.burns():
            return super().copy_out(memory, parts, stream)  # type: ignore[misc,no-any-return]
        error = CopyFailed("the driver refused a copy to the host", cure="save the next step", argument="stream")
        if not self.late:
            raise error
        return LateCopy(super().copy_out(memory, parts, stream), error)  # type: ignore[misc]


class OutOfRoom(Fault):
    """An allocation finds no memory."""

    def allocate(self, nbytes: int) -> Memory:
        """Refuse."""
        if self.fault.burns():
            raise OutOfMemory(
                f"no room for {nbytes} bytes", cure="give a state fewer slots, or close another", argument="nbytes"
            )
        return super().allocate(nbytes)  # type: ignore[misc,no-any-return]


class LostPeer(Fault):
    """The other ranks of a group agree and take part, until one is lost; from then on the group is dead.

    It needs no other process: groups that hold only this rank's device are pretended.
    """

    def communicator(self, group: Group) -> Communicator:
        """A group whose other ranks are nowhere."""
        return Pretended(self.fault, group)

    @hookimpl
    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """One collective of the pretended group."""
        ticket: Ticket = self.communicator(group).broadcast(state.memory, state.broadcast_range(), stream)
        return ticket


class Pretended:
    """A group whose ranks hold the same as this one, which is the first."""

    def __init__(self, fault: Fuse, group: Group) -> None:
        self._fault, self.group = fault, group

    def _strike(self) -> None:
        if self._fault.met or self._fault.burns():
            raise GroupLost("the process of rank 1 has ended", cure="start all ranks anew", argument="group")

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Nothing moves: this rank is the source."""
        from ..tickets import DONE

        self._strike()
        return DONE

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Everybody says the same."""
        self._strike()
        return dict.fromkeys(self.group.ranks, block)

    def close(self) -> None:
        """Nothing is open."""


class DelayedCopies(Fault):
    """Copies to the host are as late as they may be: not there until somebody waits for them."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """The copy is made in its order, and is told of late."""
        return LateCopy(super().copy_out(memory, parts, stream))  # type: ignore[misc]


class LateCopy(CopyTicket):
    """A copy that is done only once it is waited for, and may have failed then."""

    __slots__ = ("_error", "_inner", "_waited", "mode")

    def __init__(self, inner: CopyTicket, error: HalError | None = None) -> None:
        super().__init__()
        self._inner, self._error, self._waited = inner, error, False
        self.mode: Mode = inner.mode

    @property
    def data(self) -> Sequence[Bytes]:
        if not self._waited:
            raise AssertionError("the data of a copy was read before the copy was there")
        return self._inner.data

    def done(self) -> bool:
        return self._waited

    def _block(self, timeout: float | None) -> bool:
        self._waited = self._waited or self._inner._block(timeout)
        return self._waited

    def failure(self) -> BaseException | None:
        return (self._error or self._inner.failure()) if self._waited else None


FAULTS = (FailingWrites, FailingCopies, OutOfRoom, LostPeer, DelayedCopies)


def named(name: str) -> type[Fault]:
    """The fault of that name."""
    for fault in FAULTS:
        if fault.__name__ == name:
            return fault
    known = ", ".join(fault.__name__ for fault in FAULTS)
    raise InvalidValue(f"no fault {name!r}", cure=f"one of {known}", argument="fault")


def lay(device: Device, fault: type[Fault]) -> Any:  # noqa: ANN401 (a Device that is also a Fault)
    """Lay a fault over an opened device, once."""
    laid: Any = device if isinstance(device, fault) else lay_over(device, fault)
    laid.fault = Fuse()
    return laid
