"""The engine: takes requests, decides what each step of a worker does, and says how each request ended.

``BlockPool`` owns the KV blocks, ``Scheduler`` makes the decisions (it needs no device), ``Engine`` drives a worker.
"""

from __future__ import annotations

from .blocks import BlockPool
from .engine import Engine
from .generation import Finished, tokens_to_keep
from .scheduler import Scheduler

__all__ = ["BlockPool", "Engine", "Finished", "Scheduler", "tokens_to_keep"]
