"""Launching kernels with little host time: each kernel keeps its parameters in one block that is filled in place."""

from __future__ import annotations

from struct import Struct
from typing import Any

import numpy as np
from hal_core.devices import DYNAMIC, ROW_FIELDS

from .compiling import SOURCES, cubin
from .driver import Driver

THREADS = 128
"""Threads a block: enough for an 8 KB row in four vector loads each, small enough for thousands of short rows."""


class Kernel:
    """One kernel. ``params`` is a structured NumPy record that lies where the driver reads the parameters."""

    def __init__(self, driver: Driver, module: Any, name: str, params: np.dtype[np.void]) -> None:  # noqa: ANN401
        self._driver = driver
        self._function = driver.ok(driver.api.cuModuleGetFunction(module, name.encode()), f"loading {name}")
        self._launch = driver.api.cuLaunchKernel
        self.name = name
        if hasattr(driver.api, "cuFuncLoad"):  # a lazily loaded kernel may wait for the device at its first launch
            driver.ok(driver.api.cuFuncLoad(self._function), f"loading {name}")
        self._block = np.zeros(1, params)
        self.params = self._block[0]
        self.buffer = memoryview(self._block.data).cast("B")
        self._format = _native(params)
        addresses = [self._block.ctypes.data + offset for offset in self._parameter_offsets(params)]
        self._pointers = np.array(addresses, np.uint64)
        self._at = int(self._pointers.ctypes.data)

    @staticmethod
    def _parameter_offsets(params: np.dtype[np.void]) -> list[int]:
        """Where each parameter begins: fields are parameters, except in a struct, which is one."""
        assert params.fields is not None
        if params.metadata and params.metadata.get("struct"):
            return [0]
        return [entry[1] for entry in params.fields.values()]

    def pack(self, *values: int) -> None:
        """Set all parameters, in their order, to whole numbers."""
        self._format.pack_into(self.buffer, 0, *values)

    def load(self, params: bytes) -> None:
        """Take all parameters as bytes; ``buffer`` is where they are, for those that differ from launch to launch."""
        self.buffer[:] = params

    def launch(self, blocks: int, threads: int, stream: int, rows: int = 1) -> None:
        """Launch ``blocks`` times ``rows`` blocks, with the parameters as they are now; the driver copies them."""
        (status,) = self._launch(self._function, blocks, rows, 1, threads, 1, 1, 0, stream, self._at, 0)
        if status != self._driver.success:
            self._driver.ok((status,), f"launching {self.name}")


def _native(params: np.dtype[np.void]) -> Struct:
    """The layout of plain fields for the ``struct`` module, which fills them all in one call."""
    codes = {"u8": "Q", "u4": "I", "i8": "q", "i4": "i"}
    assert params.fields is not None
    plain = [codes.get(entry[0].str[1:], "") for entry in params.fields.values()]
    return Struct("@" + "".join(plain))


def struct(*fields: tuple[Any, ...]) -> np.dtype[np.void]:
    """A struct that a kernel takes by value, with the compiler's own alignment."""
    return np.dtype(np.dtype([*fields], align=True), metadata={"struct": True})


PLAN = struct(
    ("memory", "<u8"),
    ("block", "<u8"),
    ("spread", "<u8"),
    ("writes", "<u4"),
    ("records", "<u4"),
    ("fields", "<u4"),
    ("record_bytes", "<u4"),
    ("slots_at", "<u4"),
    ("records_at", "<u4"),
    ("payload_at", "<u8"),
)
FILL = np.dtype(
    [
        ("dst", "<u8"),
        ("cycle", "<u8"),
        ("nbytes", "<u4"),
        ("n0", "<u4"),
        ("n1", "<u4"),
        ("step0", "<i8"),
        ("step1", "<i8"),
    ],
    align=True,
)
SMALL_BYTES = 1024
SMALL = struct(("dst", "<u8"), ("nbytes", "<u4"), ("unused", "<u4"), ("data", "u1", (SMALL_BYTES,)))
STRIDED = struct(
    ("dst", "<u8"),
    ("src", "<u8"),
    ("element", "<u4"),
    ("unused", "<u4"),
    ("shape", "<u4", (4,)),
    ("to", "<i8", (4,)),
    ("from", "<i8", (4,)),
    ("count", "<u8"),
)
HOLD = np.dtype([("flag", "<u8")])
ROW = np.dtype([(name, "<u8") for name in ("base", "stride", "cycle", "size")])
ENTER = struct(
    ("entries", "<u8"),
    ("blocks", "<u8"),
    ("memory", "<u8"),
    ("spread", "<u8"),
    ("dynamic", "<u8", (len(DYNAMIC),)),
    ("fields", "<u4"),
    ("rows_at", "<u4"),
    ("rows", ROW, (len(ROW_FIELDS),)),
)


class Kernels:
    """All kernels of this package, for one context."""

    def __init__(self, driver: Driver, arch: str) -> None:
        self._modules = [
            driver.ok(driver.api.cuModuleLoadData(cubin(name, arch)), "cuModuleLoadData") for name in SOURCES
        ]
        writes, enter, steps = self._modules
        self.write = Kernel(driver, writes, "hal_write", PLAN)
        self.fill = Kernel(driver, writes, "hal_fill", FILL)
        self.small = Kernel(driver, writes, "hal_small", SMALL)
        self.copy_strided = Kernel(driver, writes, "hal_copy_strided", STRIDED)
        self.hold = Kernel(driver, writes, "hal_hold", HOLD)
        self.enter = Kernel(driver, enter, "hal_enter", ENTER)
        self.steps, self.driver = steps, driver

    def unload(self) -> None:
        """Give the modules back; no kernel runs."""
        for module in self._modules:
            self.driver.api.cuModuleUnload(module)
