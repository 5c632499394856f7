"""The values that a step reads from the state: one copy out, then plain NumPy. The model's inputs come only from
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import FEEDING, ByteRange, TaskBatch

from .batch import ModelBatch

if TYPE_CHECKING:
    from hal_core import BoundDevice, SlotState, Stream

Array = np.ndarray[Any, Any]
Columns = Mapping[str, Array]
"""Fields of the state by name, each ``[slots, width]``."""
Chunk = tuple[int, int, int]
"""Slot, first token and number of tokens of a chunk of a prompt that the step feeds."""


def chunks_of(tasks: TaskBatch) -> list[Chunk]:
    """Return the chunks of prompts that the step after ``tasks`` feeds, in the order of their slots."""
    names = "slots", "num_computed_tokens", "num_scheduled_tokens", "kinds"
    columns = zip(*[tasks.plain[name] for name in names], strict=True)
    return sorted([(slot, start, length) for slot, start, length, kind in columns if kind in FEEDING])


@dataclass(frozen=True, slots=True)
class StepInput:
    """The state at the start of this step.

    - ``fields``: the ``step_input`` group, ``[slots, width]`` each.
    - ``slots`` int64 ``[rows]``: the slots that run, ascending; ``gives`` bool ``[rows]``: whether the slot gets tokens
      (a chunk of a prompt before the last gets none); ``decodes`` bool ``[rows]``: whether the slot feeds no chunk.
    - ``drafts`` int64 ``[rows]``: the number of drafts that each slot feeds behind its next token.
    - ``batch``: the same rows for the model; None when no slot runs. Its logits belong to the rows that give tokens:
      one after each of a row's next token and drafts, or one after the last token of a prompt.
    - ``companions``: ``fields`` of each companion of the state, in its own slots.
    """

    fields: Columns
    slots: Array
    gives: Array
    decodes: Array
    drafts: Array
    batch: ModelBatch | None
    companions: Sequence[Columns] = ()


def read_inputs(device: BoundDevice, state: SlotState, chunks: Sequence[Chunk], stream: Stream) -> StepInput:
    """Copy out the ``step_input`` fields, also of the state's companions, and the tokens of ``chunks`` in one call.
    Build the model's rows from them."""
    part, tokens = state.layout.groups["step_input"], state.layout.fields["token_ids"]
    ranges = [ByteRange(tokens.offset + slot * tokens.stride + start * 8, count * 8) for slot, start, count in chunks]
    others = [companion.layout.groups["step_input"] for companion in state.companions]
    copied = device.copy_out(memory=state.memory, parts=[part, *ranges, *others], stream=stream)
    copied.wait()
    fields = state.copied_fields(copied.data[0], part)
    columns = zip(state.companions, copied.data[1 + len(ranges) :], others, strict=True)
    companions = [companion.copied_fields(data, where) for companion, data, where in columns]
    lengths = fields["seq_lens_this_time"][:, 0]
    slots = np.flatnonzero((lengths > 0) & ~fields["stop_flags"][:, 0])
    encoder, contexts = fields["seq_lens_encoder"][slots, 0], fields["seq_lens_decoder"][slots, 0]
    known = fields["prompt_lens"][slots, 0] + fields["step_idx"][slots, 0]
    decodes = encoder == 0
    gives = decodes | (contexts + encoder >= known)
    lengths = lengths[slots]
    drafts = np.where(decodes, lengths - 1, 0).astype(np.int64)
    if not len(slots):
        return StepInput(fields, slots, gives, decodes, drafts, None)
    pieces = {
        slot: data.view(np.int64) for (slot, _, _), data in zip(chunks, copied.data[1 : 1 + len(ranges)], strict=True)
    }
    blocks = -(-int((contexts + lengths).max()) // state.sizes.block_size)
    tables = fields["block_tables"][slots, :blocks]
    outputs = None if gives.all() and not drafts.any() else _outputs(lengths, gives, drafts)
    token_ids, positions = _tokens(fields, slots, lengths, contexts, drafts, pieces)
    batch = ModelBatch(token_ids, positions, lengths, contexts, tables, outputs)
    return StepInput(fields, slots, gives, decodes, drafts, batch, companions)


def rows_of(slots: Array, count: int) -> Array | slice:
    """Return the index of the rows of ``slots``, ascending, among ``count``. For all rows it copies no data."""
    return slice(None) if len(slots) == count else slots


def _outputs(lengths: Array, gives: Array, drafts: Array) -> Array:
    """Return the tokens whose logits are needed: of each row that gives, the last token and the drafts before it."""
    counts = np.where(gives, 1 + drafts, 0)
    ends = np.cumsum(lengths, dtype=np.int64)
    outputs: Array = np.repeat(ends - np.cumsum(counts), counts) + np.arange(counts.sum())
    return outputs


def _tokens(
    fields: Columns, slots: Array, lengths: Array, contexts: Array, drafts: Array, pieces: dict[int, Array]
) -> tuple[Array, Array]:
    """Return the tokens of all rows and their positions. A decoding slot feeds its next token and its drafts, a
    prefilling one its chunk of the prompt."""
    tokens, positions = fields["next_tokens"][slots, 0], contexts.astype(np.int64)
    drafting = drafts.any()
    if not pieces and not drafting:
        return tokens, positions
    begins = np.cumsum(lengths, dtype=np.int64) - lengths
    tokens = np.repeat(tokens, lengths)
    positions = np.arange(len(tokens)) - np.repeat(begins - positions, lengths)
    if drafting:
        rows = np.repeat(np.arange(len(slots)), drafts)
        behind = np.arange(len(rows)) - np.repeat(np.cumsum(drafts) - drafts, drafts)
        tokens[begins[rows] + 1 + behind] = fields["draft_tokens"][slots[rows], behind]
    for row, slot in enumerate(slots.tolist()) if pieces else ():
        if slot in pieces:
            tokens[begins[row] : begins[row] + lengths[row]] = pieces[slot]
    return tokens, positions
