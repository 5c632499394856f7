"""Output of ``hal --version``, from metadata alone."""

from __future__ import annotations

import platform
from importlib import metadata

from hal import __version__, contract
from hal.contract import CORE, normalized
from hal.discovery import identity


def lines() -> list[str]:
    """Return the versions of hal, the contract, Python, and every installed build of Paddle."""
    return [
        f"hal {__version__}",
        f"contract {contract.contract_version()} ({CORE} {metadata.version(CORE)})",
        f"python {platform.python_version()}",
        f"paddle {_paddle()}",
    ]


def _paddle() -> str:
    """Return the installed builds of Paddle. Each installs the same ``paddle`` package, so two at once are a fault to
    show."""
    builds = set()
    for dist in metadata.distributions():
        who = identity(dist)
        if who and normalized(who[0]).startswith("paddlepaddle"):
            builds.add(f"{who[1]} ({who[0]})")
    return ", ".join(sorted(builds)) or "not installed"
