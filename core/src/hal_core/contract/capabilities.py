"""Capabilities of a device; the core asks for a capability, never for a device's name (G27)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from ..errors import CapabilityMissing, InvalidValue

HOOKS = ("broadcast_tokens", "save_output", "async_set_value", "insert_tasks")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of one opened device.

    The guarantee of a capability that a device declares is binding; the conformance kit checks each.

    - ``async_h2d``: host-to-device writes return before the device has executed them (G3).
    - ``async_d2h``: copies out return before the device has executed them (G23).
    - ``fused_scatter``: a whole write plan is at most two submissions a staging block (G10).
    - ``pinned_host``: staging memory is page-locked.
    - ``can_hold_stream``: ``hold_stream(stream)`` blocks a stream until released, for tests with latches.
    - ``collective``: the name of the collective library, or "" if several ranks are not supported.
    - ``fallbacks``: hook name to reason, for each hook that is slower here than the contract's best implementation.
    - ``substituted``: the name of the place that replaces missing hardware, or "".
    - ``async_update``: ``update_inputs`` runs on the stream without the host, which may prepare the next step meanwhile
      (G28).
    - ``several_memories``: one plan writes any number of memories (``device.write``), since kernels take addresses. If
      false, each memory has a plan of its own.
    - ``timed_events``: ``timed_event(stream)`` gives events with the device's time; if false, None.
    """

    async_h2d: bool
    async_d2h: bool
    fused_scatter: bool
    pinned_host: bool
    can_hold_stream: bool
    collective: str
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    substituted: str = ""
    async_update: bool = False
    several_memories: bool = False
    timed_events: bool = False

    def __post_init__(self) -> None:
        unknown = [hook for hook in self.fallbacks if hook not in HOOKS]
        if unknown:
            raise InvalidValue(
                f"fallbacks contain names that are not hooks: {unknown}",
                cure=f"use {', '.join(HOOKS)}",
                argument="fallbacks",
            )
        if not self.async_h2d and not self.fallbacks.get("async_set_value"):
            raise InvalidValue(
                "async_h2d is false, but no reason is given",
                cure='put the reason into fallbacks["async_set_value"] (G7)',
                argument="fallbacks",
            )
        object.__setattr__(self, "fallbacks", MappingProxyType(dict(self.fallbacks)))

    def check(self, require: Mapping[str, str | bool], device: str) -> None:
        """Check requirements: ``require`` maps a hook to "async", which one with a fallback does not fulfil, or "sync",
        which all do, or a capability to its value.

        Raises :class:`CapabilityMissing` with the device's own reason, or :class:`InvalidValue` for an unknown key.
        """
        abilities = {f.name for f in fields(self)} - {"fallbacks"}
        for key, wanted in require.items():
            if key in HOOKS:
                self._check_hook(key, wanted, device)
            elif key not in abilities:
                known = sorted([*HOOKS, *abilities])
                raise InvalidValue(
                    f"unknown requirement {key!r}", cure=f"known: {', '.join(known)}", argument="require"
                )
            elif getattr(self, key) != wanted:
                raise CapabilityMissing(
                    f"needs {key} = {wanted!r}, has {getattr(self, key)!r}",
                    cure="drop the requirement or choose another device (hal devices --open)",
                    device=device,
                    argument="require",
                )

    def _check_hook(self, hook: str, wanted: str | bool, device: str) -> None:
        if wanted not in ("async", "sync"):
            raise InvalidValue(
                f"{hook} = {wanted!r}", cure='a hook can be required "async" or "sync"', argument="require"
            )
        if wanted == "async" and hook in self.fallbacks:
            raise CapabilityMissing(
                f"{hook} is required to be asynchronous, but: {self.fallbacks[hook]}",
                cure="drop the requirement or choose another device (hal devices --open)",
                device=device,
                hook=hook,
                argument="require",
            )
