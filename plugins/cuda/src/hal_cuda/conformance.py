"""What the cuda device lends to the conformance kit: tensors of Paddle, torch or CuPy on the GPU.

``HAL_CUDA_TENSORS`` names the library (paddle, torch, cupy); without it the first that is installed is used.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import numpy as np
from hal_core.conformance.seams import Support
from hal_core.device import Device


def library() -> str:
    """The tensor library that is tested, or ""."""
    chosen = os.environ.get("HAL_CUDA_TENSORS", "")
    return chosen or next((name for name in ("paddle", "torch", "cupy") if find_spec(name) is not None), "")


class CudaSupport(Support):
    """Tensors with the strides of the array they are made of, as far as the library has them."""

    # The kit slices tensors as NumPy would. torch has no views with negative steps, Paddle 2.6 refuses empty slices;
    # their tensors are tested whole and by hal's own views in plugins/cuda/tests.
    tensors = library() == "cupy"

    def tensor(self, device: Device, values: np.ndarray[Any, Any]) -> object:
        """A tensor on the device's GPU."""
        made = getattr(self, f"_{library()}")
        return made(device, values)

    def values_of(self, device: Device, tensor: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401 (the library's)
        """The values, read in the library's own way."""
        if hasattr(tensor, "get"):
            return np.array(tensor.get())
        return np.array(tensor.numpy() if hasattr(tensor, "place") else tensor.cpu().numpy())

    def _paddle(self, device: Device, values: np.ndarray[Any, Any]) -> object:
        import paddle

        return paddle.to_tensor(np.ascontiguousarray(values), place=paddle.CUDAPlace(device.index))

    def _torch(self, device: Device, values: np.ndarray[Any, Any]) -> object:
        import torch

        return torch.from_numpy(np.array(values)).to(f"cuda:{device.index}")

    def _cupy(self, device: Device, values: np.ndarray[Any, Any]) -> object:
        import cupy

        with cupy.cuda.Device(device.index):
            return cupy.asarray(values)
