"""The engine's side of the output path: it reads and acknowledges records, and reports losses."""

from __future__ import annotations

from hal_engine.reading.events import Event, FrameSkipped, Gap, SessionEnded, SessionLost, SessionStarted, StreamLoss
from hal_engine.reading.reader import OutputReader

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
