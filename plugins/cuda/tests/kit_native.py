"""The cuda device over the driver that stands in for CUDA's, as the conformance kit opens it: ``kit_native:opened``.

``HAL_CUDA_NATIVE=0`` gives the Python path over the same driver. The kernel of ``update_inputs`` is the product's own,
run on the host; what the others do stands in driver.c.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path

from hal_cuda import launching
from hal_cuda.device import CudaDevice
from hal_cuda.driver import Driver


def _stand_in():
    found = sys.modules.get("hal_cuda_stand_in")
    if found is None:
        spec = importlib.util.spec_from_file_location("hal_cuda_stand_in", Path(__file__).with_name("stand_in.py"))
        found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return found


class OverStandIn(CudaDevice):
    """The product's device; tensors of this process are no CUDA device's."""

    def is_device_value(self, value):
        return False


@cache
def library():
    """The bindings over the library, one for all devices as CUDA's are."""
    return _stand_in().Library(_stand_in().built()[1])


def opened():
    """A device; the native part and the driver's library are built once a process."""
    module, api = _stand_in().built()[0], library()
    launching.cubin = lambda name, arch: b""
    native = None if os.environ.get("HAL_CUDA_NATIVE") == "0" else module
    return OverStandIn(0, {"stream": 1}, Driver(api, native, api.library))
