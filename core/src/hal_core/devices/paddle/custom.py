"""A device for any Paddle CustomDevice: a plugin says its name, Paddle's name of the type, and little else.

    class NpuPlugin(CustomDevicePlugin):
        name = "npu"
        kind = "npu"
        cure = "install paddlepaddle and paddle-custom-npu"

Its module imports the standard library alone, as a plugin class must.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ...contract.device import Probe
from . import probing
from .plugins import PaddlePlugin

if TYPE_CHECKING:
    from ...contract.device import Device
    from ...contract.support import Support


class CustomDevicePlugin(PaddlePlugin):
    """Derive from it, and say its ``kind``.

    What stands in (``stand_ins``) is a simulated accelerator that shows itself to Paddle under any type name. Its
    module has ``paddle_env.announce(kind)``, ``paddle_env.distributed(rank, endpoints, master, kind)``,
    ``set_option(name, value)`` and ``Stream.adopt(handle).held()``.
    """

    collective: ClassVar[str] = "xccl"

    @classmethod
    def probe_build(cls, paddle: probing.Installed) -> Probe:
        """Look for a CustomDevice library. Its file need not bear the name of the type, which Paddle learns from it."""
        libraries = probing.custom_device_libraries(paddle)
        if not libraries:
            build = f"Paddle {paddle.version} (built for {paddle.build})"
            return Probe.no(f"{build} has no CustomDevice library, so no {cls.kind}", cls.cure)
        which = " or ".join(libraries)
        return Probe.yes(f"Paddle {paddle.version} loads {which}; that it brings {cls.kind} is checked when opened")

    @classmethod
    def chips(cls) -> int:
        """The devices of its type that Paddle sees."""
        from .places import paddle_core

        return int(paddle_core().get_custom_device_count(cls.kind))

    @classmethod
    def make(cls, index: int, options: Mapping[str, object]) -> Device:
        """The device; a plugin with more to say overrides this."""
        from .custom_device import CustomDevice

        return CustomDevice(cls, index, options)

    @classmethod
    def support(cls) -> Support:
        """For the conformance kit; the entry point in ``hal.conformance`` says ``my_plugin:MyPlugin.support``."""
        from .conformance import PaddleSupport, SimulatedRanks

        module = cls.stand_ins.get(cls.substituted(), "")
        return SimulatedRanks(module, cls.kind) if module and cls.collective else PaddleSupport()
