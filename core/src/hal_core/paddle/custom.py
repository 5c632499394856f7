"""A device for any Paddle CustomDevice: a plugin says its name, Paddle's name of the type, and little else.

    class NpuPlugin(CustomDevicePlugin):
        name = "npu"
        kind = "npu"
        cure = "install paddlepaddle and paddle-custom-npu"

Its module imports the standard library alone, as a plugin class must.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from ..device import Plugin, Probe
from ..errors import Unavailable
from . import probing

if TYPE_CHECKING:
    from ..conformance.seams import Support
    from ..device import Device


class CustomDevicePlugin(Plugin):
    """Derive from it. ``kind``: Paddle's device type; ``collective``: the library's name, "" where there is none.

    ``stand_ins``: what may stand in for the chip, by the word with which ``HAL_<NAME>_PLACE`` declares it: the module
    of a simulated accelerator that shows itself to Paddle under any type name. It has ``paddle_env.announce(kind)``,
    ``paddle_env.distributed(rank, endpoints, master, kind)``, ``set_option(name, value)`` and
    ``Stream.adopt(handle).held()``. The device then says everywhere that it is substituted.
    """

    priority = -1
    kind: ClassVar[str]
    cure: ClassVar[str]
    collective: ClassVar[str] = "xccl"
    stand_ins: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @classmethod
    def substituted(cls) -> str:
        """The word for what stands in, or ""."""
        return os.environ.get(cls.variable(), "") if cls.stand_ins else ""

    @classmethod
    def variable(cls) -> str:
        """The environment variable that declares a substitution."""
        return f"HAL_{cls.name.upper().replace('-', '_')}_PLACE"

    @classmethod
    def probe(cls) -> Probe:
        """Look for Paddle and for a CustomDevice library, in files; the chip itself is looked for by ``open``."""
        substitute = cls.substituted()
        if substitute and substitute not in cls.stand_ins:
            known = " or ".join(cls.stand_ins)
            return Probe.no(
                f"{cls.variable()}={substitute} names no substitute", f"{cls.variable()}={known}, or unset it"
            )
        paddle = probing.installed()
        if paddle is None:
            return Probe.no(probing.NO_PADDLE, cls.cure)
        if substitute:
            module = cls.stand_ins[substitute]
            if find_spec(module) is None:
                return Probe.no(
                    f"{module}, which stands in, is not installed", f"install paddle-{module.replace('_', '-')}"
                )
            return Probe.yes(f"substituted: {substitute}, no chip is used")
        libraries = probing.custom_device_libraries(paddle)
        if not libraries:
            build = f"Paddle {paddle.version} (built for {paddle.build})"
            return Probe.no(f"{build} has no CustomDevice library, so no {cls.kind}", cls.cure)
        return Probe.yes(f"Paddle {paddle.version} with {', '.join(libraries)}")

    @classmethod
    def open(cls, index: int, options: Mapping[str, object]) -> Device:
        """Open device ``index``. Options: ``ring_start``, ``ring_limit`` (bytes), ``deadline`` (seconds)."""
        found = cls.probe()
        if not found.available:
            raise Unavailable(found.reason, cure=found.cure, device=cls.name)
        return cls.make(index, options)

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
