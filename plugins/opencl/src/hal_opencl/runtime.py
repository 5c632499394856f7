"""OpenCL's objects as the primitives use them: the context, the program, queues and events."""

from __future__ import annotations

import ctypes as c
import os
from collections import Counter
from functools import cache
from pathlib import Path
from typing import ClassVar

from hal_core import DeviceClosed, PluginError

from . import cl


def check_process() -> None:
    """Raise :class:`DeviceClosed` in a fork's child of a process that has used OpenCL: its threads are gone."""
    if os.getpid() != cl.platform().process:
        raise DeviceClosed(
            "OpenCL was used in the process that this one was forked from",
            cure="start the process with multiprocessing's method spawn, or use OpenCL after the fork alone",
            device="opencl",
        )


@cache
def context() -> int:
    """The process's context of all devices: a queue can only wait for events of its own context."""
    platform, found, _ = cl.platform()
    properties = (c.c_ssize_t * 3)(cl.CONTEXT_PLATFORM, platform, 0)
    return cl.create("clCreateContext", properties, len(found), (c.c_void_p * len(found))(*found), None, None)


@cache
def program() -> int:
    """The kernels, compiled once a process for all devices; drivers such as PoCL keep them on disk besides."""
    text = (Path(__file__).parent / "kernels.cl").read_bytes()
    made = cl.create("clCreateProgramWithSource", context(), 1, c.byref(c.c_char_p(text)), None)
    try:
        cl.call("clBuildProgram", made, 0, None, b"-cl-std=CL1.2", None, None)
    except cl.CLError as error:
        log = c.create_string_buffer(1 << 14)
        cl.call("clGetProgramBuildInfo", made, cl.devices()[0], cl.BUILD_LOG, len(log), log, None)
        what = f"the driver does not compile the kernels: {log.value.decode(errors='replace').strip()}"
        raise PluginError(what, cure="update the driver", device="opencl") from error
    return made


class Event:
    """An event that can be recorded again: the handle of its last record, 0 before the first.

    ``alive``: handles of all events of the process that were not released.
    """

    __slots__ = ("handle",)
    alive: ClassVar[int] = 0

    def __init__(self) -> None:
        self.handle = 0

    def status(self) -> int:
        """0 once it has passed, negative if the work failed, else positive."""
        if not self.handle:
            return cl.COMPLETE
        code = c.c_int()
        cl.call("clGetEventInfo", self.handle, cl.EXECUTION_STATUS, 4, c.byref(code), None)
        return code.value

    def release(self) -> None:
        """Give the handle back."""
        handle, self.handle = self.handle, 0
        if handle:
            Event.alive -= 1
            cl.call("clReleaseEvent", handle)


class Queue:
    """A stream: an in-order command queue. ``ran`` counts the commands that reached the driver, by kind."""

    __slots__ = ("handle", "ran")

    def __init__(self, device: int, ran: Counter[str]) -> None:
        self.handle, self.ran = cl.create("clCreateCommandQueue", context(), device, 0), ran

    def write(self, buffer: int, offset: int, source: int, nbytes: int) -> None:
        """Copy host memory to a buffer."""
        cl.call("clEnqueueWriteBuffer", self.handle, buffer, 0, offset, nbytes, source, 0, None, None)
        self.ran["uploads"] += 1

    def read(self, buffer: int, offset: int, target: int, nbytes: int) -> None:
        """Copy a buffer to host memory."""
        cl.call("clEnqueueReadBuffer", self.handle, buffer, 0, offset, nbytes, target, 0, None, None)
        self.ran["copies_out"] += 1

    def launch(self, kernel: int, groups: int, lanes: int) -> None:
        """Launch a kernel with the arguments it has now."""
        items, local = c.c_size_t(groups * lanes), c.c_size_t(lanes)
        cl.call("clEnqueueNDRangeKernel", self.handle, kernel, 1, None, c.byref(items), c.byref(local), 0, None, None)
        self.ran["launches"] += 1

    def record(self, event: Event) -> None:
        """Let ``event`` pass after the work so far, and send all of it to the device."""
        made = c.c_void_p()
        cl.call("clEnqueueMarkerWithWaitList", self.handle, 0, None, c.byref(made))
        event.release()
        event.handle = made.value or 0
        Event.alive += 1
        cl.call("clFlush", self.handle)  # neither a query nor another queue's wait makes the work begin

    def wait(self, event: int) -> None:
        """Let later work wait for an event of this context."""
        cl.call("clEnqueueBarrierWithWaitList", self.handle, 1, c.byref(c.c_void_p(event)), None)
