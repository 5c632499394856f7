"""The stand-in for the CUDA driver as a library (driver.c), built once, and the bindings over it."""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import ClassVar

from hal_core import Group
from hal_core.devices import OpenGroup
from hal_core.ranks.watchdog import Watchdog
from hal_cuda import building, collectives

HERE = Path(__file__).parent
FOLDER, NCCL = "HAL_STAND_IN", "libnccl.so.2"
P, S = ctypes.c_void_p, ctypes.c_size_t
FAILED = "the compiler failed"


@cache
def built():
    """Return ``(native module, path of the driver's library)``, or why there is no compiler. The stand-in for NCCL is
    in the same folder. ``HAL_STAND_IN`` names a folder in which another process has built them. Raises if the sources
    do not compile, as skipped tests would hide that."""
    if built_before := os.environ.get(FOLDER):
        return loaded(Path(built_before) / building.NAME), Path(built_before) / "libdriver.so"
    if shutil.which("c++") is None:
        return "no C++ compiler, for the kernel of update_inputs"
    try:
        with one_at_a_time() as folder:
            made, library = folder / building.NAME, folder / "libdriver.so"
            if not (folder / NCCL).exists():
                build(folder, library)
    except building.NotBuilt as error:
        if FAILED in str(error):
            raise
        return str(error)
    return loaded(made), library


@contextmanager
def one_at_a_time():
    """Lock the folder shared by this run's processes: the first process builds, the rest find its files."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        yield Path(tempfile.mkdtemp(prefix="hal-stand-in-"))
        return
    folder = Path(tempfile.gettempdir()) / f"hal-stand-in-{run}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def build(folder, library):
    """Build the native part, the stand-in for CUDA's library, and last the one for NCCL's."""
    building.build(folder)
    kernel = folder / "update.o"
    flags = ["-O1", "-Wall", "-Wextra", "-fPIC"]
    sources = ["-I", str(Path(building.__file__).with_name("kernels"))]
    kernels = [
        "-std=c++17",
        "-fno-exceptions",
        "-fno-rtti",
        "-Wno-unknown-pragmas",
        "-Wno-maybe-uninitialized",
        *sources,
    ]
    subprocess.run(["c++", *flags, *kernels, "-c", str(HERE / "update.cpp"), "-o", str(kernel)], check=True)
    flags += ["-std=gnu11", "-shared", "-pthread"]
    subprocess.run([*building.compiler(), *flags, str(HERE / "driver.c"), str(kernel), "-o", str(library)], check=True)
    subprocess.run([*building.compiler(), *flags, str(HERE / "nccl.c"), "-o", str(folder / NCCL)], check=True)


def loaded(made):
    """Import the native part."""
    spec = importlib.util.spec_from_file_location("hal_cuda._native", made)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nccl(driver):
    """Return the stand-in for NCCL, over that for the driver; ``HAL_CUDA_NCCL`` must name it."""
    library = ctypes.CDLL(str(built()[1].with_name(NCCL)))
    library.nccl_calls.restype = ctypes.c_char_p
    library.nccl_over(ctypes.cast(driver.stand_in_call, P), ctypes.cast(driver.stand_in_forbidden, P))
    for tell in (library.nccl_error, library.nccl_hang, library.nccl_fail):
        tell(0)
    return library


def pair(bounds, sizes, timeout):
    """Open both ranks of a group in one process: each with ``bound``, ``state``, ``made``, ``group``, and ``open``."""
    ids, ranks = Queue(), [None, None]
    ends = [{1 - me: end} for me, end in enumerate(socket.socketpair())]

    def join(me):
        def share(data):
            if me == 0:
                ids.put(data)
            return data if me == 0 else ids.get()

        device, among = bounds[me].device, Group((0, 1), me)
        made = device.make_group((0, 1), me, share, timeout)
        ends[me][1 - me].setblocking(False)
        group = OpenGroup((0, 1), made, Watchdog(me, ends[me], timeout, made.abort))
        calls = device.driver.native.calls
        device._communicators[among.ranks] = collectives.NativeCommunicator(device, among, group, calls.broadcast)
        ranks[me] = SimpleNamespace(bound=bounds[me], made=made, group=among, open=group)
        ranks[me].state = bounds[me].state(sizes)
        bounds[me].open_group(state=ranks[me].state, group=among)

    met, threads = [], []
    for me in (0, 1):
        threads.append(threading.Thread(target=lambda me=me: met.append(failing(lambda: join(me)))))
        threads[-1].start()
    for thread in threads:
        thread.join(30)
    assert met == [None, None]
    return ranks


def failing(call):
    """Return the error that a call raises."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 (it is the result)
        return error
    return None


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_LAUNCH_TIMEOUT = 702
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905
    CUDA_ERROR_CAPTURED_EVENT = 907


class Calls(Sequence):
    """The names of the calls that put work on a stream."""

    def __init__(self, library):
        self._library = library

    def __len__(self):
        return self._library.stand_in_noted()

    @property
    def relaxed(self):
        """The calls made while this thread's capture mode was relaxed, which allowed them."""
        return self._library.stand_in_relaxed().decode().split()

    def __getitem__(self, at):
        at = range(len(self))[at]
        if isinstance(at, range):
            return [self[one] for one in at]
        text = self._library.stand_in_note(at).decode()
        return f"stream {int(text[6:], 16)} waits" if text.startswith("waits ") else text

    def __delitem__(self, at):
        self._library.stand_in_forget()

    def clear(self):
        self._library.stand_in_forget()


class Library:
    """The bindings' interface over a copy of the library. ``fail`` names a call that fails; ``calls``: see above."""

    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1
    )
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL=9)
    FORBIDDEN = frozenset(
        ("cuModuleLoadData", "cuModuleUnload", "cuStreamSynchronize", "cuMemPoolCreate", "cuMemPoolDestroy")
    )
    """Calls answered here that a capture forbids, as found on an H200 (driver 580, which allows lazy loading). The
    library checks its own calls itself."""
    TYPES: ClassVar = {
        "cuMemcpyHtoDAsync": ("cuMemcpyHtoDAsync_v2", P, P, S, P),
        "cuMemcpyDtoHAsync": ("cuMemcpyDtoHAsync_v2", P, P, S, P),
        "cuMemsetD32Async": ("cuMemsetD32Async", P, ctypes.c_uint, S, P),
        "cuLaunchKernel": ("cuLaunchKernel", P, *[ctypes.c_uint] * 7, P, P, P),
        "cuEventRecord": ("cuEventRecord", P, P),
        "cuGraphLaunch": ("cuGraphLaunch", P, P),
        "cuEventQuery": ("cuEventQuery", P),
        "cuEventSynchronize": ("cuEventSynchronize", P),
        "cuEventDestroy": ("cuEventDestroy_v2", P),
        "cuStreamWaitEvent": ("cuStreamWaitEvent", P, P, ctypes.c_uint),
        "cuStreamQuery": ("cuStreamQuery", P),
        "cuMemFreeHost": ("cuMemFree_v2", P),
        "cuCtxSetCurrent": ("cuCtxSetCurrent", P),
        "cuCtxPushCurrent": ("cuCtxPushCurrent_v2", P),
    }

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.library.stand_in_note.restype = ctypes.c_char_p
        self.library.stand_in_relaxed.restype = ctypes.c_char_p
        self.library.stand_in_function.restype = P
        self.library.stand_in_count.restype = ctypes.c_long
        self.library.stand_in_hold.argtypes = self.library.stand_in_capture.argtypes = P, ctypes.c_int
        self.library.stand_in_replay.argtypes = (P,)
        self.library.stand_in_forget()
        self.library.stand_in_limit(1 << 30)
        self.library.stand_in_work_limit(1 << 30)
        self.calls = Calls(self.library)
        for name, (symbol, *types) in self.TYPES.items():
            function = getattr(self.library, symbol)
            function.argtypes = types
            setattr(self, name, lambda *given, call=function: (CUresult(call(*given)),))

    def __getattr__(self, name):
        if not name.startswith("cu") or name == "cuFuncLoad":
            raise AttributeError(name)
        return lambda *arguments: (self._allowed(name),)

    def _allowed(self, name):
        forbidden = name in self.FORBIDDEN and self.library.stand_in_forbidden(name.encode())
        return CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED if forbidden else CUresult.CUDA_SUCCESS

    def __setattr__(self, name, value):
        if name == "fail":
            self.library.stand_in_fail(value.encode())
        object.__setattr__(self, name, value)

    def _made(self, call, *arguments):
        out = P()
        status = CUresult(getattr(self.library, call)(ctypes.byref(out), *arguments))
        return status, out.value or 0

    def cuDeviceGetCount(self):
        return CUresult.CUDA_SUCCESS, 1

    def cuCtxGetCurrent(self):
        return self._made("cuCtxGetCurrent")

    def cuCtxPopCurrent(self):
        return self._made("cuCtxPopCurrent_v2")

    def cuDeviceGet(self, index):
        return CUresult.CUDA_SUCCESS, index

    def cuDevicePrimaryCtxRetain(self, device):
        return CUresult.CUDA_SUCCESS, 7

    def cuPointerGetAttribute(self, attribute, address):
        return CUresult.CUDA_SUCCESS, 0

    def cuStreamGetCtx(self, handle):
        return CUresult.CUDA_SUCCESS, 7

    def cuDeviceGetAttribute(self, attribute, device):
        return CUresult.CUDA_SUCCESS, (9, 0)[attribute]

    def cuStreamCreate(self, flags):
        return self._made("cuStreamCreate", flags)

    def cuEventCreate(self, flags):
        return self._made("cuEventCreate", flags)

    def cuEventElapsedTime(self, earlier, event):
        out = ctypes.c_float()
        status = self.library.cuEventElapsedTime(ctypes.byref(out), P(earlier), P(event))
        return CUresult(status), out.value

    def cuModuleLoadData(self, code):
        if not self.library.stand_in_current():
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, 0
        return self._allowed("cuModuleLoadData"), 5

    def cuStreamIsCapturing(self, stream):
        state = ctypes.c_int(0)
        status = self.library.cuStreamIsCapturing(P(stream), ctypes.byref(state))
        return CUresult(status), state.value

    def cuThreadExchangeStreamCaptureMode(self, mode):
        before = ctypes.c_int(mode)
        self.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(before))
        return CUresult.CUDA_SUCCESS, before.value

    def cuModuleGetFunction(self, module, name):
        return CUresult.CUDA_SUCCESS, self.library.stand_in_function(name)

    def CUmemPoolProps(self):
        return SimpleNamespace(location=SimpleNamespace())

    def cuMemPoolCreate(self, properties):
        return self._allowed("cuMemPoolCreate"), 6

    def cuMemHostAlloc(self, nbytes, flags):
        return self._made("cuMemAlloc_v2", S(nbytes), 1)

    def cuMemAllocFromPoolAsync(self, nbytes, pool, stream):
        return self._made("cuMemAlloc_v2", S(nbytes), 0)

    def cuMemFreeAsync(self, address, stream):
        return self.cuMemFreeHost(address)

    def cuMemcpyHtoD(self, to, source, nbytes):
        ctypes.memmove(to, source, nbytes)
        return (CUresult.CUDA_SUCCESS,)
