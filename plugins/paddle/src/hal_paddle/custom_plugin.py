"""A device for any Paddle CustomDevice: a plugin gives its name, Paddle's name of the type, and little else.

    class NpuPlugin(CustomDevicePlugin):
        name = "npu"
        kind = "npu"
        cure = "install paddlepaddle and paddle-custom-npu"

Its module imports the standard library alone, as a plugin class must.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hal_core import Probe
from hal_core.devices import Installed

from .plugin import PaddlePlugin

if TYPE_CHECKING:
    from hal_core import Device, Support


class CustomDevicePlugin(PaddlePlugin):
    """Base of plugin classes for CustomDevices; a subclass sets ``kind``.

    A substitute (``stand_ins``) is a simulated accelerator that registers with Paddle under any type name. Its module
    has ``paddle_env.announce(kind)``, ``paddle_env.distributed(rank, endpoints, master, kind)``, ``set_option(name,
    value)`` and ``Stream.adopt(handle).held()``.
    """

    collective: ClassVar[str] = "xccl"

    @classmethod
    def probe_build(cls, paddle: Installed) -> Probe:
        """Look for a CustomDevice library. Its file name need not contain the type's name, which Paddle reads from
        it."""
        libraries = custom_device_libraries(paddle)
        if not libraries:
            build = f"Paddle {paddle.version} (built for {paddle.build})"
            return Probe.no(f"{build} has no CustomDevice library, so no {cls.kind}", cls.cure)
        which = " or ".join(libraries)
        return Probe.yes(
            f"Paddle {paddle.version} loads {which}; whether it provides {cls.kind} is checked when opened"
        )

    @classmethod
    def chips(cls) -> int:
        """Return the number of devices of its type in Paddle."""
        from .places import paddle_core

        return int(paddle_core().get_custom_device_count(cls.kind))

    @classmethod
    def make(cls, index: int, options: Mapping[str, object]) -> Device:
        """Return the device; a plugin with further settings overrides this."""
        from .custom_device import CustomDevice

        return CustomDevice(cls, index, options)

    @classmethod
    def support(cls) -> Support:
        """Return the support for the conformance kit; the entry point in ``hal.conformance`` is
        ``my_plugin:MyPlugin.support``."""
        from .conformance import PaddleSupport, SimulatedRanks

        module = cls.stand_ins.get(cls.substituted(), "")
        return SimulatedRanks(module, cls.kind) if module and cls.collective else PaddleSupport()


def custom_device_libraries(paddle: Installed) -> list[str]:
    """Return file names of the CustomDevice plugins that Paddle will load, from the two folders that it searches."""
    folders = [paddle.folder.parent / "paddle_custom_device"]
    named = os.environ.get("CUSTOM_DEVICE_ROOT")
    if named:
        folders = [Path(named)]
    return sorted(path.name for folder in folders if folder.is_dir() for path in folder.glob("*.so"))
