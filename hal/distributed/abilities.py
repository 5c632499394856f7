"""What ranks say of themselves at their start: what their device is, and what all of them must hold equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ALL_TOKENS = 1 << 31
"""A vocabulary without an end: token ids are int32."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the ranks' device is: its name, hook to reason for what falls back, and what stands in for it, or ""."""

    name: str
    fallbacks: Mapping[str, str]
    substituted: str
    indices: tuple[int, ...] = ()
    """Which device of its host each rank has."""
    overlap: bool = False
    no_overlap: str = ""
    """Whether steps overlap, and why not where that would be said."""
    vocab_size: int = ALL_TOKENS
    """The runners' token ids go from 0 to this number less one."""

    @property
    def capabilities(self) -> Abilities:
        """As of an opened device."""
        return self


def difference(facts: Mapping[int, Mapping[str, str]]) -> str:
    """In words how ranks (number to label to text) differ, by the first label that does; "" where all are equal."""
    first = facts[0]
    for rank in sorted(facts):
        for label in {**first, **facts[rank]}:
            ours, theirs = first.get(label, "nothing"), facts[rank].get(label, "nothing")
            if ours != theirs:
                return f"the ranks differ in their {label}: rank 0 has {_short(ours)}, rank {rank} {_short(theirs)}"
    return ""


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:16]}…"
