"""Proposers by name, from the entry-point group ``hal.proposers``: only what is named is imported."""

from __future__ import annotations

import inspect

from hal_core import InvalidValue

from hal.discovery import PROPOSERS, SPECULATE, Entry, installed_in, load_made, named

from .adaptive import Adaptive
from .hybrid import Hybrid, Second
from .proposer import Proposer, Setup

NONE = "none"
"""No proposer: plain steps."""
_METHODS = {name for name, value in vars(Proposer).items() if inspect.isfunction(value) and not name.startswith("_")}


def make_proposer(name: str, setup: Setup) -> Proposer | None:
    """The proposer of that name, asked for as many drafts as are worth it; None for ``none``.

    ``first+second`` is the hybrid of two. What ``hal run`` calls; a worker may be given any other proposer.

    :raises InvalidValue: for a name that no installed proposer has, or that two distributions claim, for a second one
        that cannot go on from another's drafts, and for no drafts at all.
    :raises PluginError: naming the distribution, for one that does not import, is made for another contract, or is no
        proposer.
    """
    if name == NONE:
        return None
    if setup.max_draft_tokens < 1:
        raise InvalidValue(f"{setup.max_draft_tokens} drafts", cure="give at least 1", argument="--drafts")
    first, *others = [load(part, setup) for part in name.split("+")]
    for other in others:
        first = join(first, other, setup)
    return Adaptive(first, setup.step_rows)


def check_names(name: str) -> None:
    """Raise :class:`InvalidValue` for a name that :func:`make_proposer` would refuse, before anything is loaded."""
    for part in name.split("+") if name != NONE else ():
        _entry(part)


def installed() -> tuple[Entry, ...]:
    """Every proposer that an installed distribution declares, by name. Nothing is imported."""
    return installed_in(PROPOSERS)


def load(name: str, setup: Setup) -> Proposer:
    """Import and make one proposer. Raises as :func:`make_proposer`."""
    entry = _entry(name)
    proposer = load_made(entry, setup)
    missing = sorted(method for method in _METHODS if not callable(getattr(proposer, method, None)))
    if not isinstance(getattr(proposer, "wants_hidden", None), bool):
        missing.append("wants_hidden")
    if missing:
        raise entry.error(f"{entry.target} made {type(proposer).__name__}, which has no {', '.join(missing)}")
    assert isinstance(proposer, Proposer)
    return proposer


def _entry(name: str) -> Entry:
    cure = f"name one of them with {SPECULATE}, two as first+second, or {NONE}"
    return named(name, installed(), kind="proposer", argument=SPECULATE, cure=cure)


def join(first: Proposer, second: Proposer, setup: Setup) -> Hybrid:
    """Two proposers as one; the first is asked for the first half of the drafts, and the odd one."""
    if not isinstance(second, Second):
        raise InvalidValue(
            f"{type(second).__name__} cannot go on from another's drafts",
            cure="name one that can, as ngram or suffix, behind the +",
            argument=SPECULATE,
        )
    return Hybrid(first, second, (setup.max_draft_tokens + 1) // 2)


def hybrid(setup: Setup) -> Proposer:
    """The proposer called ``hybrid``: MTP, with n-gram where that does better."""
    return join(load("mtp", setup), load("ngram", setup), setup)
