"""A prefill/decode split: workers of two roles, between which requests move with their blocks."""

from __future__ import annotations

from .migration import Migration

__all__ = ["Migration"]
