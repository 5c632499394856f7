"""``update_inputs`` for devices without a kernel for it: the reference on a copy of the state, written back as one
plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..memory.plan import PlanBuilder
from ..memory.views import ByteRange
from ..slots import update as reference
from ..tickets import Ticket

if TYPE_CHECKING:
    from ..slots.state import SlotState, StateDevice
    from ..slots.step import Step
    from ..streams import Stream


def update_by_copy(device: StateDevice, state: SlotState, step: Step, stream: Stream) -> Ticket:
    """Copy out the inputs of ``update_inputs``, compute on the host, and write the changes back as one plan."""
    part = state.layout.groups["step_input"]
    copied = device.copy_out(state.memory, [part], stream)
    copied.wait(device.deadline)
    before = state.columns(copied.data[0], part)
    fields = {name: before[name].copy() for name in reference.WRITES}
    fields |= {name: before[name] for name in reference.READS}
    fields["token_ids"] = _token_tails(device, state, before, stream)
    known = (before["prompt_lens"] + before["step_idx"])[:, 0]
    reference.update_inputs(fields, state.sizes, speculative=step.speculative)
    builder = PlanBuilder(state.memory)
    for name in reference.WRITES:
        changed = np.flatnonzero(fields[name][:, 0] != before[name][:, 0])
        place = state.layout.fields[name]
        data = np.ascontiguousarray(fields[name][changed]).view(np.uint8).reshape(-1)
        builder.copy(place.offset + changed * place.stride, place.stride, data)
    counts = np.maximum(fields["step_idx"] - before["step_idx"], 0)[:, 0]
    place, tokens, slots = state.layout.fields["token_ids"], fields["token_ids"], np.flatnonzero(counts)
    if len(slots):
        data = np.concatenate([tokens[slot, known[slot] : known[slot] + counts[slot]] for slot in slots.tolist()])
        builder.copy(place.offset + slots * place.stride + known[slots] * 8, counts[slots] * 8, data.view(np.uint8))
    return device.submit(builder.build(), stream)


def _token_tails(
    device: StateDevice, state: SlotState, before: dict[str, np.ndarray[Any, Any]], stream: Stream
) -> np.ndarray[Any, Any]:
    """Return a host replacement of ``token_ids`` with the last tokens of slots with stop sequences, zeros elsewhere.

    ``np.zeros`` takes memory only for touched pages, so the replacement costs little.
    """
    place, sizes = state.layout.fields["token_ids"], state.sizes
    tokens = np.zeros((sizes.num_slots, place.width), np.int64)
    slots = np.flatnonzero((before["stop_seqs_num"][:, 0] > 0) & (before["seq_lens_this_time"][:, 0] > 0))
    if not len(slots):
        return tokens
    ends = (before["prompt_lens"] + before["step_idx"])[slots, 0].tolist()
    spans = [(slot, max(0, end - sizes.max_stop_length), end) for slot, end in zip(slots.tolist(), ends, strict=True)]
    parts = [ByteRange(place.offset + slot * place.stride + low * 8, (end - low) * 8) for slot, low, end in spans]
    copied = device.copy_out(state.memory, parts, stream)
    copied.wait(device.deadline)
    for (slot, low, end), data in zip(spans, copied.data, strict=True):
        tokens[slot, low:end] = data.view(np.int64)
    return tokens
