"""The cuda device of hal. The plugin class imports the standard library alone; the device comes with ``open``."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hal_core.device import Plugin, Probe
from hal_core.errors import Unavailable

if TYPE_CHECKING:
    from .device import CudaDevice

LIBRARY = "libcuda.so.1"


class CudaPlugin(Plugin):
    """The entry point ``cuda`` of group ``hal.devices``."""

    name = "cuda"
    priority = 100

    @classmethod
    def probe(cls) -> Probe:
        """Ask the driver itself, by ctypes; five causes of unavailability, each with its cure."""
        try:
            driver = ctypes.CDLL(LIBRARY)
        except OSError:
            return Probe.no(f"no CUDA driver ({LIBRARY})", "install the NVIDIA driver, or choose another device")
        count = _devices(driver)
        if count == 0:
            return Probe.no("the CUDA driver sees no device", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
        missing = _missing_bindings()
        if missing:
            return Probe.no(f"{missing} is missing", "pip install 'paddle-hal-cuda[cu13]' (or [cu12])")
        has, needs = ctypes.c_int(0), _bindings_major()
        driver.cuDriverGetVersion(ctypes.byref(has))
        if has.value // 1000 < needs:
            return Probe.no(
                f"the driver speaks CUDA {has.value // 1000}, older than the runtime's {needs}",
                f"update the driver, or pip install 'paddle-hal-cuda[cu{has.value // 1000}]'",
            )
        if _paddle_without_cuda():
            return Probe.no("Paddle is installed without CUDA", "install paddlepaddle-gpu in place of paddlepaddle")
        return Probe.yes(f"{count} device(s)")

    @classmethod
    def open(cls, index: int, options: Mapping[str, object]) -> CudaDevice:
        """Open GPU ``index``. Options: ``ring_start``, ``ring_limit`` (bytes), ``deadline`` (s), ``stream``."""
        found = cls.probe()
        if not found.available:
            raise Unavailable(found.reason, cure=found.cure, device="cuda")
        if os.environ.get("HAL_CUDA_COUNT"):
            from .counting import CountedCudaDevice

            return CountedCudaDevice(index, options)
        from .device import CudaDevice

        return CudaDevice(index, options)


def gpu_count() -> int:
    """How many GPUs the driver shows this process (``CUDA_VISIBLE_DEVICES`` hides others); 0 without a driver."""
    try:
        return _devices(ctypes.CDLL(LIBRARY))
    except OSError:
        return 0


def _devices(driver: ctypes.CDLL) -> int:
    count = ctypes.c_int(0)
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def _missing_bindings() -> str:
    """The package that is not installed, or ""."""
    for name in ("cuda.bindings", "cuda.core"):
        try:
            if find_spec(name) is None:
                return name.replace(".", "-")
        except ModuleNotFoundError:
            return name.replace(".", "-")
    return ""


def _bindings_major() -> int:
    try:
        return int(version("cuda-bindings").split(".")[0])
    except (PackageNotFoundError, ValueError):
        return 0


def _paddle_without_cuda() -> bool:
    """True where the only framework is a CPU build of Paddle: its tensors can never be on this device."""
    if find_spec("torch") is not None or find_spec("cupy") is not None:
        return False
    names = {name for name in ("paddlepaddle", "paddlepaddle-gpu") if _installed(name)}
    return names == {"paddlepaddle"}


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
