"""Memory and modules of one GPU, for all devices that are open on it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from weakref import WeakSet

from .context import Context
from .driver import Driver
from .launching import load_modules

PORTABLE = 1
"""``CU_MEMHOSTALLOC_PORTABLE``: page-locked for every context."""
LARGE = 8 << 20
"""Bytes of page-locked blocks that come from a pool on the host, if the driver has one."""
NON_BLOCKING = 1
"""``CU_STREAM_NON_BLOCKING``: a stream that does not wait for CUDA's default stream."""


class GpuMemory:
    """Device memory from a pool, page-locked host memory, which is kept and reused, and the modules of the kernels.

    ``cuMemFree``, ``cuMemFreeHost``, ``cuModuleLoadData`` and ``cuModuleUnload`` wait for the whole GPU. Memory that
    outlives its device is freed when its last array is dropped, perhaps by the garbage collector in a hook of another
    device. So all devices of a GPU share this object. Pool, context and modules exist until the last device is closed
    and no memory is in use; host memory until the last device is closed, or longer if arrays hold it. Large blocks
    come from a pool on the host, which takes them back without waiting: 256 MB in 0.03 ms, where ``cuMemFreeHost``
    blocked every thread until a kernel had ended (H100, driver 580).
    """

    def __init__(self) -> None:
        self._devices: WeakSet[object] = WeakSet()
        self._context: Context | None = None
        self._pool: Any = None
        self._host_pool: Any = None
        self._pooled: set[int] = set()  # page-locked memory of that pool
        self._stream = 0
        self.modules: list[Any] = []
        self._out: set[int] = set()  # device memory
        self._locked: dict[int, int] = {}  # bytes of each page-locked block by its address
        self._idle: dict[int, list[int]] = {}  # the unused ones, by their size

    def join(self, device: object, context: Context) -> None:
        """Register an open device."""
        if self._context is None:
            driver = context.driver
            self.modules = load_modules(driver, context.arch)
            with driver.during_captures():
                self._pool, self._host_pool = context.make_pool(), context.make_host_pool()
            self._stream = int(driver.ok(driver.on.cuStreamCreate(NON_BLOCKING), "cuStreamCreate"))
            self._context = Context.open(driver, int(context.device))  # last: an opening that failed begins again
        self._devices.add(device)

    def leave(self, device: object, driver: Driver) -> None:
        """Unregister a device; after the last, free unused memory."""
        self._devices.discard(device)
        if not self._devices:
            while self._idle:  # another thread may open a device meanwhile, whose blocks come and go
                for address in self._idle.popitem()[1]:
                    self._unlock(address, driver)
            self._end(driver)

    def allocate(self, nbytes: int, driver: Driver) -> int:
        """Allocate device memory. Waits for the pool's own stream, which has no other work."""
        api = driver.on
        with driver.during_captures():
            made = driver.ok(
                api.cuMemAllocFromPoolAsync(max(nbytes, 1), self._pool, self._stream), "cuMemAllocFromPoolAsync"
            )
            self._out.add(address := int(made))
            driver.ok(api.cuStreamSynchronize(self._stream), "cuStreamSynchronize")  # now any stream may use it
        return address

    def free(self, address: int, driver: Driver) -> None:
        """Return device memory to the pool."""
        assert self._context is not None
        with self._context.entered(), driver.during_captures():
            driver.api.cuMemFreeAsync(address, self._stream)
        self._out.remove(address)
        self._end(driver)

    def allocate_host(self, nbytes: int, driver: Driver) -> int:
        """Return page-locked memory: a released block of this size, else a new one. From any thread."""
        try:
            return self._idle[nbytes].pop()
        except (KeyError, IndexError):  # another thread may have taken the last one
            if nbytes >= LARGE and self._host_pool is not None:
                return self._allocate_pooled(nbytes, driver)
            with driver.during_captures():
                address = int(driver.ok(driver.on.cuMemHostAlloc(nbytes, PORTABLE), "cuMemHostAlloc"))
            self._locked[address] = nbytes
            return address

    def _allocate_pooled(self, nbytes: int, driver: Driver) -> int:
        with driver.during_captures():
            made = driver.on.cuMemAllocFromPoolAsync(nbytes, self._host_pool, self._stream)
            address = int(driver.ok(made, "cuMemAllocFromPoolAsync"))
            driver.ok(driver.on.cuStreamSynchronize(self._stream), "cuStreamSynchronize")
        self._locked[address] = nbytes
        self._pooled.add(address)
        return address

    def free_host(self, address: int, driver: Driver) -> None:
        """Keep the block for the next allocation of its size. If no device is open, or if that does not wait, free it.
        From any thread."""
        if address in self._pooled:
            self._pooled.discard(address)
            del self._locked[address]
            with driver.during_captures():
                driver.on.cuMemFreeAsync(address, self._stream)
                driver.on.cuStreamSynchronize(self._stream)  # only for this: the pool then returns it to the system
            self._end(driver)
        elif self._devices:
            self._idle.setdefault(self._locked[address], []).append(address)
        else:
            self._unlock(address, driver)
            self._end(driver)

    def _unlock(self, address: int, driver: Driver) -> None:
        assert self._context is not None
        del self._locked[address]
        with self._context.entered(), driver.during_captures():
            driver.api.cuMemFreeHost(address)

    def _end(self, driver: Driver) -> None:
        """Release pool, stream, modules and context once they are unused."""
        if self._devices or self._out or self._locked or self._context is None:
            return
        context, self._context = self._context, None
        with context.entered(), driver.during_captures():
            driver.api.cuStreamSynchronize(self._stream)
            driver.api.cuMemPoolDestroy(self._pool)
            if self._host_pool is not None:
                driver.api.cuMemPoolDestroy(self._host_pool)
            driver.api.cuStreamDestroy(self._stream)
            while self.modules:
                driver.api.cuModuleUnload(self.modules.pop())
        context.close()


_gpus: defaultdict[int, GpuMemory] = defaultdict(GpuMemory)


def memory_of(context: Context) -> GpuMemory:
    """Return the memory of a context's GPU."""
    return _gpus[int(context.device)]
