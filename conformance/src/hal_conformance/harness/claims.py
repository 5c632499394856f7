"""What a run had to take on trust: claims that nothing outside the plugin can check, and allowances made for it.

A test, a fixture or the opening of the device notes them; the report has them under their guarantee, and its verdict
becomes "conforms, but for …". Noted twice, a claim is there once.
"""

from __future__ import annotations

from dataclasses import dataclass

UNCHECKED, ALLOWED = "not checked", "allowed"


@dataclass(frozen=True)
class Claim:
    """One line of the report. ``kind``: :data:`UNCHECKED` or :data:`ALLOWED`; ``cure``: how it becomes checkable."""

    guarantee: int
    kind: str
    text: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" + (f" ({self.cure})" if self.cure else "")


CLAIMS: dict[Claim, None] = {}
"""Those of this process's run, in the order in which they were noted; a new run of pytest empties it."""


def note_unchecked(guarantee: int, claim: str, cure: str) -> None:
    """Note that ``claim`` ("raises_faults: no primitive reports an error late") is the plugin's own word for a
    guarantee, and the ``cure`` ("give probe_counts()")."""
    CLAIMS[Claim(guarantee, UNCHECKED, claim, cure)] = None


def note_allowance(guarantee: int, text: str) -> None:
    """Note what the kit forgives ("keeps: 3 small blocks a call, at most 8")."""
    CLAIMS[Claim(guarantee, ALLOWED, text)] = None
