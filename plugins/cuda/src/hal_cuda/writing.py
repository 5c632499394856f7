"""Writing of values to the GPU, with the method chosen by value and target."""

from __future__ import annotations

from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import InvalidValue, OutOfMemory, Ticket, View
from hal_core.devices import PlanBuilder

from .launching import Kernel
from .structs import SMALL_BYTES, THREADS

if TYPE_CHECKING:
    from hal_core.devices import AsyncStream, AsyncTicket, RecordedEvent, Value

    from .base import OnGpu

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Ints = tuple[int, ...]
MOST = 1 << 30
"""Bytes that one launch copies within the device; its kernel counts in 32 bits."""
SMALL_HEAD = Struct("<QI4x")
"""The header before the data in ``SMALL``."""


class Writer:
    """Writes values for one device."""

    def __init__(self, device: OnGpu) -> None:
        self._device = device
        self._driver, self._counts = device.driver, device._counts

    def set_value(self, target: View, value: Value, stream: AsyncStream) -> Ticket:
        """Write a converted value into a view."""
        device = self._device
        device.check_stream(stream)
        if device.reads.under_way:
            device.reads.order(target.memory, stream)
        return self._any_value(target, value, stream)

    def _any_value(self, target: View, value: Value, stream: AsyncStream) -> Ticket:
        """Write the value with the suitable method."""
        device = self._device
        if type(value) is View:
            return self._copy(target, value, stream)
        shape, steps, run = target.collapsed()
        if not isinstance(value, np.ndarray):
            if len(shape) <= 2:
                return self._fill(target, value, shape, steps, run, stream)  # type: ignore[arg-type]
        elif not shape:
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            address = target.memory.address + target.offset
            large = data.nbytes > device.staging.limit
            return self._large(address, data, stream) if large else self._contiguous(address, data, stream)
        builder = PlanBuilder(target.memory)
        offsets, nbytes = target.runs()
        if isinstance(value, np.ndarray):
            builder.copy(offsets, nbytes, np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        else:
            builder.fill(offsets, nbytes, value)  # type: ignore[arg-type]
        return device.submit(builder.build(), stream)

    def _fill(self, target: View, value: np.generic, shape: Ints, steps: Ints, run: int, stream: AsyncStream) -> Ticket:
        """Fill in one launch without staging: the element is part of the parameters. If all words are equal, the
        driver's own kernel costs the host less. (So would ``cuStreamWriteValue``, but it refuses memory of a pool:
        hal's own, and that of some frameworks.)"""
        pattern = value.tobytes()
        cycle = int.from_bytes(pattern * (8 // len(pattern)), "little")
        address = target.memory.address + target.offset
        word = cycle & 0xFFFFFFFF
        if not shape and word == cycle >> 32 and not (address | run) % 4:
            return self._memset(address, word, run // 4, stream)
        kernel = self._device.kernels.fill
        n0, n1 = (1, 1, *shape)[-2:]
        step0, step1 = (0, 0, *steps)[-2:]
        kernel.pack(address, cycle, run, n0, n1, step0, step1)
        runs = n0 * n1
        blocks = -(-runs // THREADS) if run <= 16 else runs
        return self._launch(kernel, min(blocks, 4096), stream)

    def _contiguous(self, address: int, data: Bytes, stream: AsyncStream) -> Ticket:
        """Write contiguous bytes that fit the ring: in the parameters if small, else by one upload."""
        if data.nbytes <= SMALL_BYTES:
            return self.small(address, data.data, stream)
        return self._device.ticket_type(self._upload(address, data, stream))

    def _large(self, address: int, data: Bytes, stream: AsyncStream) -> Ticket:
        """Write a value that does not fit the ring: through device memory, from which a kernel copies it in stream
        order. Above ``value_limit``, or without such memory, straight to its target in pieces, once the stream is idle.
        """
        device = self._device
        room = None
        if data.nbytes <= device.value_limit:
            with suppress(OutOfMemory):
                room = device.allocate(data.nbytes)
        if room is None:
            device.require_moving(data.nbytes, stream)
            return device.ticket_type(device.upload_pieces(address, data, stream))
        stream.wait(device.upload_pieces(room.address, data, device.uploads))
        for at in range(0, data.nbytes, MOST):
            kernel, nbytes = device.kernels.copy_out, min(MOST, data.nbytes - at)
            kernel.pack(address + at, room.address + at, nbytes)
            ticket = self._launch(kernel, -(-nbytes // (THREADS * 16)), stream)
        return ticket

    def small(self, address: int, data: memoryview, stream: AsyncStream) -> AsyncTicket:
        """Write at most ``SMALL_BYTES``, which are part of the launch's parameters."""
        kernel = self._device.kernels.small
        SMALL_HEAD.pack_into(kernel.buffer, 0, address, data.nbytes)
        kernel.buffer[SMALL_HEAD.size : SMALL_HEAD.size + data.nbytes] = data
        return self._launch(kernel, 1, stream)

    def _upload(self, address: int, data: Bytes, stream: AsyncStream) -> RecordedEvent:
        return self._device.upload(address, data, stream)

    def _copy(self, target: View, source: View, stream: AsyncStream) -> Ticket:
        """Copy between two views of this device, in stream order."""
        if len(target.shape) > 4 or len(source.shape) > 4:
            raise InvalidValue("a device value of more than four axes", cure="reshape it", argument="value")
        if source.shape != target.shape:
            source = _reshaped(source, target)
        if _overlap(source, target):  # threads write bytes that other threads have yet to read: through separate memory
            memory = self._device.allocate(target.size * target.dtype.itemsize)
            aside = View.contiguous(memory, 0, target.shape, target.dtype)
            self._copy(aside, source, stream)
            source = aside
        kernel = self._device.kernels.copy_strided
        params = kernel.params
        pad = 4 - len(target.shape)
        params["dst"] = target.memory.address + target.offset
        params["src"] = source.memory.address + source.offset
        params["element"], params["count"] = target.dtype.itemsize, target.size
        params["shape"] = (1,) * pad + target.shape
        params["to"] = (0,) * pad + target.strides
        params["from"] = (0,) * pad + source.strides
        return self._launch(kernel, min(-(-target.size // THREADS), 4096), stream)

    def _launch(self, kernel: Kernel, blocks: int, stream: AsyncStream) -> AsyncTicket:
        kernel.launch(blocks, THREADS, stream.handle)
        return self._launched(stream)

    def _memset(self, address: int, word: int, words: int, stream: AsyncStream) -> AsyncTicket:
        self._driver.ok(self._driver.on.cuMemsetD32Async(address, word, words, stream.handle), "cuMemsetD32Async")
        return self._launched(stream)

    def _launched(self, stream: AsyncStream) -> AsyncTicket:
        self._counts["launches"] += 1
        self._counts["submissions"] += 1
        return self._device.ticket(stream)


def _overlap(one: View, other: View) -> bool:
    """Return whether the byte ranges of two views overlap; by address, as two memories may be one."""
    (begin, end), (first, last) = one.bounds(), other.bounds()
    apart = one.memory.address - other.memory.address
    return begin + apart < last and first < end + apart


def _reshaped(source: View, target: View) -> View:
    """Return a contiguous source in the target's shape. Raises if the source would have to be copied first."""
    shape, _, _ = source.collapsed()
    if shape:
        raise InvalidValue(
            f"a strided device value of shape {source.shape} for a target of shape {target.shape}",
            cure="give a contiguous value, or one of the target's shape",
            argument="value",
        )
    return View.contiguous(source.memory, source.offset, target.shape, source.dtype, source.owner)
