"""OpenCL 1.2 by ctypes. Imports the standard library and hal's errors alone, because a probe uses it.

``cl.call("clFlush", queue)`` calls a function and raises :class:`CLError` for a status; ``cl.create("clCreateKernel",
program, name)`` returns the object that a function makes. Handles are whole numbers.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from hal_core import HalError

COMPLETE, EXECUTION_STATUS = 0, 0x11D3
READ_WRITE, ALLOC_HOST_PTR, MEM_FLAGS = 1 << 0, 1 << 4, 0x1101
MAP_READ, MAP_WRITE, BLOCKING = 1 << 0, 1 << 1, 1
PLATFORM_NAME = 0x0902
DEVICE_NAME, DEVICE_VERSION = 0x102B, 0x102F
DEVICE_TYPE, TYPE_CPU, TYPE_ALL = 0x1000, 1 << 1, 0xFFFFFFFF
CONTEXT_PLATFORM, BUILD_LOG = 0x1084, 0x1183
DEVICE_NOT_FOUND, PLATFORM_NOT_FOUND = -1, -1001
NO_ROOM = {-4: "MEM_OBJECT_ALLOCATION_FAILURE", -5: "OUT_OF_RESOURCES", -6: "OUT_OF_HOST_MEMORY", -61: "BUFFER_SIZE"}
"""Statuses that mean a lack of memory."""

_SIZE, _PTR, _UINT, _LONG = c.c_size_t, c.c_void_p, c.c_uint, c.c_ulong
_WAIT = (_UINT, _PTR, _PTR)  # events to wait for, and the event that is made
CALLS: dict[str, tuple[Any, ...]] = {
    "clGetPlatformIDs": (_UINT, _PTR, _PTR),
    "clGetPlatformInfo": (_PTR, _UINT, _SIZE, _PTR, _PTR),
    "clGetDeviceIDs": (_PTR, _LONG, _UINT, _PTR, _PTR),
    "clGetDeviceInfo": (_PTR, _UINT, _SIZE, _PTR, _PTR),
    "clBuildProgram": (_PTR, _UINT, _PTR, c.c_char_p, _PTR, _PTR),
    "clGetProgramBuildInfo": (_PTR, _PTR, _UINT, _SIZE, _PTR, _PTR),
    "clSetKernelArg": (_PTR, _UINT, _SIZE, _PTR),
    "clGetMemObjectInfo": (_PTR, _UINT, _SIZE, _PTR, _PTR),
    "clGetEventInfo": (_PTR, _UINT, _SIZE, _PTR, _PTR),
    "clSetUserEventStatus": (_PTR, c.c_int),
    "clRetainCommandQueue": (_PTR,),
    "clFlush": (_PTR,),
    "clFinish": (_PTR,),
    "clEnqueueWriteBuffer": (_PTR, _PTR, _UINT, _SIZE, _SIZE, _PTR, *_WAIT),
    "clEnqueueReadBuffer": (_PTR, _PTR, _UINT, _SIZE, _SIZE, _PTR, *_WAIT),
    "clEnqueueNDRangeKernel": (_PTR, _PTR, _UINT, _PTR, _PTR, _PTR, *_WAIT),
    "clEnqueueMarkerWithWaitList": (_PTR, *_WAIT),
    "clEnqueueBarrierWithWaitList": (_PTR, *_WAIT),
    "clEnqueueUnmapMemObject": (_PTR, _PTR, _PTR, *_WAIT),
    **{f"clRelease{kind}": (_PTR,) for kind in ("Event", "MemObject", "CommandQueue", "Kernel", "Program")},
}
"""Functions that return a status, with the types of their arguments."""
CREATES: dict[str, tuple[Any, ...]] = {
    "clCreateContext": (_PTR, _UINT, _PTR, _PTR, _PTR),
    "clCreateCommandQueue": (_PTR, _PTR, _LONG),
    "clCreateProgramWithSource": (_PTR, _UINT, _PTR, _PTR),
    "clCreateKernel": (_PTR, c.c_char_p),
    "clCreateBuffer": (_PTR, _LONG, _SIZE, _PTR),
    "clCreateUserEvent": (_PTR,),
    "clEnqueueMapBuffer": (_PTR, _PTR, _UINT, _LONG, _SIZE, _SIZE, *_WAIT),
}
"""Functions that return an object; their last argument, left out here, takes the status."""


class NoLoader(HalError, OSError):
    """The machine has no OpenCL loader."""


class CLError(HalError, RuntimeError):
    """A function of OpenCL, or a command on a queue, that failed with ``code``."""

    def __init__(self, what: str, code: int) -> None:
        name = f" ({NO_ROOM[code]})" if code in NO_ROOM else ""
        super().__init__(f"{what} gave the OpenCL status {code}{name}", cure="see the driver's own messages")
        self.code = code


def loaders() -> Iterator[c.CDLL]:
    """The OpenCL loaders of this machine: the system's, then the one inside pyopencl's wheel with pip's PoCL."""
    with contextlib.suppress(OSError):  # without any, library() raises
        yield c.CDLL("libOpenCL.so.1")
    spec = find_spec("pyopencl")  # finds the package without importing it
    libraries = Path(str(spec and spec.origin)).parent / ".libs"
    for loader, driver in zip(libraries.glob("libOpenCL*"), libraries.glob("libpocl*"), strict=False):
        os.environ.setdefault("PYOPENCL_HOME", str(libraries.parent))  # this loader crashes without it
        os.environ.setdefault("OCL_ICD_VENDORS", str(driver))
        yield c.CDLL(str(loader))


@cache
def library() -> c.CDLL:
    """The first loader that knows a platform, else the first one. Raises :class:`NoLoader` without any."""
    found = []
    for loader in loaders():
        count = c.c_uint()
        if loader.clGetPlatformIDs(0, None, c.byref(count)) == 0 and count.value:
            return loader
        found.append(loader)
    if not found:
        raise NoLoader("there is no OpenCL loader (libOpenCL.so.1)")
    return found[0]


@cache
def _function(name: str) -> Any:  # noqa: ANN401 (ctypes has no type for it)
    function = getattr(library(), name)
    function.argtypes, function.restype = (
        (CALLS[name], c.c_int) if name in CALLS else ((*CREATES[name], _PTR), c.c_void_p)
    )
    return function


def call(name: str, *arguments: object) -> None:
    """Call a function of :data:`CALLS`. Raise :class:`CLError` unless it succeeds."""
    code = _function(name)(*arguments)
    if code:
        raise CLError(name, code)


def create(name: str, *arguments: object) -> int:
    """Call a function of :data:`CREATES`; return the handle. Raise :class:`CLError` unless it succeeds."""
    code = c.c_int()
    made = _function(name)(*arguments, c.byref(code))
    if code.value:
        raise CLError(name, code.value)
    return int(made)


def _listed(name: str, absent: int, *arguments: object) -> tuple[int, ...]:
    """The handles that a listing function returns; () where it answers ``absent``."""
    count = c.c_uint()
    try:
        call(name, *arguments, 0, None, c.byref(count))
    except CLError as error:
        if error.code == absent:
            return ()
        raise
    found = (c.c_void_p * count.value)()
    call(name, *arguments, count, found, None)
    return tuple(int(handle) for handle in found if handle)


class Platform(NamedTuple):
    """A driver with its devices, which can share a context, and the process that it was started in."""

    handle: int
    devices: tuple[int, ...]
    process: int


@cache
def platform() -> Platform:
    """The first platform that has devices; without any, one that has none."""
    for handle in _listed("clGetPlatformIDs", PLATFORM_NOT_FOUND):
        found = _listed("clGetDeviceIDs", DEVICE_NOT_FOUND, handle, TYPE_ALL)
        if found:
            return Platform(handle, found, os.getpid())
    return Platform(0, (), os.getpid())


def devices() -> tuple[int, ...]:
    """The devices of the first platform that has some."""
    return platform().devices


def info(name: str, handle: int, key: int, size: int = 256) -> bytes:
    """What ``clGetDeviceInfo`` or its like writes, padded with zeros."""
    text = c.create_string_buffer(size)
    call(name, handle, key, size, text, None)
    return text.raw


def device_name(device: int) -> str:
    """The name that the driver gives the device."""
    return _text(info("clGetDeviceInfo", device, DEVICE_NAME))


def device_version(device: int) -> str:
    """The device's version of OpenCL, with the driver's own words."""
    return _text(info("clGetDeviceInfo", device, DEVICE_VERSION))


def platform_name() -> str:
    """The name that the driver gives itself."""
    return _text(info("clGetPlatformInfo", platform().handle, PLATFORM_NAME))


def _text(found: bytes) -> str:
    return found.split(b"\0")[0].decode(errors="replace")
