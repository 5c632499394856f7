"""Base classes of the cuda device, used by its parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hal_core.devices import AsyncDevice, AsyncStream

from .context import Context
from .driver import Driver
from .launching import Kernels
from .native import Native
from .staged_requests import StagedRequests


class OnGpu(AsyncDevice):
    """A device over one GPU's driver and its kernels."""

    driver: Driver
    kernels: Kernels
    context: Context
    groups_by: ClassVar[str]

    def working(self, stream: object) -> AsyncStream:
        """Return a stream as one of this device. Raise if the device is closed or its context is corrupted."""
        if self._closed or self.driver.broken or self.health.unusable:
            self.check_open()
        if type(stream) is AsyncStream and stream.pool is self.events:
            return stream  # as nearly always: a call less
        return self.own_stream(stream)

    @abstractmethod
    def make_group(self, ranks: Sequence[int], me: int, share: Callable[[bytes], bytes], timeout: float) -> Any:  # noqa: ANN401 (a Comm)
        """Create a group over NCCL; ``make`` of :func:`hal_core.devices.open_groups`."""

    @abstractmethod
    def stream_at(self, handle: int) -> AsyncStream:
        """Return a stream by its handle."""


class OnNative(OnGpu):
    """The same with the native part, and with staging at admission."""

    native: Native
    staged_requests: StagedRequests
