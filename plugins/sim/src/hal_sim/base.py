"""The base of the sim device, used by its parts."""

from __future__ import annotations

from hal_core.devices import AsyncDevice

from hal_sim.accelerator import Accelerator


class OnAccelerator(AsyncDevice):
    """A device over one accelerator, in a job of ranks that find each other by its name."""

    accelerator: Accelerator
    job: str

    def holds(self, address: int) -> bool:
        """Return True for an address in live memory of the accelerator."""
        return bool(self.accelerator._native.is_device_memory(address))
