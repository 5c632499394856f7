"""What a step reads from the state: one copy out, then plain NumPy. The model's inputs are made of nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import ByteRange, TaskBatch, TaskKind

from hal.model.batch import ModelBatch

if TYPE_CHECKING:
    from hal_core import Device, SlotState, Stream

Array = np.ndarray[Any, Any]
Columns = Mapping[str, Array]
"""Fields of the state by name, each ``[slots, width]``."""
Chunk = tuple[int, int, int]
"""Slot, first token and number of tokens of a prompt's piece that the step feeds."""


def chunks_of(tasks: TaskBatch) -> list[Chunk]:
    """The pieces of prompts that the step after ``tasks`` feeds, in the order of their slots."""
    feeding = np.flatnonzero((tasks.kinds == TaskKind.PREFILL) | (tasks.kinds == TaskKind.PREFILL_CHUNK))
    columns = (
        tasks.slots[feeding].tolist(),
        tasks.num_computed_tokens[feeding].tolist(),
        tasks.num_scheduled_tokens[feeding].tolist(),
    )
    return sorted(zip(*columns, strict=True))


@dataclass(frozen=True, slots=True)
class StepInput:
    """The state as of this step's start.

    - ``fields``: the ``step_input`` group, ``[slots, width]`` each.
    - ``slots`` int64 ``[rows]``: the slots that run, ascending; ``gives`` bool ``[rows]``: whose token it gives (a
      prompt's piece before the last gives none).
    - ``batch``: the same rows for the model; None when no slot runs.
    """

    fields: Columns
    slots: Array
    gives: Array
    batch: ModelBatch | None


def read_inputs(device: Device, state: SlotState, chunks: Sequence[Chunk], stream: Stream) -> StepInput:
    """Copy out the ``step_input`` fields and the tokens of ``chunks`` in one call, and make the model's rows."""
    part, tokens = state.layout.groups["step_input"], state.layout.fields["token_ids"]
    ranges = [ByteRange(tokens.offset + slot * tokens.stride + start * 8, count * 8) for slot, start, count in chunks]
    copied = device.copy_out(state.memory, [part, *ranges], stream)
    copied.wait()
    fields = state.columns(copied.data[0], part)
    lengths = fields["seq_lens_this_time"][:, 0]
    slots = np.flatnonzero((lengths > 0) & ~fields["stop_flags"][:, 0])
    encoder, contexts = fields["seq_lens_encoder"][slots, 0], fields["seq_lens_decoder"][slots, 0]
    known = fields["prompt_lens"][slots, 0] + fields["step_idx"][slots, 0]
    gives = (encoder == 0) | (contexts + encoder >= known)
    if not len(slots):
        return StepInput(fields, slots, gives, None)
    pieces = {slot: data.view(np.int64) for (slot, _, _), data in zip(chunks, copied.data[1:], strict=True)}
    batch = _model_batch(fields, slots, lengths[slots], contexts, pieces, state.sizes.block_size)
    return StepInput(fields, slots, gives, batch)


def _model_batch(
    fields: Columns, slots: Array, lengths: Array, contexts: Array, pieces: dict[int, Array], block_size: int
) -> ModelBatch:
    """The rows of some slots: a decoding slot feeds its next token, a prefilling one its piece of the prompt."""
    blocks = -(-int((contexts + lengths).max()) // block_size)
    tables = fields["block_tables"][slots, :blocks]
    tokens, positions = fields["next_tokens"][slots, 0], contexts.astype(np.int64)
    if pieces:
        begins = np.cumsum(lengths, dtype=np.int64) - lengths
        tokens = np.repeat(tokens, lengths)
        for row, slot in enumerate(slots.tolist()):
            if slot in pieces:
                tokens[begins[row] : begins[row] + lengths[row]] = pieces[slot]
        positions = np.arange(len(tokens)) - np.repeat(begins - positions, lengths)
    return ModelBatch(tokens, positions, lengths, contexts, tables)
