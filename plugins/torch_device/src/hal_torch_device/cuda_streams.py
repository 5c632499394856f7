"""Streams of CUDA that torch's pool does not know, made by the driver."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from hal_core import Unavailable

_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING of cuda.h: the stream waits for no work of the legacy default stream, which is torch's."""


def new_stream(device: torch.device) -> Any:  # noqa: ANN401 (a torch.cuda.ExternalStream)
    """Return a new stream of the GPU; the driver destroys it once nobody refers to it and its work is done."""
    handle, driver = ctypes.c_void_p(), _driver()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the context current
        status = driver.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING)
    if status:
        what = f"the driver made no stream: cuStreamCreate gave {status}"
        raise Unavailable(what, cure="see CUresult in cuda.h, and the driver's log", device=str(device))
    stream = torch.cuda.ExternalStream(handle.value, device=device)
    weakref.finalize(stream, driver.cuStreamDestroy_v2, handle)
    return stream


def _driver() -> Any:  # noqa: ANN401 (a library of ctypes)
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unavailable(f"no CUDA driver: {error}", cure="install NVIDIA's driver", device="torch_cuda") from error
