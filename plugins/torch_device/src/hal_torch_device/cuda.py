"""torch's CUDA: streams that its pool does not know, made by the driver."""

from __future__ import annotations

import ctypes
from collections import deque
from functools import cache
from typing import Any

import torch
from hal_core import Unavailable

_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING of cuda.h: the stream waits for no work of the legacy default stream, which is torch's."""
_unused: dict[torch.device, deque[int]] = {}
"""Handles that nobody refers to, by device. None is destroyed: torch records an event on every stream that has used
pinned memory when it is freed, and ends the process where that stream is gone."""


class OwnStream(torch.cuda.ExternalStream):  # type: ignore[misc]  # torch gives it no type
    """Gives its handle back when nobody refers to it. No weak reference may do that: torch 2.11's streams of CUDA leave
    those that they have when they die, and Python crashes later, in a collection of garbage."""

    unused: deque[int]

    def __del__(self) -> None:
        self.unused.append(self.cuda_stream)


def new_stream(device: torch.device) -> OwnStream:
    """Return a stream of the GPU that has no work and no other user."""
    driver, unused = _driver(), _unused.setdefault(device, deque())
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the context current
        handle = _idle(driver, unused) or _made(driver, device)
    stream = OwnStream(handle, device=device)
    stream.unused = unused
    return stream


def _idle(driver: Any, unused: deque[int]) -> int:  # noqa: ANN401 (a library of ctypes)
    """Return an unused stream whose work is done, or 0."""
    for _ in range(len(unused)):
        if driver.cuStreamQuery(ctypes.c_void_p(unused[0])) == 0:
            return unused.popleft()
        unused.rotate(-1)
    return 0


def _made(driver: Any, device: torch.device) -> int:  # noqa: ANN401 (a library of ctypes)
    handle = ctypes.c_void_p()
    if status := driver.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING):
        what = f"the driver made no stream: cuStreamCreate gave {status}"
        raise Unavailable(what, cure="see CUresult in cuda.h, and the driver's log", device=str(device))
    return int(handle.value or 0)


@cache
def _driver() -> Any:  # noqa: ANN401 (a library of ctypes)
    """Return the library, opened once: ctypes keeps some of what each opening makes."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unavailable(f"no CUDA driver: {error}", cure="install NVIDIA's driver", device="torch_cuda") from error
