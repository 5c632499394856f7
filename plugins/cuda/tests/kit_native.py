"""The cuda device over the stand-in driver, as the conformance kit opens it: ``kit_native:opened``.

``HAL_CUDA_NATIVE=0`` gives the fallback over the same driver. The kernel of ``update_inputs`` is the product's own, run
on the host; driver.c has its own versions of the remaining kernels.
"""

import ctypes
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path

from hal_conformance import job_variables
from hal_cuda import launching, nccl
from hal_cuda.conformance import CudaSupport
from hal_cuda.device import CudaDevice
from hal_cuda.driver import Driver
from hal_cuda.native_device import NativeDevice


def _stand_in():
    found = sys.modules.get("hal_cuda_stand_in")
    if found is None:
        spec = importlib.util.spec_from_file_location("hal_cuda_stand_in", Path(__file__).with_name("stand_in.py"))
        found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return found


RANK = "HAL_STAND_IN_RANK"
"""Set in a rank's process."""


class OverStandIn(CudaDevice):
    """The product's device; tensors of this process count as tensors of no CUDA device.

    In a rank, allocation behaves as with Paddle: it waits for the default stream and keeps the GIL. After the loss of a
    rank no other thread runs until that stream continues. (Outside ranks, tests hold that stream themselves.)
    """

    def allocate(self, nbytes):
        made = super().allocate(nbytes)
        if RANK not in os.environ:
            return made
        event = self.default_stream.record()
        ctypes.PyDLL(None, handle=self.driver.api.library._handle).cuEventSynchronize(ctypes.c_void_p(event.raw))
        return made

    def is_device_value(self, value):
        return False


@cache
def library():
    """Return the bindings over the library; one library for all devices, as with CUDA."""
    return _stand_in().Library(_stand_in().built()[1])


class NativeOverStandIn(OverStandIn, NativeDevice):
    """The same with the native part."""


def opened():
    """Open a device; the native part and the driver's library are built once a process."""
    module, api = _stand_in().built()[0], library()
    launching.cubin = lambda name, arch: b""
    os.environ[nccl.VARIABLE] = str(_stand_in().built()[1].with_name(_stand_in().NCCL))
    _stand_in().nccl(api.library)
    if os.environ.get("HAL_CUDA_NATIVE") == "0":
        return OverStandIn(0, {"stream": 1}, Driver(api))
    return NativeOverStandIn(0, {"stream": 1}, Driver(api, module, api.library))


class StandInRanks(CudaSupport):
    """Ranks of this host over the stand-in for NCCL; the starting process builds the libraries once."""

    tensors, ranks, four_ranks = False, True, True

    def __init__(self):
        """Look for no GPU."""

    def why_not(self, need):
        return ""

    def rank_environment(self, rank, endpoints):
        return job_variables(rank, endpoints) | {_stand_in().FOLDER: str(_stand_in().built()[1].parent), RANK: "1"}

    def opened(self):
        return opened()


opened.support = StandInRanks()
