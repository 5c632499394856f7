"""Proposers: what guesses the tokens that a request goes on with, so that one step can verify several of them.

A guess costs time and never changes what a request is given: the worker draws each token as it does without a proposer,
and keeps of the drafts what equals its own draws.
"""

from __future__ import annotations

from .loading import NONE, check_names, make_proposer
from .proposer import Drawn, Fed, HandsOver, Proposer, Setup, handing_over
from .room import draft_room

__all__ = [
    "NONE",
    "Drawn",
    "Fed",
    "HandsOver",
    "Proposer",
    "Setup",
    "check_names",
    "draft_room",
    "handing_over",
    "make_proposer",
]
