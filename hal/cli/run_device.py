"""What ``hal run`` says of the device that it runs on: which it is, what stands in for it, and what falls back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Able(Protocol):
    """What is said of a device's abilities."""

    @property
    def substituted(self) -> str: ...

    @property
    def fallbacks(self) -> Mapping[str, str]: ...


class Named(Protocol):
    """A device by name and abilities: one that is opened here, or the one that all ranks have opened."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Able: ...


DeviceFacts = dict[str, Any]
"""``name``, ``substituted`` ("" where nothing stands in), and ``fallbacks``, hook to reason."""


def facts_of(device: Named) -> DeviceFacts:
    """What each JSON object says of the device."""
    able = device.capabilities
    return {"name": device.name, "substituted": able.substituted, "fallbacks": dict(able.fallbacks)}


def where(device: Named, place: str, *, no_overlap: str = "", why_paddle: str = "") -> str:
    """The same in the line that sums a run up: what falls back, why steps did not overlap, why ``auto`` took the Paddle
    model, the device with its stand-in, and the runner or the place of the model."""
    by_reason: dict[str, list[str]] = {}
    for hook, reason in device.capabilities.fallbacks.items():
        by_reason.setdefault(" ".join(reason.split()), []).append(hook)
    told = [f"{' and '.join(hooks)} fall{'s' * (len(hooks) == 1)} back: {why}" for why, hooks in by_reason.items()]
    apart = [f"steps do not overlap: {no_overlap}"] if no_overlap else []
    apart += [f"runner paddle, as {why_paddle}"] if why_paddle else []
    return "; ".join([*told, *apart, f"device {device.name}, {place}"])
