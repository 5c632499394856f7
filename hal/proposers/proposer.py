"""The interface of a proposer, and what it is told.

A worker calls one proposer from one thread. A step's calls come in this order: ``leave`` and ``enter`` with the tasks
of the step; then, after the step's ``update_inputs``, ``observe`` once; then ``propose`` once, whose answer becomes the
state's drafts. Whoever proposes decides by tokens that were delivered: no clock, and no draft that was refused, counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from hal_core import AdmittedRequest

Array = np.ndarray[Any, Any]
Int64s = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a proposer is made for; an entry point of the group ``hal.proposers`` is called with one of these.

    - ``max_draft_tokens``: most drafts of a slot in one step, at least 1.
    - ``num_slots``, ``max_model_len``, ``vocab_size``: of the state and the model; slots go from 0, token ids too.
    - ``model``: the target model, for a proposer that is a part of it; None where there is none.
    - ``step_rows``: how many rows of a step cost as much as the step does before its first. Drafts are made by it:
      where more requests run than this, a row more costs as much as a request. 10 is a cpu with a small model;
      accelerators have some hundreds.
    - ``rejection``: drafts are accepted by rejection and not by comparing (``hal.sampling.rejection``): who draws its
      drafts gives them as :class:`Drawn`, by numbers that draw nothing else.
    """

    max_draft_tokens: int
    num_slots: int
    max_model_len: int
    vocab_size: int
    model: object | None = None
    step_rows: int = 10
    rejection: bool = False


class Drawn(list[int]):
    """Drafts of a slot with what each was drawn from: ``weights``, one int64 ``[vocab]`` for each draft; in a hybrid's,
    for those of the first proposer, and the drafts behind them are certain."""

    def __init__(self, tokens: Iterable[int], weights: Sequence[Int64s]) -> None:
        super().__init__(tokens)
        self.weights = weights


@dataclass(frozen=True, slots=True)
class Fed:
    """What one step gave, as of its ``update_inputs``: for each slot that ran, the tokens that were accepted.

    - ``slots``: those that ran, each once, in the step's order.
    - ``accepted``: one int64 ``[n]`` for each slot: the tokens that the request was given, as cut at its end; empty for
      a piece of a prompt that is not the last one, and for a slot that could be given none.
    - ``drafted``: how many drafts the step fed of each slot, the same on every rank, where a rank's own proposal may
      differ; None: those of the last proposal.

    For a proposer that ``wants_hidden``, else None: the rows that the model ran, those of a slot side by side in the
    order of ``slots`` (a piece of the prompt, or the next token and the drafts, also those that were refused).

    - ``rows`` int64 ``[slots + 1]``: where the rows of each slot begin, and behind the last one their number.
    - ``tokens``, ``positions`` int64 ``[rows]``: the token of each row and its place in the request, from 0.
    - ``hidden``: ``[rows, width]``, what the model's last layer gave for each row, as the model's own kind of array.
    - ``fields``: of the proposer's own state, as of the step's start, ``[slots, width]`` each (block tables, how tokens
      are drawn): a companion of the target's, inserted into with it. ``places``: the slot there of each of ``slots``.
    """

    slots: Sequence[int]
    accepted: Sequence[Int64s]
    rows: Int64s | None = None
    tokens: Int64s | None = None
    positions: Int64s | None = None
    hidden: Any = None
    fields: Mapping[str, Array] | None = None
    places: Sequence[int] = ()
    drafted: Sequence[int] | None = None


@runtime_checkable
class Proposer(Protocol):
    """Guesses how requests go on. Slots are told apart by number alone: ``leave`` comes before the next ``enter``.

    ``wants_hidden``: True for one that runs on the model's hidden states (MTP); then every rank has one, and all ranks
    make the same calls. Any other runs on the group's first rank alone, whose drafts the others are sent.
    """

    wants_hidden: bool

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """A request takes a slot: a new one, one that is resumed, or one that another worker prefilled.

        ``tokens`` int64 ``[n]``: all that is known of it, the prompt and what was generated so far; to be copied if it
        is kept. Before that ``leave`` was called for whoever was in the slot.
        """

    def observe(self, fed: Fed) -> None:
        """Take over what a step gave: append the accepted tokens of each slot to what is known of it."""

    def propose(self, room: Mapping[int, int]) -> dict[int, list[int]]:
        """Drafts for the next step, in the order in which they would follow what is known of each slot.

        ``room``: slot to the most drafts that it may have, at least 0 and at most ``Setup.max_draft_tokens``; a slot
        that is not named gets none. A slot may be given fewer drafts, or be left out, which is the same as none.
        Token ids are whole numbers from 0 to the vocabulary's size less one; whatever they are, no token changes.
        """

    def leave(self, slot: int, *, finished: bool) -> None:
        """The request is out of its slot: ``finished`` when it ended by itself, not aborted, preempted or failed.

        What a finished request was given may help others; what is known of the slot is forgotten in any case. A slot
        that holds nothing is nothing to do.
        """

    def close(self) -> None:
        """Give back what it holds. Nothing is called afterwards; a second time does nothing."""


@runtime_checkable
class HandsOver(Protocol):
    """A proposer with keys and values of its own in a request's blocks, which move with them to another worker."""

    def layer(self) -> Any:  # noqa: ANN401 (the model's own kind)
        """The layer whose cache they are in; the model has its own by now."""

    def covered(self, slot: int) -> int:
        """Of how many of the slot's tokens, from the first on, its keys and values will not change."""

    def hand_over(self, slot: int) -> bytes:
        """What its equal on another worker needs to go on; before ``leave``."""

    def take_over(self, slot: int, state: bytes) -> None:
        """Go on as the other worker's would have; after ``enter``.

        :raises InvalidValue: for a state that is none of this proposer's.
        """


def handing_over(proposer: Proposer | None) -> HandsOver | None:
    """The proposer, or the one inside it, that hands something over; None where nothing has to be."""
    if proposer is None or isinstance(proposer, HandsOver):
        return proposer
    inside = (getattr(proposer, name, None) for name in ("inner", "first", "second"))
    found = (handing_over(one) for one in inside if isinstance(one, Proposer))
    return next((one for one in found if one is not None), None)
