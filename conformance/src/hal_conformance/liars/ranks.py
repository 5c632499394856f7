"""Liars among several ranks: the broadcast data, its source, the sender, and waiting ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.contract.markers import hookimpl
from hal_core.errors import GroupLost
from hal_core.group import ALONE, Group
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange
from hal_core.runtime.policy import Policy
from hal_core.tickets import Ticket

from . import Lie, Patch, liar
from .core_seams import put
from .devices import _raw

if TYPE_CHECKING:
    from hal_core.contract.device import Device, Hooks
    from hal_core.output.sinks import Sink
    from hal_core.slots.state import SlotState
    from hal_core.slots.step import Step
    from hal_core.streams import Stream

RANKS = "several_ranks"


@liar(13, "tokens are broadcast, their counts are not", requires=RANKS, seen="vLLM 44697")
class TokensWithoutCounts(Lie):
    """A collective that ignores that another rank may have accepted another number."""

    @hookimpl
    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Send the header and the tokens."""
        name = "accept_tokens" if state.speculative else "sampled_token_ids"
        place, begin = state.layout.fields[name], state.broadcast_range().offset
        part = ByteRange(begin, place.offset + place.stride * state.sizes.num_slots - begin)
        return self.communicator(group).broadcast(state.memory, part, stream)  # type: ignore[attr-defined,no-any-return]


@liar(
    13, "a state with drafts sends the fields of verifying steps, and none of a plain step", requires=RANKS, seen="hal"
)
class SliceOfTheState(Lie):
    """The state's kind instead of the step's: each rank keeps the token that it sampled itself."""

    @hookimpl
    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Restore the receiver's own sampled tokens."""
        place = state.layout.fields["sampled_token_ids"]
        part = ByteRange(place.offset, place.stride * state.sizes.num_slots)
        kept = device.copy_out(state.memory, [part], stream)
        kept.wait(60.0)
        ticket: Ticket = super().broadcast_tokens(device, state, group, stream)  # type: ignore[misc]
        if state.speculative and not group.is_first:
            ticket.wait(60.0)
            _raw(self, state.memory, part.offset, bytes(kept.data[0]), stream)
        return ticket


@liar(13, "everybody follows the last rank of the group", requires=RANKS)
class FollowsTheLast(Lie):
    """The wrong end of the list."""

    @hookimpl
    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Send from the other end."""
        other = Group(group.ranks[::-1], group.rank)
        part = state.broadcast_range()
        return self.communicator(other).broadcast(state.memory, part, stream)  # type: ignore[attr-defined,no-any-return]


@liar(13, "one rank packs the fields in another order", requires=RANKS, seen="vLLM: dictionaries in a broadcast")
class AnotherOrder(Lie):
    """A right digest, as it is made from the table, with a wrong packing."""

    @hookimpl
    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Receive, then swap the first and the last field; both begin with a count or a token."""
        ticket: Ticket = super().broadcast_tokens(device, state, group, stream)  # type: ignore[misc]
        if not group.is_first:
            part = state.broadcast_range()
            inside = [p for p in state.layout.fields.values() if part.offset <= p.offset < part.end]
            ticket.wait(60.0)
            copied = self.copy_out(state.memory, [ByteRange(p.offset, 1) for p in inside], stream)  # type: ignore[attr-defined]
            copied.wait(60.0)
            data = [bytes(part) for part in copied.data]
            mixed = data[::-1] if data != data[::-1] else [bytes(255 - byte for byte in part) for part in data]
            for place, byte in zip(inside, mixed, strict=True):
                _raw(self, state.memory, place.offset, byte, stream)
        return ticket


@liar(14, "ranks do not compare their configurations", requires=RANKS)
class NobodyCompares(Patch):
    """An exchange without comparison."""

    seam = "comparison of terms"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Find no difference."""
        return lambda blocks: []


@liar(14, "the header of a slice is not looked at", requires=RANKS, seen="vLLM 29623")
class NobodyReads(Patch):
    """A header that neither the broadcast's ticket nor the output checks."""

    seam = "check of a broadcast"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Return the ticket unchanged."""
        return lambda channel, ticket, stream: ticket

    @classmethod
    def apply(cls) -> Callable[[], None]:
        """Disable the output's check too."""
        see_broadcasts, see_outputs = super().apply(), put("check of an output's broadcast", lambda _: lambda *_: None)

        def restore() -> None:
            see_outputs()
            see_broadcasts()

        return restore


@liar(14, "a field at a time", requires=RANKS, seen="FastDeploy: four broadcasts a step")
class OneCollectiveAField(Lie):
    """A header, then each field separately."""

    @hookimpl
    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Send piece by piece."""
        part = state.broadcast_range()
        inside = [p.offset for p in state.layout.fields.values() if part.offset <= p.offset < part.end]
        ends = [*sorted(inside)[1:], part.end]
        for begin, end in zip([part.offset, *sorted(inside)[1:]], ends, strict=True):
            piece = ByteRange(begin, end - begin)
            ticket: Ticket = self.communicator(group).broadcast(state.memory, piece, stream)  # type: ignore[attr-defined]
        return ticket


@liar(15, "a group of one that is not rank 0 resets fields that it must not change", requires=RANKS)
class ReceivesFromNobody(Policy):
    """Every rank but 0 as a receiver."""

    def broadcast_tokens(self, device: Device, hooks: Hooks, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Prepare for tokens that never come."""
        if group.ranks == (1,):
            view = state.layout.fields["step_idx"]
            _raw(device, state.memory, view.offset, np.int64(0).tobytes(), stream)
        return super().broadcast_tokens(device, hooks, state, group, stream)


@liar(16, "a hung peer is waited for for ever", requires=RANKS, seen="gloo, NCCL: the default")
class WaitsForEver(Lie):
    """A noticed loss without an error."""

    @hookimpl
    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Wait although the honest device gives up."""
        try:
            ticket: Ticket = super().broadcast_tokens(device, state, group, stream)  # type: ignore[misc]
            ticket.wait()
        except GroupLost:
            threading.Event().wait()
        return ticket


@liar(17, "rank 1 sends too, once it has the tokens", requires=RANKS, seen="FastDeploy 7172")
class SendsWhatItReceived(Policy):
    """Tokens sent by every rank, as all have them after a broadcast."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """HookCall as a group of one although a real group exists."""
        if state.channels:
            step = replace(step, group=ALONE)
        return super().save_output(device, hooks, state, step, sink, stream)


class TypesLeftOut(Patch):
    """Base of liars whose ranks compare fields by their bytes, and not by their element types."""

    seam = "terms of a group"

    @classmethod
    def alike(cls, state: SlotState, offset: int) -> bool:
        """Return whether the type of the field at ``offset`` is left out."""
        raise NotImplementedError

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Give the terms of a state in which those fields are unsigned."""

        def terms(state: SlotState, group: Group) -> Any:  # noqa: ANN401 (the core's)
            places = {
                name: replace(
                    place, field=replace(place.field, dtype=dtype_of(f"uint{8 * place.field.dtype.itemsize}"))
                )
                if cls.alike(state, place.offset)
                else place
                for name, place in state.layout.fields.items()
            }
            layout = replace(state.layout, fields=MappingProxyType(places))
            told = SimpleNamespace(
                layout=layout, broadcast_range=state.broadcast_range, name=state.name, sizes=state.sizes
            )
            return true(told, group)

        return terms


@liar(14, "ranks compare sizes and places, and no element types", requires=RANKS)
class SizesAreCompared(TypesLeftOut):
    """A digest of offsets and bytes."""

    @classmethod
    def alike(cls, state: SlotState, offset: int) -> bool:
        """All types."""
        return True


@liar(14, "ranks compare the element types of the fields that they broadcast alone", requires=RANKS)
class OtherTypesLeftOut(TypesLeftOut):
    """The parameters of sampling differ."""

    @classmethod
    def alike(cls, state: SlotState, offset: int) -> bool:
        """Those outside the slice."""
        part = state.broadcast_range()
        return not part.offset <= offset < part.end
