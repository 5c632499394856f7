"""A prefill/decode split: workers of two roles, between which requests move with their blocks."""

from __future__ import annotations

from .moves import Bounds, Moves

__all__ = ["Bounds", "Moves"]
