"""What the opencl plugin offers the conformance kit: tensors, which are views of memory that the device allocates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from hal_core import Device, Support, View
from hal_core.devices import dtype_of

from . import cl
from .device import OpenCLDevice
from .runtime import Event, Queue


class OpenCLSupport(Support):
    """Tensors are written and read by a queue of their own, which the host waits for."""

    tensors = True

    def versions(self, device: Device) -> Mapping[str, str]:
        """The driver's name, and its version of OpenCL with its own words."""
        assert isinstance(device, OpenCLDevice)
        return {cl.platform_name(): cl.device_version(device.runtime.device)}

    def tensor(self, device: Device, values: np.ndarray[Any, Any]) -> View:
        """A view with these values, in device memory of its own."""
        values = np.ascontiguousarray(values)
        made = View.contiguous(device.allocate(values.nbytes), 0, values.shape, dtype_of(values.dtype))
        self._copy(device, made, values, inward=True)
        return made

    def values_of(self, device: Device, tensor: View) -> np.ndarray[Any, Any]:
        """The values of a view that :meth:`tensor` made."""
        values = np.empty(tensor.shape, tensor.dtype.storage)
        self._copy(device, tensor, values, inward=False)
        return values

    def is_locked(self, device: Device, address: int) -> bool | None:
        """False where the driver has mapped no buffer of its host memory; OpenCL cannot be asked for more."""
        assert isinstance(device, OpenCLDevice)
        return None if device.runtime.is_mapped(address) else False

    def native_objects(self, device: Device) -> Mapping[str, int]:
        """The events and buffers that were made and not released."""
        assert isinstance(device, OpenCLDevice)
        return {"events": Event.alive, "buffers": device.runtime.buffers}

    def _copy(self, device: Device, view: View, values: np.ndarray[Any, Any], *, inward: bool) -> None:
        assert isinstance(device, OpenCLDevice)
        if not values.nbytes:
            return
        primitives, address = device.primitives, view.memory.address + view.offset
        queue = Queue(device.runtime.device, Counter())
        if inward:
            primitives.copy_in(address, values.ctypes.data, values.nbytes, queue)
        else:
            primitives.copy_out(values.ctypes.data, address, values.nbytes, queue)
        cl.call("clFinish", queue.handle)
        cl.call("clReleaseCommandQueue", queue.handle)
