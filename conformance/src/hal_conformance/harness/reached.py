"""What a test has to reach: named classes of sizes or values, counted, so that none goes unchecked unnoticed."""

from __future__ import annotations

from collections.abc import Iterable


class Reached:
    """Counts how often each class was met. :meth:`check` fails for one that was not, whatever was drawn or skipped."""

    def __init__(self, classes: Iterable[str]) -> None:
        self.counts = dict.fromkeys(classes, 0)

    def note(self, name: str) -> None:
        """Count one example of a class, which must have been named."""
        assert name in self.counts, f"the test met {name!r}, which is none of {[*self.counts]}"
        self.counts[name] += 1

    def check(self) -> None:
        """Every class was met."""
        __tracebackhide__ = True
        missed = [name for name, count in self.counts.items() if not count]
        assert not missed, f"the test has not reached {missed}, so it says nothing of them (counts: {self.counts})"


PAST = {"past 8 bits": 1 << 8, "past 16 bits": 1 << 16, "past 20 bits": 1 << 20, "past 24 bits": 1 << 24}
"""Counts of bytes, elements or slots that are too large for a number of so many bits."""


def past(number: int) -> list[str]:
    """The classes of :data:`PAST` that a number is in."""
    return [name for name, least in PAST.items() if number >= least]
