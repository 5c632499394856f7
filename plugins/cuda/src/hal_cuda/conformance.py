"""Support of the cuda device for the conformance kit: tensors of Paddle, torch or CuPy on the GPU, and ranks over NCCL.

``HAL_CUDA_TENSORS`` names the library (cupy, torch, paddle); without it the first of them that sees the GPU is used.
Ranks need two GPUs and NCCL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_conformance import job_variables
from hal_core import TIMEOUTS, Device, Support, Unavailable

from . import LIBRARY, CudaPlugin, gpu_count
from .nccl import library

if TYPE_CHECKING:
    from .device import CudaDevice

SIZE = 4
"""Ranks of the kit."""


VARIABLE = "HAL_CUDA_TENSORS"
_SEES = {
    "cupy": "cupy.cuda.runtime.getDeviceCount() > 0",
    "torch": "torch.cuda.is_available()",
    "paddle": "paddle.is_compiled_with_cuda()",
}
"""Whether a library can use the GPU. CuPy is first: the kit slices tensors as NumPy would, also backwards."""


@cache
def tensors() -> str:
    """Return the tensor library to test, or ""."""
    found = (name for name in _SEES if gpu_count() and find_spec(name) and _sees(name))
    return os.environ.get(VARIABLE, "") or next(found, "")


def _sees(name: str) -> bool:
    """Ask in another process: a library that is loaded stays, and each chooses its own version of NumPy."""
    command = [sys.executable, "-c", f"import {name}, sys; sys.exit(not ({_SEES[name]}))"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def visible_gpus() -> list[str]:
    """Return the GPUs of this process, as named by ``CUDA_VISIBLE_DEVICES``."""
    count = gpu_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(index) for index in range(count)] if named is None else named.split(",")[:count]


def no_ranks(gpus: int) -> str:
    """Return why the kit cannot start several ranks here, or ""."""
    if gpus < 2:
        return f"two GPUs are needed, and {gpus} is visible"
    try:
        library()
    except Unavailable as error:
        return error.what
    return ""


class CudaSupport(Support):
    """Tensors with the strides of their source array, as far as the library supports them."""

    # The kit slices tensors as NumPy would. torch has no views with negative steps; Paddle 2.6 refuses empty slices, so
    # its tensors are tested whole and by hal's own views in plugins/cuda/tests.
    reversed_views = tensors() != "torch"
    tensors = tensors() in ("cupy", "torch")

    def __init__(self) -> None:
        self._gpus = visible_gpus()
        self._no_ranks = no_ranks(len(self._gpus))
        self.ranks = not self._no_ranks
        self.four_ranks = self.ranks and len(self._gpus) >= SIZE

    def versions(self, device: Device) -> Mapping[str, str]:
        """Return the CUDA version of the driver, and NCCL's."""
        has, found = ctypes.c_int(0), dict[str, str]()
        with contextlib.suppress(OSError):  # the tests' stand-in is no driver of the system
            ctypes.CDLL(LIBRARY).cuDriverGetVersion(ctypes.byref(has))
            found["CUDA driver"] = f"{has.value // 1000}.{has.value // 10 % 100}"
        with contextlib.suppress(Unavailable):
            found["NCCL"] = library().version_text
        return found

    def why_not(self, need: str) -> str:
        """Return why there are no ranks, or no tensors."""
        if need == "tensors":
            used = f"{VARIABLE} is {tensors() or 'no library that sees the GPU'}"
            return f"the kit slices tensors as CuPy and torch can, and {used} (install one, or set {VARIABLE})"
        return self._no_ranks if need == "several_ranks" else super().why_not(need)

    def rank_environment(self, rank: int, endpoints: Sequence[str]) -> Mapping[str, str]:
        """Give each rank of a group its own GPU, listed first for its process, which opens it.

        The other GPUs stay visible, so that NCCL can inspect them. If there are only two GPUs, the kit's four ranks
        share them, which NCCL allows only to ranks of different groups.
        """
        at = rank % len(self._gpus)
        own = ",".join(self._gpus[at:] + self._gpus[:at])
        return job_variables(rank, endpoints) | {"CUDA_VISIBLE_DEVICES": own, "FLAGS_selected_gpus": "0"}

    def join(self, groups: Sequence[Sequence[int]], timeout: float, epoch: str) -> None:
        """Join the job and open the device once, without a time limit; open all groups over NCCL, lost ones again.

        The first opening in a process imports, compiles and creates a context, which takes some ranks seconds longer
        than the rest. Within a test, the first rank would count the other ranks as lost after ``timeout``.
        """
        from hal_core.devices import join_world, open_groups

        join_world(timeout=TIMEOUTS.starting)
        device = self.opened()
        try:
            open_groups(groups, backend=device.groups_by, timeout=timeout, make=device.make_group)
        finally:
            device.close()

    def opened(self) -> CudaDevice:
        """Return the device on which groups are opened."""
        return CudaPlugin.open(0, {})

    def tensor(self, device: Device, values: np.ndarray[Any, Any]) -> object:
        """Return a tensor on the device's GPU."""
        made = getattr(self, f"_{tensors()}")
        return made(device, values)

    def values_of(self, device: Device, tensor: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401 (the library's)
        """Return the values, read in the library's own way."""
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
