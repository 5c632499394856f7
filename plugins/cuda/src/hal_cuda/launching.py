"""Kernel launches with little host time: each kernel keeps its parameters in one block that is filled in place."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any

import numpy as np

from .compiling import SOURCES, cubin
from .driver import Driver
from .structs import COPY_OUT, ENTER, ENTER_FEW, FILL, HOLD, PLAN, SMALL, STRIDED


class Kernel:
    """One kernel. ``params`` is a structured NumPy record from which the driver reads the parameters.

    For native calls: ``function``, its handle as a number, and ``at``, the address of the parameters' addresses.
    """

    def __init__(self, driver: Driver, module: Any, name: str, params: np.dtype[np.void]) -> None:  # noqa: ANN401
        self._driver = driver
        self._function = driver.ok(driver.api.cuModuleGetFunction(module, name.encode()), f"loading {name}")
        self.name = name
        if hasattr(driver.api, "cuFuncLoad"):  # a lazily loaded kernel may wait for the device at its first launch
            driver.ok(driver.api.cuFuncLoad(self._function), f"loading {name}")
        self._block = np.zeros(1, params)
        self.params = self._block[0]
        self.buffer = memoryview(self._block.data).cast("B")
        self._format = _native(params)
        addresses = [self._block.ctypes.data + offset for offset in self._parameter_offsets(params)]
        self._pointers = np.array(addresses, np.uint64)
        self.at = int(self._pointers.ctypes.data)
        self.function = int(self._function) if driver.native else 0
        self._run = driver.native.calls.run if driver.native else None

    @staticmethod
    def _parameter_offsets(params: np.dtype[np.void]) -> list[int]:
        """Return each parameter's offset: fields are parameters, except in a struct, which is one."""
        assert params.fields is not None
        if params.metadata and params.metadata.get("struct"):
            return [0]
        return [entry[1] for entry in params.fields.values()]

    def pack(self, *values: int) -> None:
        """Set all parameters, in their order, to whole numbers."""
        self._format.pack_into(self.buffer, 0, *values)

    def load(self, params: bytes) -> None:
        """Set all parameters from bytes; ``buffer`` holds them, for those that differ from launch to launch."""
        self.buffer[:] = params

    def capture(self, blocks: int, threads: int, stream: int) -> None:
        """Launch into the graph that ``stream`` is captured into. It is in no queue, so it does not count as in
        flight."""
        call = self._driver.on.cuLaunchKernel(self._function, blocks, 1, 1, threads, 1, 1, 0, stream, self.at, 0)
        self._driver.ok(call, f"capturing {self.name}")

    def launch(self, blocks: int, threads: int, stream: int, rows: int = 1) -> None:
        """Launch a grid of ``blocks`` by ``rows`` with the current parameters, which the driver copies."""
        if self._run is not None:
            self._run(0, 0, 0, 0, 0, stream, self.function, blocks, rows, threads, self.at, 0)
            return
        call = self._driver.on.cuLaunchKernel(self._function, blocks, rows, 1, threads, 1, 1, 0, stream, self.at, 0)
        self._driver.ok(call, f"launching {self.name}")


def _native(params: np.dtype[np.void]) -> Struct:
    """Return the layout of plain fields for the ``struct`` module, which fills them all in one call."""
    codes = {"u8": "Q", "u4": "I", "i8": "q", "i4": "i"}
    assert params.fields is not None
    plain = [codes.get(entry[0].str[1:], "") for entry in params.fields.values()]
    return Struct("@" + "".join(plain))


def load_modules(driver: Driver, arch: str) -> list[Any]:
    """Load the machine code of all kernels into the current context. The driver waits for the whole GPU."""
    codes = [cubin(name, arch) for name in SOURCES]
    with driver.during_captures():
        return [driver.ok(driver.api.cuModuleLoadData(code), "cuModuleLoadData") for code in codes]


class Kernels:
    """All kernels of this package, from their loaded modules; each device has parameters of its own."""

    def __init__(self, driver: Driver, modules: Sequence[Any]) -> None:
        writes, enter, steps = modules
        self.write = Kernel(driver, writes, "hal_write", PLAN)
        self.fill = Kernel(driver, writes, "hal_fill", FILL)
        self.small = Kernel(driver, writes, "hal_small", SMALL)
        self.copy_strided = Kernel(driver, writes, "hal_copy_strided", STRIDED)
        self.copy_out = Kernel(driver, writes, "hal_copy_out", COPY_OUT)
        self.hold = Kernel(driver, writes, "hal_hold", HOLD)
        self.enter = Kernel(driver, enter, "hal_enter", ENTER)
        self.enter_few = Kernel(driver, enter, "hal_enter_few", ENTER_FEW)
        self.steps = steps
