"""Text from a model: ``generate`` in the caller's process, ``AsyncEngine`` with a process for asyncio."""

from __future__ import annotations

from hal_engine.options import Ranks
from hal_engine.streams import Part

from .async_engine import AsyncEngine, QueueFull
from .local import generate

__all__ = ["AsyncEngine", "Part", "QueueFull", "Ranks", "generate"]
