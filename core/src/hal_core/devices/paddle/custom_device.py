"""The device of :class:`hal_core.devices.CustomDevicePlugin`: asynchronous, on a place of a CustomDevice."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from ...contract.capabilities import Capabilities
from .asynchronous import AsyncPaddleDevice
from .places import custom_place


class CustomKind(Protocol):
    """A kind of CustomDevice: a class derived from :class:`hal_core.devices.CustomDevicePlugin`."""

    kind: str
    cure: str
    collective: str
    stand_ins: Mapping[str, str]

    def shown(self) -> str: ...

    def substituted(self) -> str: ...


class CustomDevice(AsyncPaddleDevice):
    """One place of a CustomDevice, or of the simulated accelerator under its name."""

    def __init__(self, plugin: CustomKind, index: int, options: Mapping[str, object]) -> None:
        self.name, substitute = plugin.shown(), plugin.substituted()
        module = plugin.stand_ins.get(substitute, "")
        simulator: Any = import_module(module) if module else None
        if module:
            import_module(f"{module}.paddle_env").announce(plugin.kind)
        capabilities = Capabilities(
            async_h2d=True,
            async_d2h=True,
            fused_scatter=False,
            pinned_host=False,
            can_hold_stream=bool(substitute),
            collective=plugin.collective,
            fallbacks={} if plugin.collective else {"broadcast_tokens": "no collective library is named"},
            substituted=substitute,
        )
        place = custom_place(self.name, plugin.kind, index, plugin.cure)
        hold = (lambda handle: simulator.Stream.adopt(handle).held()) if module else None
        super().__init__(index, place, options, capabilities, hold)
