"""Checks of the options for speculation: proposers, number of drafts, acceptance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core import InvalidValue

from .loading import NONE

if TYPE_CHECKING:
    from hal_engine.model.config import TextConfig

REJECTION = "rejection"
MOST_DRAFTS, USUAL_DRAFTS = 5, 4
"""Most drafts of a step, and a proposer's default."""
_OF_THE_CHECKPOINT = {"mtp", "hybrid"}
"""Proposers that draft with the checkpoint's own prediction layer."""


def most_drafts(speculate: str, drafts: int | None) -> int:
    """Return how many drafts of a request a step verifies at most; 0: steps are plain."""
    return USUAL_DRAFTS if drafts is None and speculate != NONE else drafts or 0


def check_drafts_count(drafts: int | None) -> None:
    """Raise :class:`InvalidValue` if a state has no room for so many drafts."""
    if drafts is not None and not 1 <= drafts <= MOST_DRAFTS:
        raise InvalidValue(f"{drafts}", cure=f"give a whole number from 1 to {MOST_DRAFTS}", argument="--drafts")


def check_layer(speculate: str, config: TextConfig) -> None:
    """Raise :class:`InvalidValue` if the checkpoint lacks the prediction layer that the proposer needs."""
    if not config.num_nextn_predict_layers and _OF_THE_CHECKPOINT & set(speculate.split("+")):
        raise InvalidValue(
            f"{speculate}: the checkpoint has no multi-token-prediction layer (num_nextn_predict_layers is 0)",
            cure="choose another proposer, as ngram, or a checkpoint that has one",
            argument="--speculate",
        )


def check_acceptance(acceptance: str, speculate: str) -> None:
    """Raise :class:`InvalidValue` for an unknown acceptance rule, or one without a proposer."""
    if acceptance not in ("exact", REJECTION):
        raise InvalidValue(f"{acceptance!r}", cure=f"give exact or {REJECTION}", argument="--acceptance")
    if acceptance == REJECTION and speculate == NONE:
        cure = "leave it out, or name a proposer with --speculate"
        raise InvalidValue("there are no drafts to accept", cure=cure, argument="--acceptance")


def no_drafts(why: str) -> InvalidValue:
    """Return the error for ``--drafts`` if the Paddle model runs without a proposer. ``why``: the reason why it runs,
    if the user did not ask for it."""
    what = f"the Paddle model runs{f', as {why}' if why else ''}, and nothing drafts for it"
    cure = "name a proposer with --speculate, or a --runner that drafts on the device"
    return InvalidValue(what, cure=cure, argument="--drafts")


def refused_with_runner(speculate: str, runner: str = "") -> InvalidValue:
    """Return the refusal of a proposer beside a named runner, or beside ``runner``, which runs by default."""
    what = f"{speculate} drafts beside the Paddle model"
    cure = "leave it out: with --drafts K a runner drafts for itself"
    if runner:
        what, cure = f"{what}, and runner {runner} runs on this device", f"{cure}; or add --runner paddle"
    return InvalidValue(what, cure=cure, argument="--speculate")
