"""Liars with limits of their own: of stop sequences, end tokens, drafts, slots, ranges of a copy, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from hal_core.contract.markers import hookimpl
from hal_core.errors import OutOfMemory
from hal_core.memory.plan import Records, WritePlan
from hal_core.memory.views import ByteRange, View

from . import Lie, Patch, liar
from .proxies import put
from .steps import FirstAppended, ShortStops

if TYPE_CHECKING:
    from hal_core.contract.device import Device
    from hal_core.group import Group
    from hal_core.memory.copies import CopyTicket
    from hal_core.memory.values import Value
    from hal_core.memory.views import Memory
    from hal_core.slots.state import SlotState
    from hal_core.slots.step import Step
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket


class FirstStops(Patch):
    """Base: a step compares the first ``most`` stop sequences of a slot."""

    seam = "stop sequences of a step"
    most: ClassVar[int]

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Hide the rest."""

        def ends(fields: Any, slot: int, total: int, generated: int, sizes: Any) -> Any:  # noqa: ANN401 (the core's)
            count = np.minimum(fields["stop_seqs_num"], cls.most)
            return true({**fields, "stop_seqs_num": count}, slot, total, generated, sizes)

        return ends


@liar(9, "a step compares the first 8 stop sequences")
class EightStopSequences(FirstStops):
    """An array in registers."""

    most = 8


@liar(9, "a step compares the first 64 stop sequences")
class WavefrontOfStops(FirstStops):
    """A lane each."""

    most = 64


@liar(9, "a step compares the first 32 end tokens")
class WarpOfEndTokens(Lie):
    """A lane each."""

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Hide the rest meanwhile."""
        device: Any = self
        place = state.layout.fields["eos_num"]
        part = ByteRange(place.offset, place.stride * state.sizes.num_slots)
        copied = device.copy_out(state.memory, [part], stream)
        copied.wait()
        counts = np.array(copied.data[0]).view(np.int32)
        put(self, state.memory, [(part.offset, np.minimum(counts, 32).tobytes())], stream)
        super().update_inputs(state, step, stream)  # type: ignore[misc]
        return put(self, state.memory, [(part.offset, counts.tobytes())], stream)


@liar(9, "stop sequences of more than 32 tokens are never met")
class WarpOfStopTokens(ShortStops):
    """A lane compares a token."""

    most = 32


@liar(9, "of more than 32 accepted tokens the first 32 are appended")
class WarpAppended(FirstAppended):
    """A lane appends a token."""

    most = 32


class SomeDrafts(Patch):
    """Base: a call writes a part of the drafts."""

    seam = "plan of drafts"

    @staticmethod
    def some(drafts: dict[int, list[int]]) -> dict[int, list[int]]:
        """Return the drafts that are written."""
        raise NotImplementedError

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Leave the rest out."""
        return lambda state, drafts: true(state, cls.some(drafts))


@liar(12, "drafts are written for the first 1,024 slots of a call")
class BlockOfDraftedSlots(SomeDrafts):
    """One block of threads, a slot each."""

    @staticmethod
    def some(drafts: dict[int, list[int]]) -> dict[int, list[int]]:
        """Of so many slots."""
        return dict([*drafts.items()][:1024])


@liar(12, "of the drafts of a slot the first 8 are written")
class VectorOfDrafts(SomeDrafts):
    """One vector."""

    @staticmethod
    def some(drafts: dict[int, list[int]]) -> dict[int, list[int]]:
        """So many of each slot."""
        return {slot: given[:8] for slot, given in drafts.items()}


class FirstRanges(Lie):
    """Base: of the ranges of a copy out the first ``most`` have their own places."""

    most = 0

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Read the rest where the memory begins."""
        own = [part if at < self.most else ByteRange(0, part.nbytes) for at, part in enumerate(parts)]
        return super().copy_out(memory, own, stream)  # type: ignore[misc,no-any-return]


@liar(1, "a copy out refuses a range of no bytes")
class EmptyRangesRefused(Lie):
    """``CL_INVALID_VALUE``, for a size of 0."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Raise the runtime's error."""
        if any(part.nbytes == 0 for part in parts):
            raise ValueError("error -30 of a copy of 0 bytes")
        return super().copy_out(memory, parts, stream)  # type: ignore[misc,no-any-return]


@liar(1, "a copy out has no array for a range of no bytes")
class EmptyRangesLeftOut(Lie):
    """A loop that passes over empty ranges."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Leave them out."""
        return super().copy_out(memory, [part for part in parts if part.nbytes], stream)  # type: ignore[misc,no-any-return]


@liar(1, "a copy out has at most 1,024 ranges")
class ThousandRanges(FirstRanges):
    """A table of the places, of fixed length."""

    most = 1024


@liar(1, "a copy out has at most 4,096 ranges")
class ThousandsOfRanges(FirstRanges):
    """A larger one."""

    most = 4096


# -- memory that is not there ------------------------------------------------------------------------------------------


@liar(26, "a write that finds no device memory raises the runtime's own error", requires="staging")
class AllocatorsOwnError(Lie):
    """A code of the driver's, without hook and cure."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Lose the contract's error."""
        try:
            return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]
        except OutOfMemory as error:
            if error.argument == "ring":
                raise
            raise RuntimeError(f"error -4: {error.what}") from None


@liar(26, "a write that finds no device memory has written what fits", requires="staging")
class WhatFitsIsWritten(Lie):
    """Piece by piece, until one is refused."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write the first elements after all."""
        write = super().async_set_value  # type: ignore[misc]
        try:
            return write(device, target, value, stream)  # type: ignore[no-any-return]
        except OutOfMemory as error:
            if isinstance(value, np.ndarray) and error.argument != "ring":
                write(device, target[:4], np.ascontiguousarray(value[:4]), stream)
            raise


# -- large ones --------------------------------------------------------------------------------------------------------


@liar(6, "a scalar fills the first 65,535 elements of its target")
class FillsEndAt65535(Lie):
    """The limit of a grid."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Leave the rest as it was."""
        write = super().async_set_value  # type: ignore[misc]
        if isinstance(value, View | np.ndarray) or target.size <= GRID:
            return write(device, target, value, stream)  # type: ignore[no-any-return]
        count, rest = target.shape[0], GRID
        if len(target.shape) > 1:
            rest = max(1, GRID // (target.size // count))
        return write(device, target[:rest], value, stream)  # type: ignore[no-any-return]


GRID = 65_535


@liar(6, "a large fill with a 64-bit integer is a memset if the bytes of its low word are equal")
class MemsetByTheLowWord(Lie):
    """A test of 32 bits of the pattern."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Fill with the first byte."""
        if isinstance(value, np.int64) and target.size >= 512:
            first, *others = value.tobytes()[:4]
            if all(other == first for other in others):
                value = np.frombuffer(bytes([first]) * 8, np.int64)[0]
        return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]


@liar(8, "a batch for more than 32 slots is two writes, of which the second may be refused")
class HalfOfALargeBatch(Lie):
    """A table of fixed length."""

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Write the first records alone, and then the rest."""
        records, write = plan.records, super().submit  # type: ignore[misc]
        if records is None or len(records.slots) <= 32:
            return write(plan, stream)  # type: ignore[no-any-return]
        first = Records(records.slots[:32], records.data[:32], records.scatter_map)
        rest = Records(records.slots[32:], records.data[32:], records.scatter_map)
        write(WritePlan(plan.memory, plan.writes[:0], [b""], first), stream)
        return write(WritePlan(plan.memory, plan.writes, plan.pieces, rest), stream)  # type: ignore[no-any-return]


@liar(14, "a slice of more than 4,096 bytes is two collectives", requires="several_ranks")
class TwoCollectives(Lie):
    """A buffer of fixed length."""

    @hookimpl
    def broadcast_tokens(self, device: Device, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Send the first bytes, and then the rest."""
        part = state.broadcast_range()
        if part.nbytes <= 4096:
            return super().broadcast_tokens(device, state, group, stream)  # type: ignore[misc,no-any-return]
        communicator = device.communicator(group)
        communicator.broadcast(state.memory, ByteRange(part.offset, 4096), stream)
        return communicator.broadcast(state.memory, ByteRange(part.offset + 4096, part.nbytes - 4096), stream)
