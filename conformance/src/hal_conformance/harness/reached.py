"""Coverage of a test: named classes of sizes or values, counted, so that an unchecked class is noticed."""

from __future__ import annotations

from collections.abc import Iterable


class Reached:
    """Counts the examples of each class. :meth:`check` fails for a class without any."""

    def __init__(self, classes: Iterable[str]) -> None:
        self.counts = dict.fromkeys(classes, 0)

    def note(self, name: str) -> None:
        """Count one example of a class, which must have been named."""
        assert name in self.counts, f"the test met {name!r}, which is none of {[*self.counts]}"
        self.counts[name] += 1

    def check(self) -> None:
        """Assert that every class has an example."""
        __tracebackhide__ = True
        missed = [name for name, count in self.counts.items() if not count]
        assert not missed, f"the test has not reached {missed}, so these are unchecked (counts: {self.counts})"


PAST = {"past 8 bits": 1 << 8, "past 16 bits": 1 << 16, "past 20 bits": 1 << 20, "past 24 bits": 1 << 24}
"""Counts of bytes, elements or slots that are too large for a number of so many bits."""


def past(number: int) -> list[str]:
    """Return the classes of :data:`PAST` that contain a number."""
    return [name for name, least in PAST.items() if number >= least]
