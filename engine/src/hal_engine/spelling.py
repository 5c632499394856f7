"""The name that a mistyped one was meant to be. Imports nothing of hal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

_SHORT, _LONG = 5, 64
"""Names of at most so many characters may differ in one and mean another thing (``top_k``, ``top_p``), unless two are
in another order; longer than the second number is no name."""


def meant(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` spells in another way (``maxTokens``, ``max-tokens``, ``max_token``) or with
    one slip of a finger (``temprature``); None if there is none, or more than one."""
    if len(name) > _LONG:
        return None
    names = [*known]
    found = [one for one in names if _folded(one) == _folded(name)]
    if not found:
        found = [one for one in names if _one_slip(one, name) and (len(name) > _SHORT or sorted(one) == sorted(name))]
    return found[0] if len(found) == 1 else None


def _folded(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower())).removesuffix("s")


def _one_slip(one: str, other: str) -> bool:
    """Return whether two names differ in one character more, less or else, or in two neighbours' order."""
    if abs(len(one) - len(other)) > 1:
        return False
    same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])
    one, other = one[same:], other[same:]
    swapped = one[:2] == other[1::-1] and one[2:] == other[2:]
    return one[1:] == other[1:] or one[1:] == other or one == other[1:] or swapped
