"""Liars in a device's ``submit``, ``copy_out`` and ``async_set_value``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.contract.capabilities import Capabilities
from hal_core.contract.markers import hookimpl
from hal_core.errors import InvalidValue
from hal_core.memory.plan import WritePlan
from hal_core.memory.views import ByteRange, View
from hal_core.slots.fields import SplitRole
from hal_core.tickets import Ticket

from . import Lie, Patch, liar

if TYPE_CHECKING:
    from hal_core.contract.device import Device
    from hal_core.memory.values import Value
    from hal_core.memory.views import Memory
    from hal_core.slots.state import SlotState
    from hal_core.slots.step import Step
    from hal_core.slots.tasks import TaskBatch
    from hal_core.streams import Stream


class Writes(Lie):
    """Base of liars that corrupt a write plan before it is submitted."""

    def spoil(self, writes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the descriptors to submit instead."""
        return writes

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Submit the corrupted plan."""
        spoilt = WritePlan(plan.memory, self.spoil(plan.writes.copy()), plan.pieces, plan.records)
        ticket: Ticket = super().submit(spoilt, stream)  # type: ignore[misc]  # the honest device's
        return ticket


@liar(11, "fills are left out, so the tail of a row is not reset", seen="block tables of FastDeploy")
class NoRowReset(Writes):
    """A scatter kernel without fills."""

    def spoil(self, writes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Drop the fills."""
        new_state = len(writes) >= 30  # every column of a new state is filled; without that the bug would be obvious
        return writes if new_state else writes[writes["pattern"] == 0]


@liar(5, "every write is rounded up to 8 bytes, over the neighbour")
class WordsOnly(Lie):
    """A kernel that writes whole words."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write the value, then one byte after each run."""
        ticket = super().async_set_value(device, target, value, stream)  # type: ignore[misc]
        offsets, nbytes = target.runs()
        ends = [(int(at) + nbytes, b"\0") for at in offsets if nbytes % 8 and int(at) + nbytes < target.memory.nbytes]
        for at, data in ends:
            _raw(self, target.memory, at, data, stream)
        return ticket  # type: ignore[no-any-return]


@liar(5, "strides are ignored: a strided target is written as if its elements lay side by side", seen="Paddle copy_")
class NoStrides(Lie):
    """A write into a view as if it were contiguous (Paddle 3.0 and 3.1 did, on every device)."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write to the first ``size`` elements from the view's beginning."""
        low, _ = target.bounds()
        if low + target.size * target.dtype.itemsize <= target.memory.nbytes:
            target = View.contiguous(target.memory, target.offset, target.shape, target.dtype)
        return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]


@liar(6, "int64 goes through int32", seen="FastDeploy 7648")
class Int32Only(Lie):
    """A kernel whose index and value type is int."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Truncate 8-byte integers."""
        if target.dtype.name == "int64" and isinstance(value, (np.ndarray, np.generic)):
            value = np.asarray(value).astype(np.int32).astype(np.int64)
            value = value if value.ndim else value[()]
        return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]


@liar(5, "a bool row is written as int32, four bytes an element")
class BoolAsInt(Lie):
    """A kernel without bool."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Zero the three bytes after each element as well."""
        ticket = super().async_set_value(device, target, value, stream)  # type: ignore[misc]
        if target.dtype.name == "bool" and target.size:
            _, end = target.bounds()
            _raw(self, target.memory, end, bytes(min(3, target.memory.nbytes - end)), stream)
        return ticket  # type: ignore[no-any-return]


@liar(2, "the source array is captured by reference, and read when later work is done", seen="vLLM, five times")
class ByReference(Lie):
    """An asynchronous copy from pageable memory that is not kept alive: the bytes are read late."""

    late: WritePlan | None = None

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Write now, and once more before the next read, from the caller's arrays at that time."""
        ticket = super().submit(plan, stream)  # type: ignore[misc]
        self.late = WritePlan(plan.memory, plan.writes, plan.pieces) if plan.records is None else None
        return ticket  # type: ignore[no-any-return]

    def copy_out(self, memory: Memory, parts: Any, stream: Stream) -> Any:  # noqa: ANN401 (as the honest device)
        """Read after the late write."""
        late, self.late = self.late, None
        if late is not None and late.memory is memory:
            super().submit(late, stream)  # type: ignore[misc]
        return super().copy_out(memory, parts, stream)  # type: ignore[misc]


@liar(4, "of two writes to one place in one plan the first wins")
class FirstWins(Patch):
    """A builder of plans that resolves overlaps in reverse."""

    seam = "overlaps in a plan"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Pass the writes in reverse."""
        return lambda writes: true(writes[::-1].copy())


@liar(6, "a type check that accepts lists and numbers, but not arrays", seen="isinstance(x, np.array)")
class NoArrays(Lie):
    """A refusal of values that the contract allows."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Refuse arrays of more than one axis."""
        if isinstance(value, np.ndarray) and value.ndim > 1:
            raise InvalidValue("arrays are not supported", cure="give a list", argument="value")
        return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]


@liar(7, "claims async_h2d and writes synchronously", requires="not async_h2d", seen="FastDeploy 7521")
class SilentFallback(Lie):
    """A fallback that is not declared."""

    capabilities = Capabilities(
        async_h2d=True, async_d2h=False, fused_scatter=True, pinned_host=False, can_hold_stream=False, collective=""
    )

    def copy_within(self, target: View, value: View, stream: Stream) -> Ticket:
        """Copy by way of the host, in a method of its own: the default would be refused at opening."""
        return super().copy_within(target, value, stream)  # type: ignore[misc,no-any-return]


@liar(12, "the first draft is written once too often, past the given length", seen="FastDeploy")
class OneDraftMore(Lie):
    """A copy loop with <= instead of <."""

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Insert, then write a draft after the last one."""
        ticket = super().insert_tasks(device, state, tasks, stream)  # type: ignore[misc]
        place = state.layout.fields["draft_tokens"]
        for slot, drafts in zip(tasks.slots.tolist(), tasks.drafts, strict=True):
            if 0 < len(drafts) < place.width:
                at = place.offset + slot * place.stride + 8 * len(drafts)
                _raw(self, state.memory, at, np.int64(drafts[0]).tobytes(), stream)
        return ticket  # type: ignore[no-any-return]


@liar(9, "a slot that no task names is changed: the padding of the batch goes to slot 0")
class PaddingGoesToSlotZero(Lie):
    """A kernel launched for a rounded-up batch, whose padding has slot 0."""

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Insert, then clear a field of slot 0."""
        ticket = super().insert_tasks(device, state, tasks, stream)  # type: ignore[misc]
        if 0 not in tasks.slots:
            place = state.layout.fields["seq_lens_this_time"]
            _raw(self, state.memory, place.offset, np.int32(9).tobytes(), stream)
        return ticket  # type: ignore[no-any-return]


@liar(10, "one submission for each request of a batch", requires="fused_scatter", seen="FastDeploy: 32 a request")
class OneSubmissionEach(Lie):
    """A loop over requests instead of staged writes."""

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Insert, and count as such a loop would."""
        self.count("submissions", len(tasks))  # type: ignore[attr-defined]
        return super().insert_tasks(device, state, tasks, stream)  # type: ignore[misc,no-any-return]


@liar(9, "the token that decoding feeds next is the one before")
class FeedsTheTokenBefore(Lie):
    """An off-by-one in the step's own kernel."""

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Advance, then shift."""
        ticket = super().update_inputs(state, step, stream)  # type: ignore[misc]
        place = state.layout.fields["next_tokens"]
        _raw(self, state.memory, place.offset, np.int64(-7).tobytes(), stream)
        return ticket  # type: ignore[no-any-return]


@liar(12, "a slot of the prefill role continues to decode after its first token", seen="hal")
class PrefillGoesOn(Lie):
    """A step without roles: every request that has not ended feeds its next token."""

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Restart the slots with the prefill role."""
        ticket: Ticket = super().update_inputs(state, step, stream)  # type: ignore[misc]
        slots = [slot for slot in range(state.sizes.num_slots) if state.host_table.role(slot) is SplitRole.PREFILL]
        places = [state.layout.fields[name] for name in ("accept_num", "stop_reason")]
        parts = [ByteRange(place.offset + slot * place.stride, 4) for slot in slots for place in places]
        copied = self.copy_out(state.memory, parts, stream)  # type: ignore[attr-defined]
        copied.wait(60.0)
        numbers = [int(part.view(np.int32)[0]) for part in copied.data]
        flags, lengths = (state.layout.fields[name] for name in ("stop_flags", "seq_lens_this_time"))
        for slot, given, reason in zip(slots, numbers[::2], numbers[1::2], strict=True):
            if given > 0 and reason == 0:
                _raw(self, state.memory, flags.offset + slot * flags.stride, b"\0", stream)
                _raw(self, state.memory, lengths.offset + slot * lengths.stride, np.int32(1).tobytes(), stream)
        return ticket


def _raw(device: Any, memory: Memory, offset: int, data: bytes, stream: Stream) -> None:  # noqa: ANN401
    """Write bytes without any checks."""
    from ..harness.backdoor import put

    put(device, memory, [(offset, data)], stream)
