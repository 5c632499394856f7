"""The type of a guard, for the tables of guards."""

from __future__ import annotations

from dataclasses import dataclass

CORE = "core/src/hal_core/"
QUEUED = "queued_device:queued"
"""The asynchronous example device, by conformance/tests."""


@dataclass(frozen=True)
class Guard:
    """``fragment`` of ``file`` is the guard, ``replacement`` the code without it; ``tests`` must then fail."""

    name: str
    guarantee: str
    file: str
    fragment: str
    replacement: str
    tests: tuple[str, ...]
    device: str = "cpu"
