"""Naive: no drafts. Steps run like verifying ones, to compare them with steps without a proposer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .proposer import Fed, Int64s, Setup

if TYPE_CHECKING:
    from hal_core import AdmittedRequest


class Naive:
    """The proposer without drafts."""

    wants_hidden = False

    def __init__(self, setup: Setup) -> None:
        pass

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """Ignore the request."""

    def observe(self, fed: Fed) -> None:
        """Ignore the step."""

    def propose(self, room: Mapping[int, int]) -> dict[int, list[int]]:
        """Return no drafts."""
        return {}

    def leave(self, slot: int, *, finished: bool) -> None:
        """Return at once."""

    def close(self) -> None:
        """Return at once."""
