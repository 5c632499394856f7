"""The cpu device: the embedded default, host memory and no asynchrony. Its plugin class imports nothing heavy."""

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
        """Host memory is always there; the model's framework is the model's own affair."""
        return Probe.yes("host memory")

    @classmethod
    def open(cls, index: int, options: Mapping[str, object]) -> CpuDevice:
        """Open the host as a device; it has index 0 and takes no options."""
        from .device import CpuDevice

        return CpuDevice(index, options)
