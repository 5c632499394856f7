"""The worker: one rank's part of a step, the model between the four hooks."""

from __future__ import annotations

from .worker import Model, Worker

__all__ = ["Model", "Worker"]
