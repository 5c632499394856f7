"""Engine: accepts requests, schedules a worker's steps, and reports how each request ended.

``BlockPool`` owns the KV blocks, ``Scheduler`` makes the decisions (without a device), an ``Executor`` runs the steps,
and ``Engine`` is the front of all.
"""

from __future__ import annotations

from .blocks import BlockPool
from .engine import Engine
from .executor import Executor
from .generation import Finished, tokens_to_keep
from .scheduler import DEFAULT_CHUNK, Limits, Scheduler

__all__ = ["DEFAULT_CHUNK", "BlockPool", "Engine", "Executor", "Finished", "Limits", "Scheduler", "tokens_to_keep"]
