"""Support of a device over torch for the conformance kit (entry-point group ``hal.conformance``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hal_core import Support

if TYPE_CHECKING:
    from hal_core import Device


class TorchSupport(Support):
    """Tensors of torch on the device."""

    tensors = True
    reversed_views = False

    def versions(self, device: Device) -> Mapping[str, str]:
        """Return torch's version."""
        return {"torch": str(torch.__version__)}

    def tensor(self, device: Device, values: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return a torch tensor of its own memory, with the strides of ``values`` where torch has them."""
        place: torch.device = device.device  # type: ignore[attr-defined]  # a TorchDevice
        strides = [step // values.itemsize for step in values.strides]
        dtype = getattr(torch, values.dtype.name)
        if values.size and min(strides, default=0) >= 0:
            made = torch.empty_strided(values.shape, strides, dtype=dtype, device=place)
        else:
            made = torch.empty(values.shape, dtype=dtype, device=place)
        made.copy_(torch.from_numpy(np.ascontiguousarray(values)).reshape(values.shape))
        return made

    def values_of(self, device: Device, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        """Return the values as torch itself copies them."""
        return np.array(tensor.cpu().numpy())
