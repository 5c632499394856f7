"""The primitives of :class:`hal_core.devices.AsyncDevice` over OpenCL."""

from __future__ import annotations

import ctypes as c
import itertools
import math
import operator
import os
import weakref
from collections import Counter
from collections.abc import Sequence

from hal_core import OutOfMemory, View
from hal_core.devices import Launch, PlanLaunch, Primitives

from . import cl
from .runtime import Event, Queue, context, program
from .structs import AXES, Plan, Strided, Update

SHIFT = 40
"""OpenCL has handles and no addresses. An address of this device is a buffer's number, shifted, and a byte of it."""
BELOW = (1 << SHIFT) - 1
ALIGNED = 256
"""Bytes to which host memory is aligned."""
LANES = 64
"""Work items of a group that share one run of bytes; 1 on a CPU, where items of a group follow each other."""


class OpenCLPrimitives(Primitives):
    """One OpenCL device. ``ran`` counts what reached its driver."""

    rerecords = True  # each record makes another event of the driver's

    def __init__(self, device: int) -> None:
        self.device, self.ran = device, Counter[str]()
        self._numbers = itertools.count(1)
        self._buffers: dict[int, int] = {}  # number to buffer
        self._host: dict[int, tuple[int, int, int]] = {}  # address to buffer, and where it is mapped, from and to
        self._maps = Queue(device, Counter())  # for mapping alone, so that it never waits for a stream's work
        self._kernels = {
            name: cl.create("clCreateKernel", program(), name.encode()) for name in ("scatter", "strided", "update")
        }
        kind = int.from_bytes(cl.info("clGetDeviceInfo", device, cl.DEVICE_TYPE, 8), "little")
        self._lanes = 1 if kind & cl.TYPE_CPU else LANES
        end = weakref.finalize(self, _release, os.getpid(), self._maps.handle, tuple(self._kernels.values()))
        end.atexit = False

    @property
    def buffers(self) -> int:
        """Buffers that were made and not released."""
        return len(self._buffers) + len(self._host)

    # -- streams and events -------------------------------------------------------------------------------------------

    def stream_create(self) -> Queue:
        return Queue(self.device, self.ran)

    def stream_destroy(self, stream: Queue) -> None:
        cl.call("clReleaseCommandQueue", stream.handle)

    def stream_wait(self, stream: Queue, event: Event) -> None:
        if event.handle:
            stream.wait(event.handle)

    def event_create(self) -> Event:
        return Event()

    def event_destroy(self, event: Event) -> None:
        event.release()

    def event_record(self, event: Event, stream: Queue) -> None:
        stream.record(event)

    def event_query(self, event: Event) -> bool:
        return event.status() <= cl.COMPLETE

    def event_error(self, event: Event) -> Exception | None:
        code = event.status()
        return cl.CLError("work on a queue", code) if code < cl.COMPLETE else None

    # -- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        number = next(self._numbers)
        self._buffers[number] = _buffer(cl.READ_WRITE, nbytes)
        return number << SHIFT

    def free(self, address: int) -> None:
        cl.call("clReleaseMemObject", self._buffers.pop(address >> SHIFT))

    def allocate_host(self, nbytes: int) -> int:
        size = nbytes + ALIGNED
        buffer, flags = _buffer(cl.READ_WRITE | cl.ALLOC_HOST_PTR, size), cl.MAP_READ | cl.MAP_WRITE
        try:
            mapped = cl.create(
                "clEnqueueMapBuffer", self._maps.handle, buffer, cl.BLOCKING, flags, 0, size, 0, None, None
            )
        except cl.CLError as error:
            cl.call("clReleaseMemObject", buffer)
            raise _out_of_memory(nbytes, error) from error
        # The last arrays over host memory may be collected together with the device, and after it.
        cl.call("clRetainCommandQueue", self._maps.handle)
        address = -(-mapped // ALIGNED) * ALIGNED
        self._host[address] = buffer, mapped, mapped + size
        return address

    def free_host(self, address: int) -> None:
        buffer, mapped, _ = self._host.pop(address)
        cl.call("clEnqueueUnmapMemObject", self._maps.handle, buffer, mapped, 0, None, None)
        cl.call("clReleaseMemObject", buffer)
        cl.call("clFlush", self._maps.handle)
        cl.call("clReleaseCommandQueue", self._maps.handle)

    def is_mapped(self, address: int) -> bool:
        """Whether a buffer is mapped there that lies in host memory of the driver's, as the driver says."""
        buffer = next((buffer for buffer, begin, end in self._host.values() if begin <= address < end), 0)
        flags = cl.info("clGetMemObjectInfo", buffer, cl.MEM_FLAGS, 8) if buffer else b""
        return bool(int.from_bytes(flags, "little") & cl.ALLOC_HOST_PTR)

    # -- copies and launches ------------------------------------------------------------------------------------------

    def copy_in(self, target: int, source: int, nbytes: int, stream: Queue) -> None:
        stream.write(self._buffers[target >> SHIFT], target & BELOW, source, nbytes)

    def copy_out(self, target: int, source: int, nbytes: int, stream: Queue) -> None:
        stream.read(self._buffers[source >> SHIFT], source & BELOW, target, nbytes)

    def launch(self, launch: Launch, block: int, stream: Queue) -> None:
        assert isinstance(launch, PlanLaunch)
        packed = launch.packed
        plan = Plan(
            launch.address & BELOW, launch.nbytes, block & BELOW, launch.scatter_map & BELOW,
            packed.records, launch.fields, launch.slots,
            packed.writes, packed.record_bytes, packed.slots_at, packed.records_at, packed.payload_at,
        )  # fmt: skip
        scatter_map = launch.scatter_map if packed.records else block  # the argument must be some buffer
        groups = packed.records * launch.fields + packed.writes
        self._run("scatter", (launch.address, block, scatter_map), plan, stream, groups, self._lanes)

    def copy_strided(self, view: View, together: int, stream: Queue, *, inward: bool) -> int:
        """Copy a view's elements to the bytes at ``together``, or with ``inward`` back. Return the launches."""
        shape, strides, run = view.collapsed()
        outer, inner = shape[:-AXES], shape[-AXES:]
        launches = 0
        for index in itertools.product(*map(range, outer)):
            offset = (view.memory.address & BELOW) + view.offset + sum(map(operator.mul, index, strides))
            packed = (together & BELOW) + launches * math.prod(inner) * run
            last = Strided(offset, packed, run, inward, len(inner), inner, strides[-AXES:])
            self._run("strided", (view.memory.address, together), last, stream, math.prod(inner))
            launches += 1
        return launches

    def update(self, address: int, slots: int, update: Update, stream: Queue) -> None:
        """Launch a step's update over all slots of the state at ``address``."""
        self._run("update", (address,), update, stream, slots)
        self.ran["updates"] += 1

    def _run(
        self, name: str, addresses: Sequence[int], last: c.Structure, stream: Queue, groups: int, lanes: int = 1
    ) -> None:
        """Launch a kernel whose arguments are the buffers of some addresses, then a structure."""
        kernel = self._kernels[name]
        for index, address in enumerate(addresses):
            handle = c.c_void_p(self._buffers[address >> SHIFT])
            cl.call("clSetKernelArg", kernel, index, c.sizeof(handle), c.byref(handle))
        cl.call("clSetKernelArg", kernel, len(addresses), c.sizeof(last), c.byref(last))
        stream.launch(kernel, groups, lanes)


def _buffer(flags: int, nbytes: int) -> int:
    try:
        return cl.create("clCreateBuffer", context(), flags, max(nbytes, 1), None)
    except cl.CLError as error:
        raise _out_of_memory(nbytes, error) from error


def _out_of_memory(nbytes: int, error: cl.CLError) -> Exception:
    """The contract's error where the device lacks memory, else the error itself."""
    if error.code not in cl.NO_ROOM:
        return error
    return OutOfMemory(f"{nbytes} bytes: {error.what}", cure="make the state or the ring smaller")


def _release(process: int, queue: int, kernels: Sequence[int]) -> None:
    """Give a device's own objects back; in a fork's child they are the parent's."""
    if process == os.getpid():
        for kernel in kernels:
            cl.call("clReleaseKernel", kernel)
        cl.call("clReleaseCommandQueue", queue)
