"""Speculation in ``hal run``: which proposer drafts, and what is told of its drafts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hal_core import HalError, InvalidValue

from hal.proposers import NONE, Setup, make_proposer

if TYPE_CHECKING:
    from hal_core import AdmittedRequest, StateConfig

    from hal.model.config import LlamaConfig
    from hal.proposers import Fed, Proposer
    from hal.proposers.proposer import Int64s
    from hal.worker.drafting import Acceptance

REJECTION = "rejection"
MOST_DRAFTS = 5
"""Most drafts of a step."""
_OF_THE_CHECKPOINT = {"mtp", "hybrid"}
"""Proposers that draft with the checkpoint's own prediction layer."""


def check_speculation(speculate: str, drafts: int) -> None:
    """Raise :class:`InvalidValue` for a count of drafts that a state has no room for."""
    if speculate != NONE and not 1 <= drafts <= MOST_DRAFTS:
        raise InvalidValue(f"{drafts}", cure=f"give a whole number from 1 to {MOST_DRAFTS}", argument="--drafts")


def check_layer(speculate: str, config: LlamaConfig) -> None:
    """Raise :class:`InvalidValue` where the checkpoint has no prediction layer to draft with."""
    if not config.num_nextn_predict_layers and _OF_THE_CHECKPOINT & set(speculate.split("+")):
        raise InvalidValue(
            f"{speculate}: the checkpoint has no multi-token-prediction layer (num_nextn_predict_layers is 0)",
            cure="choose another proposer, as ngram, or a checkpoint that has one",
            argument="--speculate",
        )


def check_acceptance(acceptance: str, speculate: str) -> None:
    """Raise :class:`InvalidValue` for a way to accept drafts that there is not."""
    if acceptance not in ("exact", REJECTION):
        raise InvalidValue(f"{acceptance!r}", cure=f"give exact or {REJECTION}", argument="--acceptance")
    if acceptance == REJECTION and speculate == NONE:
        cure = "leave it out, or name a proposer with --speculate"
        raise InvalidValue("there are no drafts to accept", cure=cure, argument="--acceptance")


def open_proposer(
    speculate: str, sizes: StateConfig, vocab_size: int, model: object, *, rejection: bool = False
) -> Counted | None:
    """The proposer of that name, with its drafts counted; None for ``none``."""
    setup = Setup(sizes.max_draft_tokens, sizes.num_slots, sizes.max_model_len, vocab_size, model, rejection=rejection)
    proposer = make_proposer(speculate, setup)
    return None if proposer is None else Counted(proposer, speculate)


@contextmanager
def closing_well(proposer: Proposer) -> Iterator[None]:
    """Close it in the end; after an error that one is raised, and what closing says besides is a note of it."""
    try:
        yield
    except BaseException as error:
        try:
            proposer.close()
        except HalError as second:
            error.add_note(str(second))
        raise
    proposer.close()


class Counted:
    """A proposer whose drafts are counted by request: ``drafted``, request id to their number."""

    def __init__(self, inner: Proposer, name: str) -> None:
        self.inner, self.name, self.wants_hidden = inner, name, inner.wants_hidden
        self.drafted: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """Remember whose slot it is."""
        self._names[slot] = request.request_id
        self.inner.enter(slot, request, tokens)

    def observe(self, fed: Fed) -> None:
        """Handed on."""
        self.inner.observe(fed)

    def propose(self, room: Mapping[int, int]) -> dict[int, list[int]]:
        """Count what is drafted."""
        drafts = self.inner.propose(room)
        for slot, tokens in drafts.items():
            name = self._names[slot]
            self.drafted[name] = self.drafted.get(name, 0) + len(tokens)
        return drafts

    def leave(self, slot: int, *, finished: bool) -> None:
        """Handed on."""
        self._names.pop(slot, None)
        self.inner.leave(slot, finished=finished)

    def close(self) -> None:
        """Handed on."""
        self.inner.close()


def told_of_answer(name: str, drafted: int, steps: int, tokens: int) -> dict[str, Any]:
    """What a JSON object says of an answer of so many ``tokens`` that came in so many ``steps``."""
    rate = round(tokens / steps, 3) if steps else 0.0
    return {"proposer": name, "drafted": drafted, "accepted": max(0, tokens - steps), "tokens_a_step": rate}


def summed_up(speculate: str, acceptance: Acceptance) -> str:
    """The part of the closing line that tells of drafts, with a comma before it; "" without speculation."""
    if speculate == NONE:
        return ""
    told = (
        f"{acceptance.accepted} of {acceptance.drafted} drafts accepted, {acceptance.tokens_a_turn:.2f} tokens a step"
    )
    return f", {told} ({speculate})"
