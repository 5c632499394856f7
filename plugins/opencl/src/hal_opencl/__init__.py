"""The opencl device of hal: any OpenCL 1.2 device. The plugin class imports the standard library alone."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hal_core import Plugin, Probe, Unavailable

if TYPE_CHECKING:
    from .device import OpenCLDevice

CURE = (
    "install an OpenCL driver: the vendor's, Debian's pocl-opencl-icd, or on x86_64 "
    "pip install './plugins/opencl[pocl]' in hal's checkout; "
    "Intel's from pip needs variables (plugins/opencl/README.md)"
)
POCL, LD_CURE = "Portable Computing Language", "install binutils (Debian: apt install binutils)"
NEWER = (
    "install a newer PoCL, or Intel's driver: pip install './plugins/opencl[intel]' in hal's checkout, "
    "with the variables in plugins/opencl/README.md"
)


class OpenCLPlugin(Plugin):
    """The entry point ``opencl`` of group ``hal.devices``; selected by name only."""

    name = "opencl"

    @classmethod
    def probe(cls) -> Probe:
        """Ask the OpenCL loader by ctypes. Imports neither NumPy nor pyopencl."""
        from . import cl

        try:
            found = cl.devices()
        except cl.NoLoader as error:
            return Probe.absent(str(error), CURE)
        except cl.CLError as error:
            return Probe.no(f"the OpenCL loader fails: {error}", CURE)
        if not found:
            return Probe.absent("OpenCL has no devices", CURE)
        if cl.platform_name() == POCL and shutil.which("ld") is None:
            return Probe.no("PoCL links kernels with the program ld, and ends the process without it", LD_CURE)
        if cl.platform_name() == POCL and re.search("x86_64.*-generic$", version := cl.device_version(found[0])):
            what = "PoCL does not know this CPU, which is newer than its LLVM, and compiles no kernel"
            return Probe.no(f"{what} ({version})", NEWER)
        names = ", ".join(cl.device_name(device) for device in found)
        return Probe.yes(f"{names}; verified on the CPU drivers of PoCL and Intel only")

    @classmethod
    def open(cls, index: int, options: Mapping[str, object]) -> OpenCLDevice:
        """Open a device. Raises :class:`hal_core.Unavailable` where no OpenCL device can be used."""
        probe = cls.probe()
        if not probe.available:
            raise Unavailable(probe.reason, cure=probe.cure, device=cls.name)
        from .device import OpenCLDevice

        return OpenCLDevice(index, options)
