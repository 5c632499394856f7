"""The interface of a proposer, and its input.

A worker calls one proposer from one thread. A step's calls come in this order: ``leave`` and ``enter`` with the tasks
of the step; then, after the step's ``update_inputs``, ``observe`` once; then ``propose`` once, whose result becomes the
state's drafts. A proposal depends only on delivered tokens: neither clocks nor refused drafts count.
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
    """Parameters of a proposer; an entry point of the group ``hal.proposers`` is called with one of these.

    - ``max_draft_tokens``: most drafts of a slot in one step, at least 1.
    - ``num_slots``, ``max_model_len``, ``vocab_size``: of the state and the model; slots and token ids begin at 0.
    - ``model``: the target model, for a proposer that is a part of it; else None.
    - ``step_rows``: how many rows of a step cost as much as the step's fixed cost. It limits drafts: with more running
      requests than this, a row costs as much as a request. 10 is a cpu with a small model; accelerators have some
      hundreds.
    - ``rejection``: drafts are accepted by rejection and not by comparing (``hal_engine.sampling.rejection``). A
      proposer that draws its drafts returns them as :class:`Drawn`, with numbers used for nothing else.
    """

    max_draft_tokens: int
    num_slots: int
    max_model_len: int
    vocab_size: int
    model: object | None = None
    step_rows: int = 10
    rejection: bool = False


class Drawn(list[int]):
    """Drafts of a slot with their distributions: ``weights``, one int64 ``[vocab]`` for each draft. In a hybrid they
    cover the first proposer's drafts, and later drafts are certain."""

    def __init__(self, tokens: Iterable[int], weights: Sequence[Int64s]) -> None:
        super().__init__(tokens)
        self.weights = weights


@dataclass(frozen=True, slots=True)
class Fed:
    """The result of one step after its ``update_inputs``: for each slot that ran, the accepted tokens.

    - ``slots``: those that ran, each once, in the step's order.
    - ``accepted``: one int64 ``[n]`` for each slot: the request's new tokens, cut at its end; empty for a piece of a
      prompt that is not the last one, and for a slot that could get none.
    - ``drafted``: how many drafts the step fed of each slot, the same on every rank, while a rank's own proposal may
      differ; None: those of the last proposal.

    For a proposer that ``wants_hidden``, else None: the rows that the model ran, those of a slot adjacent, in the order
    of ``slots`` (a piece of the prompt, or the next token and the drafts, including refused ones).

    - ``rows`` int64 ``[slots + 1]``: the begin of each slot's rows, and finally their number.
    - ``tokens``, ``positions`` int64 ``[rows]``: the token of each row and its index in the request, from 0.
    - ``hidden``: ``[rows, width]``, the model's last layer's output for each row, as the model's own kind of array.
    - ``fields``: of the proposer's own state, as of the step's start, ``[slots, width]`` each (block tables, sampling
      parameters): a companion of the target's, with the same insertions. ``places``: the slot there of each of
      ``slots``.
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
    """Drafts the continuation of requests. Slots are identified only by number: ``leave`` comes before the next
    ``enter``.

    ``wants_hidden``: True for a proposer that runs on the model's hidden states (MTP); then every rank has one, and all
    ranks make the same calls. Any other runs only on the group's first rank, which sends its drafts to the other ranks.
    """

    wants_hidden: bool

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """Add a request to a slot: a new one, a resumed one, or one that another worker prefilled.

        ``tokens`` int64 ``[n]``: all its known tokens, the prompt and those generated so far; copy them to keep them.
        ``leave`` was called before for the slot's previous request.
        """

    def observe(self, fed: Fed) -> None:
        """Process a step's result: append the accepted tokens of each slot."""

    def propose(self, room: Mapping[int, int]) -> dict[int, list[int]]:
        """Return drafts for the next step, in the order in which they would follow each slot's known tokens.

        ``room``: slot to its most drafts, at least 0 and at most ``Setup.max_draft_tokens``; a slot that is not named
        gets none. A slot may get fewer drafts, or be left out, which means none. Token ids are whole numbers from 0 to
        the vocabulary's size less one; drafts never change a token.
        """

    def leave(self, slot: int, *, finished: bool) -> None:
        """Remove the request from its slot: ``finished`` if it ended normally, and was not aborted, preempted or
        failed.

        The tokens of a finished request may be kept for other requests; the slot's data are dropped in any case. An
        empty slot is ignored.
        """

    def close(self) -> None:
        """Release all resources. No call follows. Idempotent."""
