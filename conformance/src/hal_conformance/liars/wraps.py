"""Liars about the ends of free room in the staging ring: spans that reach into the oldest one by a few bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import Patch, liar
from .proxies import RING

SLACK = 256
"""Bytes by which a span may reach into the oldest one: one unit of the ring."""


def place(segment: Any, nbytes: int, wrapped: int, behind: int) -> int | None:  # noqa: ANN401 (a Segment)
    """Return where a span is put, with so much slack at the wrap and behind the newest span."""
    if not segment.entries:
        segment.head = 0
        return 0 if nbytes <= segment.size else None
    oldest = segment.entries[0][0]
    if segment.head > oldest:
        if segment.head + nbytes <= segment.size:
            return int(segment.head)
        return 0 if nbytes <= oldest + wrapped else None
    return segment.head if segment.head + nbytes <= oldest + behind and segment.head != oldest else None


@liar(2, "the ring wraps into its oldest span by a few bytes", requires=RING)
class WrapsIntoTheOldest(Patch):
    """An off-by-one in the comparison at the wrap."""

    seam = "place of a span"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Allow one unit too many."""
        return lambda segment, nbytes: place(segment, nbytes, SLACK, 0)


@liar(2, "a span behind the newest reaches into the oldest by a few bytes", requires=RING)
class RunsIntoTheOldest(Patch):
    """The same, once the ring has wrapped."""

    seam = "place of a span"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Allow one unit too many."""
        return lambda segment, nbytes: place(segment, nbytes, 0, SLACK)
