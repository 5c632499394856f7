"""The cuda device of hal. The plugin class imports the standard library alone; ``open`` imports the device."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hal_core import Plugin, Probe, Unavailable

if TYPE_CHECKING:
    from .device import CudaDevice

LIBRARY = "libcuda.so.1"
PCI, NODES = Path("/sys/bus/pci/devices"), Path("/dev")
QUEUES, MOST_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32
"""The driver's variable for the number of hardware queues, which ``cuInit`` reads: 1 to 32, and 8 without it."""
_NOT_INITIALIZED = 3
"""``CUDA_ERROR_NOT_INITIALIZED``: nothing in this process has called ``cuInit``."""
_NO_CARD = Probe.absent("no NVIDIA GPU on this machine", "choose another device, or use a machine that has one")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
"""The vendor's number, and the PCI class of display and compute controllers (not NVIDIA's switches and sound)."""


class CudaPlugin(Plugin):
    """The entry point ``cuda`` of group ``hal.devices``."""

    name = "cuda"
    kind = "gpu"
    resource = "GPU"

    @classmethod
    def count(cls) -> int:
        """Return the number of GPUs visible to this process."""
        return gpu_count()

    @classmethod
    def probe(cls) -> Probe:
        """Query the driver by ctypes; report six causes of unavailability, each with its cure.

        Without any NVIDIA GPU in the machine the device is absent. With one, even without a driver (as in a container
        without access to it), the probe names the missing part.
        """
        try:
            driver = ctypes.CDLL(LIBRARY)
        except OSError:
            if not has_card():
                return _NO_CARD
            return Probe.no(f"no CUDA driver ({LIBRARY})", "install the NVIDIA driver, or choose another device")
        count = _devices(driver)
        if count == 0 and not has_card():  # images contain the driver's library and run anywhere
            return _NO_CARD
        if count == 0:
            return Probe.no("the CUDA driver sees no device", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
        missing = _missing_bindings()
        if missing:
            return Probe.no(f"{missing} is missing", "pip install './plugins/cuda[cu13]' (or [cu12]) in hal's checkout")
        has, needs = ctypes.c_int(0), _bindings_major()
        driver.cuDriverGetVersion(ctypes.byref(has))
        if has.value // 1000 < needs:
            return Probe.no(
                f"the driver speaks CUDA {has.value // 1000}, older than the runtime's {needs}",
                f"update the driver, or pip install './plugins/cuda[cu{has.value // 1000}]' in hal's checkout",
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
        from .native_device import open_gpu

        return open_gpu(index, options)


def has_card() -> bool:
    """Return whether this machine has an NVIDIA GPU, with or without a driver: on the PCI bus, or by a device file."""
    nodes = ("nvidiactl", "nvidia0", "nvhost-gpu", "nvgpu", "dxg")  # the driver's, Tegra's (two), Windows' (WSL)
    if any((NODES / name).exists() for name in nodes):
        return True
    return any(
        _first_line(vendor) == _NVIDIA and _first_line(vendor.with_name("class")).startswith(_DISPLAY)
        for vendor in PCI.glob("*/vendor")
    )


def _first_line(file: Path) -> str:
    """Return the first line of a file of sysfs; "" if it is missing or unreadable."""
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return ""


def gpu_count() -> int:
    """Return the number of GPUs visible to this process (``CUDA_VISIBLE_DEVICES`` hides some); 0 without a driver."""
    try:
        return _devices(ctypes.CDLL(LIBRARY))
    except OSError:
        return 0


def _devices(driver: ctypes.CDLL) -> int:
    """Return the number of GPUs. The first call in a process that has not used CUDA asks for all hardware queues.

    With the driver's 8, a copy on CUDA's default stream waited for copies of other streams that were held
    (docs/decisions/12).
    """
    count = ctypes.c_int(0)
    if driver.cuDeviceGetCount(ctypes.byref(count)) == _NOT_INITIALIZED:
        os.environ.setdefault(QUEUES, str(MOST_QUEUES))
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def hardware_queues() -> str:
    """Return the number of hardware queues, and the cure if there are fewer than possible."""
    number = os.environ.get(QUEUES, "")
    if number == str(MOST_QUEUES):
        return number
    why = f"{QUEUES}={number}" if number else "8, as CUDA was in use before hal"
    return f"{why} (streams may wait for each other; set {QUEUES}={MOST_QUEUES} before the process starts)"


def _missing_bindings() -> str:
    """Return the package that is not installed, or ""."""
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
    """Return True if the only framework is a CPU build of Paddle, whose tensors can never be on this device."""
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
