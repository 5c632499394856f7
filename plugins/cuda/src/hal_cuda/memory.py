"""Device memory and pinned host memory, by the driver's own allocator: its primary context is every framework's."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from hal_core.errors import InvalidValue

from .driver import Driver

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CudaMemory:
    """A block of device memory at ``address``; ``keep`` holds the owner of a tensor's memory alive."""

    __slots__ = ("__weakref__", "_driver", "address", "device", "keep", "nbytes")

    def __init__(self, device: object, address: int, nbytes: int, keep: object, driver: Driver | None = None) -> None:
        self.device, self.address, self.nbytes, self.keep = device, address, nbytes, keep
        self._driver = driver

    @classmethod
    def allocate(cls, device: object, driver: Driver, nbytes: int) -> CudaMemory:
        """A new block, aligned to 256 bytes by the driver. Memory that was given up before is freed now."""
        driver.free_unused()
        address = int(driver.ok(driver.api.cuMemAlloc(max(nbytes, 1)), "cuMemAlloc"))
        return cls(device, address, nbytes, None, driver)

    @classmethod
    def of_paddle(cls, device: object, nbytes: int, index: int) -> CudaMemory:
        """A block that Paddle allocates, as an int64 tensor, so that its collectives can use slices of it."""
        import paddle

        zeros = np.zeros(-(-nbytes // 8) + 1, np.int64)
        base = paddle.to_tensor(zeros, place=paddle.CUDAPlace(index))
        return cls(device, int(base.data_ptr()), nbytes, base)

    def __del__(self) -> None:
        driver = getattr(self, "_driver", None)
        if driver is not None:
            driver.unused.append(self.address)  # freeing waits for the whole device, so it is put off


class PinnedBlock:
    """Page-locked host memory that kernels can read in place, and device memory of the same size to upload into."""

    __slots__ = ("_driver", "address", "buffer", "mirror", "nbytes")

    def __init__(self, driver: Driver, nbytes: int, *, mirrored: bool) -> None:
        if nbytes < 1:
            raise InvalidValue(f"{nbytes} bytes of pinned memory", cure="give at least 1", argument="nbytes")
        self._driver, self.nbytes = driver, nbytes
        flags = int(driver.api.CU_MEMHOSTALLOC_PORTABLE)
        self.address = int(driver.ok(driver.api.cuMemHostAlloc(nbytes, flags), "cuMemHostAlloc"))
        self.buffer: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.address))
        self.mirror = 0
        if mirrored:
            try:
                self.mirror = int(driver.ok(driver.api.cuMemAlloc(nbytes), "cuMemAlloc"))
            except BaseException:
                driver.api.cuMemFreeHost(self.address)
                raise

    def release(self) -> None:
        """Give both back."""
        if self.address:
            self._driver.api.cuMemFreeHost(self.address)
            if self.mirror:
                self._driver.api.cuMemFree(self.mirror)
            self.address = self.mirror = 0
