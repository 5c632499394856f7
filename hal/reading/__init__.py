"""The engine's side of the output path: read records, acknowledge them, learn of what was lost."""

from __future__ import annotations

from hal.reading.events import Event, FrameSkipped, Gap, SessionEnded, SessionLost, SessionStarted, StreamLoss
from hal.reading.reader import OutputReader

__all__ = [
    "Event",
    "FrameSkipped",
    "Gap",
    "OutputReader",
    "SessionEnded",
    "SessionLost",
    "SessionStarted",
    "StreamLoss",
]
