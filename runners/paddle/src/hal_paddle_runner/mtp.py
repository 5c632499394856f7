"""MTP: the multi-token-prediction layer of the target's own checkpoint drafts from the target's hidden states.

For ``n`` known tokens the layer has entries 0 to n - 2. The last one predicts the first draft, and the layer's output
is its input for the next one (``hal_paddle_runner.prediction``). Entries made of drafts are overwritten when the tokens
are known.

If tokens are drawn, drafts are drawn with the target's own number for their position, with which the two agree more
often than with any other. A draft never becomes a token, so no number is used twice.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import InvalidValue
from hal_engine.proposers.proposer import Drawn, Fed, Int64s, Proposer, Setup
from hal_engine.sampling import STATE_FIELDS, SamplingRows, draw_drafts, sample

from .batch import ModelBatch
from .host import HostModel
from .model import Model
from .prediction_host import HostPrediction

if TYPE_CHECKING:
    from hal_core import AdmittedRequest

    from .prediction import PredictionLayer
    from .prediction_host import Part

Array = np.ndarray[Any, Any]
_NEUTRAL = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Penalties are not applied to drafts: they need a history, and change few draws."""


_STATE = struct.Struct("<q")
MOST_WAITING = 64
"""Most entries that wait for a requested draft; so many are run at once even without one."""


@dataclass(slots=True)
class _Sequence:
    """A request: its known tokens, the first ``count`` of ``tokens``; the number of cached ``entries`` made of known
    tokens; and ``parts`` of hidden states with ``waiting`` entries after them that are not run yet. ``drawn``: its
    tokens are drawn, not the best ones."""

    tokens: Int64s
    count: int
    drawn: bool
    entries: int = 0
    waiting: int = 0
    parts: list[Part] = field(default_factory=list)

    def wait(self, rows: Any, start: int, begin: int, end: int) -> None:  # noqa: ANN401 (the layer's)
        """Keep the hidden states of a step's rows from ``begin`` to ``end``, of positions from ``start`` on, as far as
        the next token of each is known."""
        count = min(end - begin, self.count - 1 - start)
        if count > 0 and start == self.entries + self.waiting:
            self.parts.append((rows, begin, begin + count))
            self.waiting += count

    @property
    def complete(self) -> bool:
        """Return whether the last entry, which predicts the next draft, waits with all missing entries before it."""
        return self.waiting > 0 and self.entries + self.waiting == self.count - 1

    def append(self, tokens: Int64s) -> None:
        self.tokens[self.count : self.count + len(tokens)] = tokens
        self.count += len(tokens)


class Mtp:
    """The proposer called ``mtp``. Raises :class:`InvalidValue` for a model without such a layer."""

    wants_hidden = True
    draft_cost = 0.25
    """Cost of one run of the layer as a fraction of a step; on a cpu a quarter (measured, a model of four layers)."""

    def __init__(self, setup: Setup) -> None:
        if not isinstance(setup.model, Model):
            raise InvalidValue(
                "no model with a prediction layer is available",
                cure="choose another proposer, as ngram",
                argument="--speculate",
            )
        if not setup.model.config.num_nextn_predict_layers:
            raise InvalidValue(
                "the checkpoint has no multi-token-prediction layer (num_nextn_predict_layers is 0)",
                cure="choose another proposer, as ngram, or a checkpoint that has one",
                argument="--speculate",
            )
        self._model, self._setup = setup.model, setup
        if isinstance(setup.model, HostModel):
            self.draft_cost = 1 / 6  # beside prepared calls (measured at 1 and 8 rows)
        self._layer: HostPrediction | PredictionLayer | None = None
        self._sequences: dict[int, _Sequence] = {}
        self._fed: Fed | None = None

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """Keep the tokens. Without entries of the layer (a prompt prefilled on another worker) there are no drafts."""
        kept = np.empty(self._setup.max_model_len + 1, np.int64)
        kept[: len(tokens)] = tokens
        drawn = request.params.temperature > 0 and request.params.top_k != 1
        self._sequences[slot] = _Sequence(kept, len(tokens), drawn)

    def observe(self, fed: Fed) -> None:
        """Append the tokens, and keep the hidden states: the layer is run when drafts are requested."""
        for slot, accepted in zip(fed.slots, fed.accepted, strict=True):
            self._sequences[slot].append(accepted)
        self._fed = fed
        if fed.rows is None or fed.positions is None:
            return
        kept, rows = self.layer().kept(fed.hidden), fed.rows.tolist()
        firsts = fed.positions[fed.rows[:-1]].tolist()
        for slot, start, begin, end in zip(fed.slots, firsts, rows, rows[1:], strict=False):
            self._sequences[slot].wait(kept, start, begin, end)

    def propose(self, room: Mapping[int, int]) -> dict[int, list[int]]:
        """Run the layer on the waiting entries of slots with room, then as often as the longest drafts need."""
        fed, self._fed = self._fed, None
        if fed is None or fed.rows is None or fed.fields is None:
            return {}
        drafting = [slot for slot in fed.slots if room.get(slot, 0) > 0 and self._sequences[slot].complete]
        served = set(drafting)
        full = [slot for slot in fed.slots if slot not in served and self._sequences[slot].waiting >= MOST_WAITING]
        if not drafting and not full:
            return {}
        places = dict(zip(fed.slots, fed.places, strict=True))
        own = np.array([places[slot] for slot in drafting + full], np.int64)
        tables = fed.fields["block_tables"][own]
        sequences = [self._sequences[slot] for slot in drafting + full]
        given = self._feed(sequences, tables, len(drafting))
        if not drafting:
            return {}
        sequences = sequences[: len(drafting)]
        known = np.array([sequence.count for sequence in sequences], np.int64)
        most, choose = [room[slot] for slot in drafting], _Choice(None)
        if any(sequence.drawn for sequence in sequences):
            choose = _Choice.of(own[: len(drafting)], known, fed.fields, self._setup.rejection)
        drafts = self._draft(tables[: len(drafting)], known, most, given, choose)
        found: dict[int, list[int]] = {}
        for row, (slot, count, column) in enumerate(zip(drafting, most, zip(*drafts, strict=True), strict=True)):
            tokens = list(column[: min(count, column.index(-1) if -1 in column else count)])
            found[slot] = Drawn(tokens, [weights[row] for weights in choose.weights]) if choose.weights else tokens
        return found

    def _feed(self, sequences: list[_Sequence], tables: Array, drafting: int) -> Any:  # noqa: ANN401 (the model's)
        """Run all waiting entries of these requests in one call; return the output of the last one of each of the first
        ``drafting``."""
        lengths = np.array([sequence.waiting for sequence in sequences], np.int32)
        starts = np.array([sequence.entries for sequence in sequences], np.int32)
        parts: list[Part] = []
        tokens: list[Int64s] = []
        positions: list[Int64s] = []
        for sequence in sequences:
            first, stop = sequence.entries, sequence.entries + sequence.waiting
            parts += sequence.parts
            tokens.append(sequence.tokens[first + 1 : stop + 1])
            positions.append(np.arange(first, stop))
            sequence.entries, sequence.waiting, sequence.parts = stop, 0, []
        last = None if drafting == len(lengths) else lengths.cumsum(dtype=np.int64)[:drafting] - 1
        batch = ModelBatch(_joined(tokens), _joined(positions), lengths, starts, tables, last)
        return self.layer().feed(parts, batch)

    def _draft(
        self,
        tables: Array,
        known: Int64s,
        most: list[int],
        given: Any,  # noqa: ANN401 (the model's)
        choose: _Choice,
    ) -> list[list[int]]:
        """Return the drafts at each depth, one for each row of the block tables, -1 for none; ``known``: how many
        tokens each has, ``most``: how many drafts it has room for."""
        layer, depth = self.layer(), max(most)
        chosen = choose(layer.logits(given), 0)
        drafts = [chosen.tolist()]
        if depth > 1:
            reach = np.maximum(np.array(most, np.int64) - 1, 1)
            steps: Any = layer.run(tables, known - 1, reach, depth - 1)
            for number, step in enumerate(steps, 1):
                given = layer.follow(step, chosen if choose.rows is None else np.maximum(chosen, 0), given)
                chosen = choose(layer.logits(given), number)
                drafts.append(chosen.tolist())
        return drafts

    def leave(self, slot: int, *, finished: bool) -> None:
        """Forget the request; its entries are in blocks that are freed with the target's."""
        self._sequences.pop(slot, None)

    def covered(self, slot: int) -> int:
        """Return how many tokens have entries of the layer that were made of known tokens."""
        return self._sequences[slot].entries if slot in self._sequences else 0

    def hand_over(self, slot: int) -> bytes:
        """Return the number of those entries."""
        return _STATE.pack(self.covered(slot))

    def take_over(self, slot: int, state: bytes) -> None:
        """Continue with entries that are in the blocks."""
        sequence = self._sequences[slot]
        entries = _STATE.unpack(state)[0] if len(state) == _STATE.size else -1
        if not 0 <= entries < sequence.count:
            what = f"{state!r} states {entries} entries of a request of {sequence.count} tokens"
            raise InvalidValue(what, cure="hand over between workers with the same proposer", argument="state")
        sequence.entries = entries

    def close(self) -> None:
        """Drop the layer's cache."""
        self._layer = None

    def layer(self) -> HostPrediction | PredictionLayer:
        """The layer, created on first use."""
        if self._layer is None:  # the model has its cache by now, and this one is as large
            self._layer = open_prediction(self._model)
        return self._layer


def open_prediction(model: Model) -> HostPrediction | PredictionLayer:
    """Return the prediction layer of ``model``, with a cache of the size of the model's: block ids mean the same in
    both. Raises ``InvalidValue`` for a model without a cache."""
    if model.cache is None:
        raise InvalidValue("the model has no cache yet", cure="call allocate_cache first", argument="model")
    if isinstance(model, HostModel):
        return HostPrediction(model)
    from .llama import LlamaModel
    from .prediction import PredictionLayer

    assert isinstance(model, LlamaModel)
    return PredictionLayer(model)


def mtp_in(proposer: Proposer) -> Mtp | None:
    """Return the proposer, or the one inside it, that has keys and values in a request's blocks; None without one."""
    if isinstance(proposer, Mtp):
        return proposer
    inside = (getattr(proposer, name, None) for name in ("inner", "first", "second"))
    found = (mtp_in(one) for one in inside if isinstance(one, Proposer))
    return next((one for one in found if one is not None), None)


def _joined(parts: list[Int64s]) -> Int64s:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The choice of drafts: the best token, or one drawn as the target will draw the token of that position. If drafts
    are accepted by rejection, they have their own numbers, and ``weights`` keeps the distributions of each depth."""

    rows: SamplingRows | None
    rejection: bool = False
    weights: list[Int64s] = field(default_factory=list)

    @classmethod
    def of(cls, slots: Int64s, known: Int64s, fields: Mapping[str, Array], rejection: bool) -> _Choice:
        """Return the choice for rows of which some are drawn."""
        columns = {name: fields[name][slots] for name in STATE_FIELDS.values()}
        for name, value in _NEUTRAL.items():
            columns[name] = np.full_like(columns[name], value)
        columns["step_idx"] = (known - fields["prompt_lens"][slots, 0])[:, None]
        return cls(SamplingRows.from_state(columns, prompt=None, output=None), rejection)

    def __call__(self, logits: Array, depth: int) -> Int64s:
        """Return the draft of each row, int64 ``[n]``, -1 for none."""
        if self.rows is None:
            best: Int64s = logits.argmax(axis=1)
            return best
        rows = replace(self.rows, position=self.rows.position + depth)
        if not self.rejection:
            return sample(logits, rows, logprobs=None).tokens
        tokens, weights = draw_drafts(logits, rows)
        self.weights.append(weights)
        return tokens
