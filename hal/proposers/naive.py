"""Naive: no drafts. Every step goes the way of steps that verify some, so that it can be told from none at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .proposer import Fed, Int64s, Setup

if TYPE_CHECKING:
    from hal_core import AdmittedRequest


class Naive:
    """The proposer that knows nothing."""

    wants_hidden = False

    def __init__(self, setup: Setup) -> None:
        pass

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """Nothing is kept."""

    def observe(self, fed: Fed) -> None:
        """Nothing is kept."""

    def propose(self, room: Mapping[int, int]) -> dict[int, list[int]]:
        """No drafts."""
        return {}

    def leave(self, slot: int, *, finished: bool) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""
