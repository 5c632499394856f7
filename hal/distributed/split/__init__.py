"""A prefill/decode split: an engine with workers of two roles, between which requests move with their blocks."""

from __future__ import annotations

from .engine import SplitEngine
from .worker import SplitWorker

__all__ = ["SplitEngine", "SplitWorker"]
