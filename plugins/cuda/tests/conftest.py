"""A driver that stands in for CUDA's: device memory is host memory, kernels are carried out in Python when launched.

It executes everything at once, on every stream: what it shows is what the host asked for, not when.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hal_core import StateConfig
from hal_core.runtime.bound import bind
from hal_cuda import device as device_module
from hal_cuda import launching, nccl
from hal_cuda import memory as gpu_memory
from hal_cuda.driver import Driver
from hal_cuda.structs import COPY_OUT, ENTER, FILL, PLAN, SMALL, STRIDED

OK, NOT_READY = SimpleNamespace(name="CUDA_SUCCESS"), SimpleNamespace(name="CUDA_ERROR_NOT_READY")
WRITE = np.dtype([("dst", "<u8"), ("source", "<u8"), ("nbytes", "<u4"), ("pattern", "<u4")])
SCATTER_MAP = np.dtype([("base", "<u8"), ("stride", "<u8"), ("source", "<u4"), ("nbytes", "<u4")])
PIECE = 16 << 10


def at(address, nbytes):
    """Bytes of memory as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * max(int(nbytes), 1)).from_address(int(address)))[: int(nbytes)]


def fill(address, nbytes, cycle):
    at(address, nbytes)[:] = np.resize(np.frombuffer(int(cycle).to_bytes(8, "little"), np.uint8), int(nbytes))


class StandIn:
    """Calls are answered; ``calls`` has the names of those that put work on a stream. ``fail`` names one that fails."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=OK, CUDA_ERROR_NOT_READY=NOT_READY)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1
    )
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self, kept):
        self.kept, self.number, self.calls, self.fail = kept, 100, [], ""

    def __getattr__(self, name):
        if not name.startswith("cu") or name == "cuFuncLoad":
            raise AttributeError(name)
        return lambda *arguments: (OK,)

    def _next(self):
        self.number += 1
        return OK, self.number

    def cuCtxGetCurrent(self):
        return OK, 7

    def cuDeviceGetCount(self):
        return OK, 1

    def cuDeviceGet(self, index):
        return OK, index

    def cuDevicePrimaryCtxRetain(self, device):
        return OK, 7

    def cuDeviceGetAttribute(self, attribute, device):
        return OK, (9, 0)[attribute]

    def cuStreamGetCtx(self, handle):
        return OK, 7

    def cuStreamCreate(self, flags):
        return self._next()

    def cuStreamIsCapturing(self, stream):
        return OK, 0

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return OK, 0

    def cuEventCreate(self, flags):
        return self._next()

    def cuModuleLoadData(self, code):
        return self._next()

    def cuModuleGetFunction(self, module, name):
        return OK, name.decode()

    def cuMemHostAlloc(self, nbytes, flags):
        if self.fail == "alloc":
            return SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY"), 0
        return self._allocate(nbytes)

    def CUmemPoolProps(self):
        return SimpleNamespace(location=SimpleNamespace())

    def cuMemPoolCreate(self, properties):
        return self._next()

    def cuMemAllocFromPoolAsync(self, nbytes, pool, stream):
        return self._allocate(nbytes)

    def _allocate(self, nbytes):
        block = np.full(nbytes + 256, 0xA5, np.uint8)
        address = -(-block.ctypes.data // 256) * 256
        self.kept[address] = block
        return OK, address

    def cuMemFree(self, address):
        del self.kept[address]
        return (OK,)

    cuMemFreeHost = cuMemFree

    def cuMemFreeAsync(self, address, stream):
        return self.cuMemFree(address)

    def cuMemcpyHtoD(self, to, source, nbytes):
        at(to, nbytes)[:] = at(source, nbytes)
        return (OK,)

    def cuMemcpyHtoDAsync(self, to, source, nbytes, stream):
        if self.fail == "copy":
            return (SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"),)
        self.calls.append("copy")
        return self.cuMemcpyHtoD(to, source, nbytes)

    def cuMemcpyDtoHAsync(self, to, source, nbytes, stream):
        return self.cuMemcpyHtoD(to, source, nbytes)

    def cuMemsetD32Async(self, address, word, count, stream):
        self.calls.append("memset")
        at(address, count * 4).view(np.uint32)[:] = word
        return (OK,)

    def cuStreamWaitEvent(self, stream, event, flags):
        self.calls.append(f"stream {stream} waits")
        return (OK,)

    def cuLaunchKernel(self, name, blocks, rows, _z, threads, _y, _w, _shared, stream, parameters, _extra):
        if self.fail == name:
            return (SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"),)
        self.calls.append(name)
        kernels = {
            "hal_write": (PLAN, hal_write),
            "hal_enter": (ENTER, hal_enter),
            "hal_fill": (FILL, hal_fill),
            "hal_small": (SMALL, hal_small),
            "hal_copy_out": (COPY_OUT, hal_copy_out),
            "hal_copy_strided": (STRIDED, hal_copy_strided),
        }
        dtype, kernel = kernels[name]
        place = at(parameters, 8).view(np.uint64)[0]  # fields that are parameters each come one after the other
        kernel(at(place, dtype.itemsize).view(dtype)[0], blocks, rows)
        return (OK,)


def hal_fill(p, blocks, rows):
    for i in range(p["n0"]):
        for j in range(p["n1"]):
            fill(p["dst"] + i * p["step0"] + j * p["step1"], p["nbytes"], p["cycle"])


def hal_copy_out(p, blocks, rows):
    at(p["to"], p["nbytes"])[:] = at(p["from"], p["nbytes"])


def hal_small(p, blocks, rows):
    at(p["dst"], p["nbytes"])[:] = p["data"][: p["nbytes"]]


def hal_copy_strided(p, blocks, rows):
    """As in kernels/writes.cu; the elements in any order, as threads come to run."""
    shape = [int(n) for n in p["shape"]]
    for i in np.random.default_rng(1).permutation(int(p["count"])):
        place = np.unravel_index(i, shape)
        to, source = (int(p[which] + np.dot(place, p[steps])) for which, steps in (("dst", "to"), ("src", "from")))
        at(to, p["element"])[:] = at(source, p["element"])


def hal_write(p, blocks, rows):
    """As in kernels/writes.cu."""
    block, memory = int(p["block"]), int(p["memory"])
    for write in at(block, p["writes"] * WRITE.itemsize).view(WRITE):
        if write["pattern"]:
            fill(memory + write["dst"], write["nbytes"], write["source"])
        else:
            at(memory + write["dst"], write["nbytes"])[:] = at(
                block + p["payload_at"] + write["source"], write["nbytes"]
            )
    slots_at, records_at, width = int(p["slots_at"]), int(p["records_at"]), int(p["record_bytes"])
    for i in range(p["records"]):
        slot = at(block + slots_at + 4 * i, 4).view(np.int32)[0]
        spread_record(p, slot, block + records_at + i * width)


def spread_record(p, slot, record):
    for field in at(p["spread"], p["fields"] * SCATTER_MAP.itemsize).view(SCATTER_MAP):
        to = int(p["memory"]) + int(field["base"]) + int(slot) * int(field["stride"])
        at(to, field["nbytes"])[:] = at(record + int(field["source"]), field["nbytes"])


def hal_enter(p, blocks, rows):
    """As in kernels/enter.cu."""
    memory, longest = int(p["memory"]), (rows - 3) * PIECE
    for entry in at(p["entries"], blocks * 128).view(np.int64).reshape(blocks, 16):
        (written, lengths), (source, slot, start, length, count, blocks_at, first, drafts) = (
            entry[:5].view(np.uint32).reshape(5, 2).T,
            entry[8:].tolist(),
        )
        assert (first, drafts) == (-1, 0), "on the Python path there are new requests alone"
        place = source + int(p["rows_at"])
        spread_record(p, slot, source)
        for field, value in zip(p["dynamic"], (length, length, start, count), strict=True):
            at(memory + int(field) + 4 * slot, 4).view(np.int32)[0] = value
        for i, row in enumerate(p["rows"]):
            size = int(row["size"])
            nbytes = (count if i == 3 else int(lengths[i])) * size
            to = memory + int(row["base"]) + slot * int(row["stride"])
            at(to, nbytes)[:] = at(int(p["blocks"]) + blocks_at * size if i == 3 else place, nbytes)
            fill(to + nbytes, max(0, int(written[i]) * size - nbytes), row["cycle"])
            if i != 3:
                place += -(-nbytes // 16) * 16
        assert longest >= max(int(lengths[4]), int(written[4])) * 8, "too few blocks of threads for the tokens"


def stand_in():
    """The module that builds the stand-in library."""
    spec = importlib.util.spec_from_file_location("hal_cuda_stand_in", Path(__file__).with_name("stand_in.py"))
    module = sys.modules.get(spec.name)
    if module is None:
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def open_python(options, kept, make):
    """On the Python path."""
    return make(options, StandIn(kept))


def open_native(options, kept, make):
    """On the native path, over the library that stands in for CUDA's."""
    return over_library(options, native=True)


def open_python_over_library(options, kept, make):
    """On the Python path, over the same library, which can hold streams and is strict beside captures."""
    return over_library(options, native=False)


def over_library(options, *, native):
    found = stand_in().built()
    if isinstance(found, str):
        pytest.skip(f"the native part cannot be built: {found}")
    module, library = found
    api = stand_in().Library(library)
    return device_module.CudaDevice(0, options, Driver(api, module if native else None, api.library))


PATHS = {"python": open_python, "native": open_native}
LIBRARY = {"python over the library": open_python_over_library, "native": open_native}


@pytest.fixture(params=PATHS)
def opened(request, monkeypatch):
    """Opens a cuda device over a stand-in: ``opened(options)``; its driver is ``bound.device.driver.api``."""
    monkeypatch.setattr(launching, "cubin", lambda name, arch: b"")
    monkeypatch.setattr(
        gpu_memory, "_gpus", defaultdict(gpu_memory.GpuMemory)
    )  # devices of other tests are none of ours
    found, kept = [], {}  # memory is the GPU's, whichever device takes it

    def open_with(options=None, make=lambda options, api: device_module.CudaDevice(0, options, Driver(api))):
        device = (PATHS | LIBRARY)[request.param]({"stream": 1, **(options or {})}, kept, make)
        found.append(bind(device))
        return found[-1]

    yield open_with
    for bound in found:
        bound.close()


@pytest.fixture
def library(monkeypatch):
    """What stands in for NCCL, for the product too."""
    found = stand_in().built()
    if isinstance(found, str):
        pytest.skip(f"the native part cannot be built: {found}")
    monkeypatch.setenv(nccl.VARIABLE, str(found[1].with_name(stand_in().NCCL)))
    nccl.library.cache_clear()
    yield stand_in().nccl(ctypes.CDLL(str(found[1])))
    nccl.library.cache_clear()


@pytest.fixture
def two(opened, library):
    """Makes both ranks of a group over it: ``two(timeout)``; see ``pair`` of stand_in.py."""
    made = []

    def make(timeout=20.0):
        made.extend(stand_in().pair([opened(), opened()], StateConfig(4, 16, max_draft_tokens=2), timeout))
        return made[-2:]

    yield make
    for rank in made:
        rank.open.close()
