"""Support for the kit: tensors, which here are views of memory that the device allocates."""

from typing import Any

import numpy as np
from hal_core import Device, Support, View
from hal_core.devices import dtype_of

from .device import array


class QueueSupport(Support):
    tensors = True

    def tensor(self, device: Device, values: np.ndarray[Any, Any]) -> View:
        memory = device.allocate(values.nbytes)
        view = View.contiguous(memory, 0, values.shape, dtype_of(values.dtype))
        array(view)[...] = values
        return view

    def values_of(self, device: Device, tensor: View) -> np.ndarray[Any, Any]:
        return array(tensor).copy()
