"""Liars about the whole of a broadcast: the bytes that arrive, their source, the checks, and absent ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from hal_core.contract.markers import hookimpl
from hal_core.errors import GroupLost
from hal_core.group import Group
from hal_core.memory.views import ByteRange
from hal_core.tickets import DONE, Ticket

from . import Lie, liar
from .proxies import put
from .ranks import RANKS

if TYPE_CHECKING:
    from hal_core.contract.device import Device
    from hal_core.ranks.communicator import Communicator
    from hal_core.slots.layout import Placed
    from hal_core.slots.state import SlotState
    from hal_core.streams import Stream

PATIENCE = 60.0
T = TypeVar("T")


def inside(state: SlotState) -> list[Placed]:
    """Return the fields of the broadcast slice."""
    part = state.broadcast_range()
    return [place for place in state.layout.fields.values() if part.offset <= place.offset < part.end]


class LeavesOut(Lie):
    """Base of liars whose collective does not carry everything: receivers keep their own bytes."""

    def left_out(self, state: SlotState) -> Sequence[ByteRange]:
        """Return the bytes that are not sent."""
        return ()

    @hookimpl
    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Restore the bytes that would not have arrived."""
        parts = [] if group.is_first else [part for part in self.left_out(state) if part.nbytes]
        kept = device.copy_out(state.memory, parts, stream)
        kept.wait(PATIENCE)
        ticket: Ticket = super().broadcast_tokens(device, state, group, stream)  # type: ignore[misc]
        if parts:
            runs = [(part.offset, bytes(data)) for part, data in zip(parts, kept.data, strict=True)]
            put(self, state.memory, runs, stream)
        return ticket


@liar(13, "as many rows are broadcast as slots are held: later idle slots keep their values", requires=RANKS)
class IdleSlotsLeftOut(LeavesOut):
    """Idle slots without tokens, left out. If no slot is held, everything is sent."""

    def left_out(self, state: SlotState) -> Sequence[ByteRange]:
        """Return the rows after the last held slot."""
        held = np.flatnonzero(state.host_table.admission_ids)
        end = int(held[-1]) + 1 if len(held) else state.sizes.num_slots
        rows = state.sizes.num_slots - end
        return [ByteRange(place.offset + end * place.stride, rows * place.stride) for place in inside(state)]


@liar(13, "the collective moves 16 bytes at a time, and not the rest of the slice", requires=RANKS)
class RestOfTheSliceLeftOut(LeavesOut):
    """The last field of the slice ends where it must."""

    def left_out(self, state: SlotState) -> Sequence[ByteRange]:
        """Return the bytes after the last full 16."""
        part = state.broadcast_range()
        return [ByteRange(part.end - part.nbytes % 16, part.nbytes % 16)]


@liar(13, "flags are not broadcast: the collective does not support bool", requires=RANKS)
class FlagsLeftOut(LeavesOut):
    """Different stopped requests on the ranks."""

    def left_out(self, state: SlotState) -> Sequence[ByteRange]:
        """The fields of dtype bool."""
        found = [place for place in inside(state) if place.field.dtype.name == "bool"]
        return [ByteRange(place.offset, place.stride * state.sizes.num_slots) for place in found]


@liar(13, "the collective supports only int32, so 64-bit fields are sent as their lower halves", requires=RANKS)
class LongsAsInts(Lie):
    """Tokens that fit, and larger values that do not."""

    @hookimpl
    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Receive, and extend the sign of the lower halves."""
        ticket: Ticket = super().broadcast_tokens(device, state, group, stream)  # type: ignore[misc]
        if not group.is_first:
            longs = [place for place in inside(state) if place.field.dtype.name == "int64"]
            parts = [ByteRange(place.offset, place.stride * state.sizes.num_slots) for place in longs]
            copied = device.copy_out(state.memory, parts, stream)
            copied.wait(PATIENCE)
            told = [np.array(data).view(np.int64).astype(np.int32).astype(np.int64).tobytes() for data in copied.data]
            put(self, state.memory, [(part.offset, data) for part, data in zip(parts, told, strict=True)], stream)
        return ticket


@liar(13, "the lowest rank is the source, whoever the group's first is", requires=RANKS)
class LowestRankIsTheSource(Lie):
    """Groups that are sorted like sets."""

    @hookimpl
    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Send from the lowest rank."""
        low = Group(tuple(sorted(group.ranks)), group.rank)
        return device.communicator(low).broadcast(state.memory, state.broadcast_range(), stream)


class WritesTheHeader(Lie):
    """Base of liars whose receivers write a part of the header themselves: it is compared with itself."""

    begin, end = 0, 64

    @hookimpl
    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Overwrite the received part with the expected one."""
        ticket: Ticket = super().broadcast_tokens(device, state, group, stream)  # type: ignore[misc]
        if not group.is_first:
            expected = state.channels[group.ranks].expected[self.begin : self.end]
            put(self, state.memory, [(state.broadcast_range().offset + self.begin, expected)], stream)
        return ticket


@liar(14, "the digest of a header is the receiver's own", requires=RANKS)
class DigestOfTheReceiver(WritesTheHeader):
    """A digest that is not sent, as it does not change from step to step."""

    begin = 32


@liar(14, "the step of a header is the receiver's own", requires=RANKS)
class StepOfTheReceiver(WritesTheHeader):
    """A count per rank."""

    begin, end = 16, 32


class Opening(Lie):
    """Base of liars about the opening of a group: the meeting of ranks, and the exchange of their terms."""

    def lossy(self, group: Group, opening: Callable[[], T]) -> T:
        """One part of an opening."""
        return opening()

    def communicator(self, group: Group) -> Communicator:
        """Open the group; the exchange of terms lies in the same way."""
        true: Communicator = self.lossy(group, lambda: super(Opening, self).communicator(group))  # type: ignore[misc]
        return cast("Communicator", _Meeting(true, lambda exchange: self.lossy(group, exchange)))


class _Meeting:
    """A communicator whose exchange belongs to a lying opening."""

    def __init__(self, true: Communicator, lossy: Callable[[Callable[[], Any]], Any]) -> None:
        self._true, self._lossy = true, lossy

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Exchange as the liar does."""
        told: Mapping[int, bytes] = self._lossy(lambda: self._true.exchange(block))
        return told

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (whatever a communicator has)
        return getattr(self._true, name)


@liar(16, "the opening of a group waits for a peer that never comes", requires=RANKS)
class OpeningWaitsForEver(Opening):
    """A timeout of collectives that does not cover the opening."""

    def lossy(self, group: Group, opening: Callable[[], T]) -> T:
        """Wait although the honest device gives up."""
        try:
            return opening()
        except GroupLost:
            threading.Event().wait()
            raise


@liar(16, "a group whose opening was lost is opened again at each call, which waits again", requires=RANKS)
class OpeningTriedAgain(Opening):
    """An opening that remembers only its successes."""

    def lossy(self, group: Group, opening: Callable[[], T]) -> T:
        """Wait as long as the forgotten loss took."""
        took: dict[tuple[int, ...], float] = self.__dict__.setdefault("took", {})
        threading.Event().wait(took.get(group.ranks, 0.0))
        began = monotonic()
        try:
            return opening()
        except GroupLost:
            took.setdefault(group.ranks, monotonic() - began)
            raise


@liar(16, "the loss of a peer is raised once; after that the source continues alone", requires=RANKS)
class LossIsToldOnce(Lie):
    """A discarded communicator, and a group without one that communicates nothing."""

    @hookimpl
    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Do nothing from the second time on."""
        told: set[tuple[int, ...]] = self.__dict__.setdefault("told", set())
        if group.ranks in told:
            return DONE
        try:
            ticket: Ticket = super().broadcast_tokens(device, state, group, stream)  # type: ignore[misc]
            ticket.wait(PATIENCE)
        except GroupLost:
            told.add(group.ranks)
            raise
        return ticket
