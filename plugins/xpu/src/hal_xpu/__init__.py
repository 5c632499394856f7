"""The xpu device of hal (Kunlun chips). The plugin class imports the standard library alone.

``HAL_XPU_PLACE=cpu`` or ``sim`` declares a substitution: the same code on Paddle's CPU place or on the simulated
accelerator. The device then calls itself ``xpu (substituted: cpu)``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hal_core.device import Plugin, Probe
from hal_core.errors import Unavailable
from hal_core.paddle import probing

if TYPE_CHECKING:
    from .device import XpuDevice

PLACE = "HAL_XPU_PLACE"
XPU_RUNTIME = "xpu_xre"
"""The library by which Paddle's version file shows a build for XPU (``xpu_xre_version``)."""
SUBSTITUTES = ("cpu", "sim")
CURE = f"install a Paddle that is built for XPU (paddlepaddle-xpu), or run the same code without the chip: {PLACE}=cpu"


class XpuPlugin(Plugin):
    """The entry point ``xpu`` of group ``hal.devices``; selected by name only."""

    name = "xpu"
    priority = -1

    @classmethod
    def probe(cls) -> Probe:
        """Look for a Paddle built for XPU, in its files; the chip itself is looked for by ``open``."""
        substitute = os.environ.get(PLACE, "")
        if substitute and substitute not in SUBSTITUTES:
            return Probe.no(f"{PLACE}={substitute} names no substitute", f"{PLACE}=cpu or sim, or unset it")
        paddle = probing.installed()
        if paddle is None:
            return Probe.no(probing.NO_PADDLE, CURE)
        if substitute:
            return Probe.yes(f"substituted: {substitute} ({PLACE}), no XPU is used")
        if XPU_RUNTIME not in paddle.parts:
            return Probe.no(f"Paddle {paddle.version} is built for {paddle.build}, not for XPU", CURE)
        return Probe.yes(f"Paddle {paddle.version} for XPU (not verified on the chip)")

    @classmethod
    def open(cls, index: int, options: Mapping[str, object]) -> XpuDevice:
        """Open XPU ``index``. Options: ``ring_start``, ``ring_limit`` (bytes), ``deadline`` (seconds)."""
        found = cls.probe()
        if not found.available:
            raise Unavailable(found.reason, cure=found.cure, device="xpu")
        from .device import XpuDevice

        return XpuDevice(index, options, os.environ.get(PLACE, ""))
