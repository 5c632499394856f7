"""The cpu device: the built-in default on host memory, without asynchrony. Its plugin class has only light imports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...contract.device import Plugin, Probe

if TYPE_CHECKING:
    from .device import CpuDevice


class CpuPlugin(Plugin):
    """The entry point ``cpu`` of group ``hal.devices``."""

    name = "cpu"

    @classmethod
    def probe(cls) -> Probe:
        """Return yes: host memory always exists, and the model checks its own framework."""
        return Probe.yes("host memory")

    @classmethod
    def open(cls, index: int, options: Mapping[str, object]) -> CpuDevice:
        """Open the host as a device; it has index 0 and takes no options."""
        from .device import CpuDevice

        return CpuDevice(index, options)
