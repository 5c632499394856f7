"""The worker: one rank's part of a step, with the model between the four hooks."""

from __future__ import annotations

from .runner import Model, ModelRunner
from .worker import Worker

__all__ = ["Model", "ModelRunner", "Worker"]
