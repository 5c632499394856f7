"""Checks of a device that is bound: each hook once, with the contract's parameters, and no default that breaks G3."""

from __future__ import annotations

from functools import cached_property
from inspect import getattr_static, signature
from typing import TYPE_CHECKING, Any

import pluggy

from ..contract import hookspecs
from ..devices.base import DeviceBase
from ..errors import PluginError

if TYPE_CHECKING:
    from ..contract.device import Device


class HookManager(pluggy.PluginManager):
    """A hook manager that looks for hooks among a device's methods only and calls no property."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:  # noqa: ANN401 (pluggy's options, or None)
        """Skip properties, which pluggy 1.6 would call. One may wait for the device, import a framework, or raise."""
        if isinstance(getattr_static(plugin, name, None), property | cached_property):
            return None
        return super().parse_hookimpl_opts(plugin, name)


def check_implementation(manager: pluggy.PluginManager, hook: str, device: str) -> None:
    """Raise :class:`PluginError` naming the hook and its fault."""
    found = getattr(manager.hook, hook).get_hookimpls()
    if len(found) != 1:
        raise PluginError(
            f"{len(found)} implementations of the hook",
            cure="mark exactly one method with hookimpl",
            device=device,
            hook=hook,
        )
    (implementation,) = found
    if implementation.hookwrapper or implementation.wrapper:
        raise PluginError("a device may not wrap hooks", cure="implement the hook itself", device=device, hook=hook)
    wanted = list(signature(getattr(hookspecs, hook)).parameters)
    has = signature(implementation.function).parameters
    if list(has) != wanted or any(p.default is not p.empty for p in has.values()):
        raise PluginError(
            f"takes ({', '.join(map(str, has.values()))})",
            cure=f"the contract is ({', '.join(wanted)}), without defaults",
            device=device,
            hook=hook,
        )


def check_copies(device: Device, name: str) -> None:
    """Raise :class:`PluginError` if ``async_h2d`` is declared and ``copy_within`` is the default, which waits (G3)."""
    if device.capabilities.async_h2d and getattr(type(device), "copy_within", None) is DeviceBase.copy_within:
        raise PluginError(
            "async_h2d is declared, but copy_within is the default of hal_core, which waits for the device (G3)",
            cure="write copy_within(target, value, stream), a copy in stream order (docs/adding-a-device.md)",
            device=name,
        )
