"""The subject of a test run, and a recipe for other processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core.contract.support import Support

if TYPE_CHECKING:
    from hal_core.contract.device import Device
    from hal_core.runtime.policy import Policy


@dataclass(frozen=True)
class Subject:
    """The device under test: a function that opens it, its policy, and its plugin's support for the kit."""

    name: str
    open: Callable[[], Device]
    support: Support
    policy: Policy | None = None
    origin: str = ""
    undo: Callable[[], None] = lambda: None
    recipe: Recipe | None = None
    """For another process to open the same; None if that is impossible."""


@dataclass(frozen=True)
class Recipe:
    """The picklable arguments of ``opening.subject``, with which a rank opens the kit's device."""

    name: str = ""
    factory: str = ""
    policy: str = ""
    liar: str = ""
    fault: str = ""
    target: str = ""
