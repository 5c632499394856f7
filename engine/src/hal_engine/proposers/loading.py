"""Proposers by name, from the entry-point group ``hal.proposers``: only named ones are imported."""

from __future__ import annotations

import inspect

from hal_core import InvalidValue

from hal.contract import normalized
from hal.discovery import PROPOSERS, SPECULATE, Entry, installed_in, load_and_make, named

from .adaptive import Adaptive
from .guarded import guarded
from .host import Extends
from .hybrid import Hybrid
from .proposer import Proposer, Setup

NONE = "none"
"""No proposer: plain steps."""
_OWN = "paddle-hal-engine"
"""The distribution whose proposers have no guard, which would cost 3 of the 10 to 20 us of a proposal."""
_METHODS = {name for name, value in vars(Proposer).items() if inspect.isfunction(value) and not name.startswith("_")}


def make_proposer(name: str, setup: Setup) -> Proposer | None:
    """Return the proposer with that name, limited to worthwhile drafts; None for ``none``.

    ``first+second`` is the hybrid of two, and more may follow, each after a ``+``. ``hal run`` calls this; a worker may
    have any other proposer.

    :raises InvalidValue: for a name that no installed proposer has, or that two distributions claim, for a second one
        that cannot continue another's drafts, and for zero drafts.
    :raises PluginError: naming the distribution, for one that cannot be imported, is made for another contract, or is
        not a proposer.
    """
    if name == NONE:
        return None
    if setup.max_draft_tokens < 1:
        raise InvalidValue(f"{setup.max_draft_tokens} drafts", cure="give at least 1", argument="--drafts")
    first, *others = [load(part, setup) for part in name.split("+")]
    for part, other in zip(name.split("+")[1:], others, strict=True):
        first = join(first, other, part, setup)
    return Adaptive(first, setup.step_rows, name)


def check_names(name: str) -> None:
    """Raise :class:`InvalidValue` for a name that :func:`make_proposer` would refuse, before anything is loaded."""
    for part in name.split("+") if name != NONE else ():
        _entry(part)


def installed() -> tuple[Entry, ...]:
    """Return every proposer declared by an installed distribution, by name, without importing any."""
    return installed_in(PROPOSERS)


def load(name: str, setup: Setup) -> Proposer:
    """Import and make one proposer. Raises as :func:`make_proposer`."""
    entry = _entry(name)
    return guard(load_and_make(entry, setup), entry, setup)


def guard(proposer: object, entry: Entry, setup: Setup) -> Proposer:
    """Return an entry's object, behind a guard unless it is hal's own. Raises :class:`PluginError` if it is not a
    proposer."""
    missing = sorted(method for method in _METHODS if not callable(getattr(proposer, method, None)))
    if not isinstance(getattr(proposer, "wants_hidden", None), bool):
        missing.append("wants_hidden")
    if missing:
        raise entry.error(f"{entry.target} made {type(proposer).__name__}, which has no {', '.join(missing)}")
    assert isinstance(proposer, Proposer)
    return proposer if normalized(entry.distribution) == _OWN else guarded(proposer, entry, setup)


def _entry(name: str) -> Entry:
    cure = f"name one of them with {SPECULATE}, two or more as first+second, or {NONE}"
    return named(name, installed(), kind="proposer", argument=SPECULATE, cure=cure)


def join(first: Proposer, second: Proposer, name: str, setup: Setup) -> Hybrid:
    """Return two proposers as one, the second called ``name``; the first drafts the first half, rounded up."""
    if not isinstance(second, Extends):
        raise InvalidValue(
            f"{name} cannot go on from another's drafts",
            cure="name one that can, as ngram or suffix, behind the +",
            argument=SPECULATE,
        )
    return Hybrid(first, second, (setup.max_draft_tokens + 1) // 2)


def hybrid(setup: Setup) -> Proposer:
    """Return the proposer called ``hybrid``: MTP, with n-gram where that does better."""
    return join(load("mtp", setup), load("ngram", setup), "ngram", setup)
