"""The plugin class: the probe for the accelerator, and opening it. Imports the standard library alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hal_core import HalError, Plugin, Probe, Unavailable

if TYPE_CHECKING:
    from hal_sim.device import SimDevice


class SimPlugin(Plugin):
    """The entry point ``sim`` of group ``hal.devices``. Automatic selection never chooses it."""

    name = "sim"

    @classmethod
    def probe(cls) -> Probe:
        """Look for a compiler, or for an existing build; nothing is built here."""
        from hal_sim.build import found_build

        if not sys.platform.startswith("linux"):
            return Probe.no(f"the simulator needs Linux, but this is {sys.platform}", "run it in a container or a VM")
        try:
            return Probe.yes(found_build())
        except HalError as error:
            return Probe.no(error.what, error.cure)

    @classmethod
    def open(cls, index: int, options: Mapping[str, object]) -> SimDevice:
        """Open simulated device ``index``, after building the accelerator if necessary.

        Options: ``ring_start``, ``ring_limit`` (bytes), ``deadline`` (s), ``job``, and the accelerator's: ``mode``
        ("eager", "worker", "lazy"), ``staged``, ``delay_us``, ``devices``, ``memory_mb``, ``fail_allocation``, …
        """
        found = cls.probe()
        if not found.available:
            raise Unavailable(found.reason, cure=found.cure, device="sim")
        from hal_sim.device import SimDevice

        return SimDevice(index, options)
