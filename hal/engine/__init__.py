"""The engine: takes requests, decides what each step of a worker does, and says how each request ended.

``BlockPool`` owns the KV blocks, ``Scheduler`` makes the decisions (it needs no device), an ``Executor`` runs the
steps, and ``Engine`` stands in front of all.
"""

from __future__ import annotations

from .blocks import BlockPool
from .engine import Engine
from .executor import Executor
from .generation import Finished, tokens_to_keep
from .scheduler import Scheduler

__all__ = ["BlockPool", "Engine", "Executor", "Finished", "Scheduler", "tokens_to_keep"]
