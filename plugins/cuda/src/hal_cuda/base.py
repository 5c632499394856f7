"""What the parts of the cuda device know of it."""

from __future__ import annotations

from abc import abstractmethod

from hal_core.devices import AsyncDevice, AsyncStream

from .admissions import Admissions
from .driver import Driver
from .launching import Kernels


class OnGpu(AsyncDevice):
    """A device over one GPU's driver, its kernels, and what admission has staged."""

    driver: Driver
    kernels: Kernels
    admissions: Admissions

    @abstractmethod
    def stream_at(self, handle: int) -> AsyncStream:
        """A stream by its handle."""
