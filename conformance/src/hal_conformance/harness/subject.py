"""What is tested, and how another process finds the same."""

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
    """What is tested: how to open a new device of it, under which policy, and what its plugin tells the kit."""

    name: str
    open: Callable[[], Device]
    support: Support
    policy: Policy | None = None
    origin: str = ""
    undo: Callable[[], None] = lambda: None
    recipe: Recipe | None = None
    """How another process finds the same; None where it cannot."""


@dataclass(frozen=True)
class Recipe:
    """The arguments of ``opening.subject``, which may be pickled, so that a rank opens what the kit has opened."""

    name: str = ""
    factory: str = ""
    policy: str = ""
    liar: str = ""
    fault: str = ""
    target: str = ""
