"""MTP: the multi-token-prediction layer of the target's own checkpoint drafts, fed with the target's hidden states.

Of ``n`` known tokens the layer has entries 0 to n - 2; the last one says the first draft, and what the layer gives is
fed in turn for the next (``hal.model.prediction``). Entries made of drafts are written over when the tokens are known.
Where tokens are drawn, drafts are drawn with the target's own number for their position, by which the two agree more
often than by any other: a draft never becomes a token, so nothing is drawn twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import InvalidValue

from hal.model.batch import ModelBatch
from hal.sampling import STATE_FIELDS, SamplingRows, sample

from .proposer import Fed, Int64s, Setup

if TYPE_CHECKING:
    from hal_core import AdmittedRequest

    from hal.model.prediction import PredictionLayer

Array = np.ndarray[Any, Any]
_NEUTRAL = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Penalties are left out of drafts: they need a history, and change few draws."""


@dataclass(slots=True)
class _Sequence:
    """A request: its ``known`` tokens, the first ``count`` of ``tokens``; ``entries`` of the layer that are in its
    cache, made of known tokens."""

    tokens: Int64s
    count: int
    entries: int = 0

    def append(self, tokens: Int64s) -> None:
        self.tokens[self.count : self.count + len(tokens)] = tokens
        self.count += len(tokens)


class Mtp:
    """The proposer called ``mtp``. Raises :class:`InvalidValue` for a model without such a layer."""

    wants_hidden = True

    def __init__(self, setup: Setup) -> None:
        from hal.model.llama import LlamaModel

        if not isinstance(setup.model, LlamaModel):
            raise InvalidValue(
                "there is no model whose prediction layer could draft",
                cure="choose another proposer, as ngram",
                argument="--speculate",
            )
        if setup.model.weights.prediction is None:
            raise InvalidValue(
                "the checkpoint has no multi-token-prediction layer (num_nextn_predict_layers is 0)",
                cure="choose another proposer, as ngram, or a checkpoint that has one",
                argument="--speculate",
            )
        self._model, self._setup = setup.model, setup
        self._layer: PredictionLayer | None = None
        self._sequences: dict[int, _Sequence] = {}
        self._fed: Fed | None = None

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """Keep the tokens. What the layer has no entries of (a prompt prefilled elsewhere) gets no drafts."""
        kept = np.empty(self._setup.max_model_len + 1, np.int64)
        kept[: len(tokens)] = tokens
        self._sequences[slot] = _Sequence(kept, len(tokens))

    def observe(self, fed: Fed) -> None:
        """Take over the tokens; the layer is run on the hidden states when drafts are asked for, with the first one."""
        for slot, accepted in zip(fed.slots, fed.accepted, strict=True):
            self._sequences[slot].append(accepted)
        self._fed = fed

    def propose(self, room: Mapping[int, int]) -> dict[int, list[int]]:
        """Run the layer on what the step gave, then as often as the longest drafts need."""
        fed, self._fed = self._fed, None
        if fed is None or fed.rows is None or fed.fields is None:
            return {}
        entries = _Entries.of(fed, self._sequences, room)
        if not len(entries.slots):
            return {}
        given = self._feed(entries, fed.hidden, fed.fields)
        if not entries.drafting:
            return {}
        slots = np.array(entries.drafting, np.int64)
        most = np.array([room[slot] for slot in entries.drafting], np.int64)
        drafts = self._draft(slots, most, given, fed.fields)
        return {
            slot: column[: min(count, column.index(-1) if -1 in column else count)]
            for slot, count, column in zip(entries.drafting, most.tolist(), drafts.T.tolist(), strict=True)
        }

    def _draft(self, slots: Int64s, most: Int64s, given: Any, fields: Mapping[str, Array]) -> Int64s:  # noqa: ANN401
        """int64 ``[depth, slots]``: the drafts of each slot, of which it has room for ``most``; -1 for none."""
        layer, depth = self._prediction(), int(most.max())
        known = np.array([self._sequences[slot].count for slot in slots.tolist()], np.int64)
        choose = _Choice.of(slots, known, fields)
        drafts = [choose(layer.logits(given), 0)]
        if depth > 1:
            reach = np.maximum(most - 1, 1)
            steps = layer.run(fields["block_tables"][slots], known - 1, reach, depth - 1)
            for number, step in enumerate(steps, 1):
                given = layer.follow(step, np.maximum(drafts[-1], 0), given)
                drafts.append(choose(layer.logits(given), number))
        return np.stack(drafts)

    def leave(self, slot: int, *, finished: bool) -> None:
        """Forget the request; its entries are in blocks that are given back with the target's."""
        self._sequences.pop(slot, None)

    def close(self) -> None:
        """Drop the layer's cache."""
        self._layer = None

    def _prediction(self) -> PredictionLayer:
        if self._layer is None:  # the model has its cache by now, and this one is as large
            from hal.model.prediction import PredictionLayer

            self._layer = PredictionLayer(self._model)
        return self._layer

    def _feed(self, entries: _Entries, hidden: Any, fields: Mapping[str, Array]) -> Any:  # noqa: ANN401 (the model's)
        """Run the layer on ``entries`` of the ``hidden`` states of the step; what it gave for those that draft."""
        layer = self._prediction()
        if entries.rows is not None:
            hidden = self._model.chosen(hidden, entries.rows)
        blocks = -(-int((entries.contexts + entries.lengths).max()) // layer.block_size)
        tables = fields["block_tables"][entries.slots, :blocks]
        positions, lengths, contexts = entries.positions, entries.lengths, entries.contexts
        return layer.forward(ModelBatch(entries.tokens, positions, lengths, contexts, tables, entries.outputs), hidden)


@dataclass(frozen=True, slots=True)
class _Choice:
    """How drafts are chosen: the best token, or drawn as the target will draw the token of that position."""

    rows: SamplingRows | None

    @classmethod
    def of(cls, slots: Int64s, known: Int64s, fields: Mapping[str, Array]) -> _Choice:
        if not ((fields["temperature"][slots, 0] > 0) & (fields["top_k"][slots, 0] != 1)).any():
            return cls(None)
        columns = {name: fields[name][slots] for name in STATE_FIELDS.values()}
        for name, value in _NEUTRAL.items():
            columns[name] = np.full_like(columns[name], value)
        columns["step_idx"] = (known - fields["prompt_lens"][slots, 0])[:, None]
        return cls(SamplingRows.from_state(columns, prompt=None, output=None))

    def __call__(self, logits: Array, depth: int) -> Int64s:
        """The draft of each row, int64 ``[n]``, -1 for none."""
        if self.rows is None:
            best: Int64s = logits.argmax(axis=1)
            return best
        return sample(logits, replace(self.rows, position=self.rows.position + depth), logprobs=None).tokens


@dataclass(frozen=True, slots=True)
class _Entries:
    """Entries of the layer that are run at once.

    - ``slots`` int64 ``[n]``, ``lengths``, ``contexts`` int32 ``[n]``: whose, how many, and how many before them.
    - ``rows`` int64 ``[entries]``: which of the step's hidden states; None for all. ``tokens``, ``positions`` int64
      ``[entries]``: the tokens that follow, and the entries' places.
    - ``outputs`` int64: of which the logits are wanted, those of ``drafting``, the slots that get drafts.
    """

    slots: Int64s
    lengths: Array
    contexts: Array
    rows: Int64s | None
    tokens: Int64s
    positions: Int64s
    outputs: Int64s
    drafting: list[int]

    @classmethod
    def of(cls, fed: Fed, sequences: Mapping[int, _Sequence], room: Mapping[int, int]) -> _Entries:
        """The entries that a step makes known: of each slot that goes on, for the rows whose next token is known.

        Slots that lack entries before are left out: what they drafted would be of no use.
        """
        assert fed.rows is not None
        assert fed.positions is not None
        slots, lengths, contexts, rows, tokens, positions, outputs, drafting = [], [], [], [], [], [], [], []
        total = 0
        for at, slot in enumerate(fed.slots):
            sequence, begin, end = sequences[slot], int(fed.rows[at]), int(fed.rows[at + 1])
            start = int(fed.positions[begin])
            count = min(end - begin, sequence.count - 1 - start)
            if count < 1 or start > sequence.entries:
                continue
            sequence.entries = start + count
            total += count
            slots.append(slot)
            lengths.append(count)
            contexts.append(start)
            rows.append(np.arange(begin, begin + count))
            tokens.append(sequence.tokens[start + 1 : start + 1 + count])
            positions.append(np.arange(start, start + count))
            if room.get(slot, 0) > 0 and sequence.entries == sequence.count - 1:
                outputs.append(total - 1)
                drafting.append(slot)
        joined = [np.concatenate(parts) if parts else np.zeros(0, np.int64) for parts in (rows, tokens, positions)]
        whole = total == len(fed.positions)
        return cls(
            np.array(slots, np.int64),
            np.array(lengths, np.int32),
            np.array(contexts, np.int32),
            None if whole else joined[0],
            joined[1],
            joined[2],
            np.array(outputs, np.int64),
            drafting,
        )
