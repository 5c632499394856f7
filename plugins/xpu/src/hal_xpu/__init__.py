"""The xpu device of hal (Kunlun chips). The plugin class imports the standard library alone.

``HAL_XPU_PLACE=cpu`` or ``sim`` declares a substitution: the same code on Paddle's CPU place or on the simulated
accelerator. The device is then named ``xpu (substituted: cpu)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from hal_core import Probe
from hal_core.devices import Installed
from hal_paddle import PaddlePlugin

if TYPE_CHECKING:
    from .device import XpuDevice

XPU_RUNTIME = "xpu_xre"
"""The library in Paddle's version file that indicates a build for XPU (``xpu_xre_version``)."""


class XpuPlugin(PaddlePlugin):
    """The entry point ``xpu`` of group ``hal.devices``; selected by name only."""

    name = "xpu"
    kind = "xpu"
    stand_ins: ClassVar[Mapping[str, str]] = {"cpu": "", "sim": "hal_sim"}
    cure = (
        "install a Paddle that is built for XPU (paddlepaddle-xpu), "
        "or run the same code without the chip: HAL_XPU_PLACE=cpu"
    )

    @classmethod
    def probe_build(cls, paddle: Installed) -> Probe:
        """Require a build for XPU."""
        if XPU_RUNTIME not in paddle.parts:
            return Probe.no(f"Paddle {paddle.version} is built for {paddle.build}, not for XPU", cls.cure)
        return Probe.yes(f"Paddle {paddle.version} for XPU (not verified on the chip)")

    @classmethod
    def chips(cls) -> int:
        """Return the number of XPUs in Paddle."""
        from hal_paddle.places import paddle_core

        return int(paddle_core().get_xpu_device_count())

    @classmethod
    def make(cls, index: int, options: Mapping[str, object]) -> XpuDevice:
        """Return the XPU, or its substitute."""
        from .device import XpuDevice

        return XpuDevice(index, options)
