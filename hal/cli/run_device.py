"""What ``hal run`` says of the device that it runs on: which it is, what stands in for it, and what falls back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal_core import BoundDevice

DeviceFacts = dict[str, Any]
"""``name``, ``substituted`` ("" where nothing stands in), and ``fallbacks``, hook to reason."""


def facts_of(device: BoundDevice) -> DeviceFacts:
    """What each JSON object says of the device."""
    able = device.capabilities
    return {"name": device.name, "substituted": able.substituted, "fallbacks": dict(able.fallbacks)}


def described(device: BoundDevice) -> Sequence[str]:
    """One line for a device of which there is something to know; its name tells what stands in for it."""
    able = device.capabilities
    by_reason: dict[str, list[str]] = {}
    for hook, reason in able.fallbacks.items():
        by_reason.setdefault(" ".join(reason.split()), []).append(hook)
    told = [f"{' and '.join(hooks)} fall{'s' * (len(hooks) == 1)} back: {why}" for why, hooks in by_reason.items()]
    return ["; ".join([f"device {device.name}", *told])] if told or able.substituted else []
