"""Proposers: they draft a request's next tokens, so that one step can verify several of them.

A draft costs time and never changes a request's tokens. The worker draws each token as it does without a proposer, and
keeps the drafts that equal its own draws.
"""

from __future__ import annotations

from .loading import NONE, check_names, make_proposer
from .proposer import Drawn, Fed, Proposer, Setup
from .room import draft_room

__all__ = [
    "NONE",
    "Drawn",
    "Fed",
    "Proposer",
    "Setup",
    "check_names",
    "draft_room",
    "make_proposer",
]
