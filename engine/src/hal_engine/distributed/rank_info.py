"""Facts about ranks at their start: each rank's device, and values that must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

ALL_TOKENS = 1 << 31
"""Vocabulary without a bound: token ids are int32."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The ranks' device: its name, the reason of each hook's fallback, and the name of its stand-in, or ""."""

    name: str
    fallbacks: Mapping[str, str]
    substituted: str
    indices: tuple[int, ...] = ()
    """Index of each rank's device on its host."""
    overlap: bool = False
    no_overlap: str = ""
    """Whether steps overlap, and the reason why not if it is worth showing."""
    vocab_size: int = ALL_TOKENS
    """Vocabulary size of the runners."""
    chunk: int | None = None
    supports: Collection[str] = ()
    """Of the first rank's runner: the most prompt tokens of a step that it prefers, and the parameters that it has."""

    @property
    def capabilities(self) -> RankInfo:
        """Return the facts of an opened device."""
        return self


def difference(facts: Mapping[int, Mapping[str, str]]) -> str:
    """Return how ranks (number to label to text) differ, by the first label that differs; "" if all are equal."""
    first = facts[0]
    for rank in sorted(facts):
        for label in {**first, **facts[rank]}:
            ours, theirs = first.get(label, "nothing"), facts[rank].get(label, "nothing")
            if ours != theirs:
                return f"the ranks differ in their {label}: rank 0 has {_short(ours)}, rank {rank} {_short(theirs)}"
    return ""


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:16]}…"
