"""Text from a model: ``generate`` in the caller's process, ``AsyncEngine`` with a process for asyncio."""

from __future__ import annotations

from hal_engine.distributed.ranks import Ranks

from .async_engine import AsyncEngine, QueueFull
from .local import generate
from .streams import Part

__all__ = ["AsyncEngine", "Part", "QueueFull", "Ranks", "generate"]
