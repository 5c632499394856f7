"""Counts of a device's work, which tests assert instead of times."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Counters:
    """A snapshot of one opened device's counts since it was opened.

    - ``submissions``: copies plus kernel launches given to the device for write plans.
    - ``uploads``, ``launches``: the two parts of ``submissions``.
    - ``copies_out``: device-to-host copies submitted.
    - ``collectives``: collective calls submitted.
    - ``host_waits``: times the host waited for the device inside a hook or primitive.
    - ``ring_waits``: of these, waits for the oldest staging block because the ring was full (G3).
    - ``fallbacks``: calls served by a fallback named in ``capabilities.fallbacks`` (G7).
    - ``allocations``: device allocations.
    """

    submissions: int = 0
    uploads: int = 0
    launches: int = 0
    copies_out: int = 0
    collectives: int = 0
    host_waits: int = 0
    ring_waits: int = 0
    fallbacks: int = 0
    allocations: int = 0

    def __sub__(self, earlier: Counters) -> Counters:
        """Return the counts between two snapshots."""
        return Counters(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})
