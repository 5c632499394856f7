"""Steps: runners of any framework, and the four hooks around them.

``Runner`` is the engine's interface to a model. ``Stepper`` puts a runner's steps on the device without waiting for
them. ``overlap_of`` returns whether the host may continue while a step runs. No framework is imported here.
"""

from __future__ import annotations

from .acceptance import Acceptance
from .async_loop import AsyncLoop
from .loading import (
    AUTO,
    DEFAULT,
    check_drafts,
    check_dtype,
    check_runner_name,
    check_runs,
    choose_runner,
    make_runner,
    needs_host,
    title_of,
)
from .overlap import OVERLAPS, check_overlap, overlap_of
from .runner import HostRunner, KeepsBlocks, Runner, RunnerSetup
from .step_plan import PlannedStep
from .stepper import Launched, Stepper

__all__ = [
    "AUTO",
    "DEFAULT",
    "OVERLAPS",
    "Acceptance",
    "AsyncLoop",
    "HostRunner",
    "KeepsBlocks",
    "Launched",
    "PlannedStep",
    "Runner",
    "RunnerSetup",
    "Stepper",
    "check_drafts",
    "check_dtype",
    "check_overlap",
    "check_runner_name",
    "check_runs",
    "choose_runner",
    "make_runner",
    "needs_host",
    "overlap_of",
    "title_of",
]
