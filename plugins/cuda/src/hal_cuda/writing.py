"""How writes reach the GPU: which of the ways for which value, and how a plan becomes one upload and one launch."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.errors import InvalidValue
from hal_core.packing import ROW, Packed, cut_rows, split
from hal_core.plan import PlanBuilder, WritePlan
from hal_core.tickets import DONE, Ticket
from hal_core.views import View

from .launching import SMALL_BYTES, THREADS
from .memory import CudaMemory
from .streams import CudaStream, CudaTicket

if TYPE_CHECKING:
    from hal_core.values import Value

    from .device import CudaDevice

IN_PLACE = 16 << 10
"""Bytes; a block up to this size is read by the kernel from pinned memory itself, without an upload."""
SPAN = 1 << 20
"""Bytes; so much of a long value is staged and uploaded at once, under one fence. Smaller pieces, one uploaded while
the next is staged, were slower: each call more costs the host more than the overlap gives (docs/evidence)."""

Ints = tuple[int, ...]


class Writer:
    """Submits plans and values for one device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._driver = device.driver
        self._write32, self._write64 = device.driver.api.cuStreamWriteValue32, device.driver.api.cuStreamWriteValue64
        self._spreads: dict[int, CudaMemory] = {}
        self._uploads = device._new_stream()

    def submit(self, plan: WritePlan, stream: CudaStream) -> Ticket:
        """One upload and one launch for each staging block; a plan over the ring's limit goes in several, in order."""
        device = self._device
        packed = Packed.of(plan)
        if packed.nbytes <= device.ring.limit:
            return self._submit(plan, packed, stream)
        ticket: Ticket = DONE
        for part in split(plan, device.ring.limit):
            ticket = self._submit(part, Packed.of(part), stream)
        return ticket

    def _submit(self, plan: WritePlan, packed: Packed, stream: CudaStream) -> Ticket:
        if packed.nbytes - packed.payload_at > ROW:
            cut = cut_rows(plan)
            if cut is not plan:
                plan, packed = cut, Packed.of(cut)
        device, ring = self._device, self._device.ring
        spread = 0
        if plan.records is not None:
            adopted = self._spreads.get(id(plan.records.spread))
            if adopted is None:  # a map of no state; putting it on the GPU would wait for the device
                return self.submit(plan.flat(), stream)
            spread = adopted.address
        span = ring.take(packed.nbytes)
        try:
            packed.fill(span.buffer, plan)
            block = span.address
            if packed.nbytes > IN_PLACE:
                block = span.segment.block.mirror + span.begin  # type: ignore[attr-defined]
                self._upload(block, span.address, packed.nbytes, stream)
            if device.reads.under_way:
                device.reads.order(plan.memory, stream)
            self._launch(plan, packed, block, spread, stream)
        except BaseException:
            ring.fence(span, device.events.record(stream.handle))
            raise
        event = device.events.record(stream.handle)
        ring.fence(span, event)
        return CudaTicket(event)

    def _upload(self, block: int, address: int, nbytes: int, stream: CudaStream) -> None:
        """Copy a staging block to its mirror on a stream of its own, while ``stream`` is still busy with other work.

        The ring gives a span again only when what used it, the mirror included, is over.
        """
        uploads = self._uploads
        self._upload_to(block, address, nbytes, uploads)
        stream.wait(self._device.events.record(uploads.handle))

    def _launch(self, plan: WritePlan, packed: Packed, block: int, spread: int, stream: CudaStream) -> None:
        kernel, counts = self._device.kernels.write, self._device._counts
        records = plan.records
        fields = 0 if records is None else len(records.spread)
        kernel.pack(
            plan.memory.address,
            block,
            spread,
            packed.writes,
            packed.records,
            fields,
            packed.record_bytes,
            packed.slots_at,
            packed.records_at,
            packed.payload_at,
        )
        kernel.launch(packed.writes + packed.records, THREADS, stream.handle)
        counts["launches"] += 1
        counts["submissions"] += 1

    def adopt(self, table: np.ndarray[Any, np.dtype[np.void]]) -> int:
        """Put a state's spread table on the device, where it is until the table goes; its address there."""
        data = np.ascontiguousarray(table).view(np.uint8)
        memory = CudaMemory.allocate(self._device, self._driver, data.nbytes)
        self._device.count("allocations")
        self._driver.ok(self._driver.api.cuMemcpyHtoD(memory.address, data.ctypes.data, data.nbytes), "cuMemcpyHtoD")
        self._spreads[id(table)] = memory
        weakref.finalize(table, self._spreads.pop, id(table), None)
        return memory.address

    def set_value(self, target: View, value: Value, stream: CudaStream) -> Ticket:
        """Write a converted value into a view."""
        device = self._device
        if device.reads.under_way:
            device.reads.order(target.memory, stream)
        if type(value) is View:
            return self._copy(target, value, stream)
        shape, steps, run = target.collapsed()
        if not isinstance(value, np.ndarray):
            if not shape and run in (4, 8):
                return self._write_word(target, value, run, stream)  # type: ignore[arg-type]
            if len(shape) <= 2:
                return self._fill(target, value, shape, steps, run, stream)  # type: ignore[arg-type]
        elif not shape:
            return self._contiguous(target, value, stream)
        builder = PlanBuilder(target.memory)
        offsets, nbytes = target.runs()
        if isinstance(value, np.ndarray):
            builder.copy(offsets, nbytes, np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        else:
            builder.fill(offsets, nbytes, value)  # type: ignore[arg-type]
        return self.submit(builder.build(), stream)

    def _write_word(self, target: View, value: np.generic, run: int, stream: CudaStream) -> Ticket:
        """4 or 8 neighbouring bytes: the driver's own stream write, which costs the host less than any launch."""
        data = value.tobytes()
        word = int.from_bytes(data * (run // len(data)), "little")
        address = target.memory.address + target.offset
        if address % run:
            return self._fill(target, value, (), (), run, stream)
        write = self._write64 if run == 8 else self._write32
        (status,) = write(stream.handle, address, word, 0)
        if status != self._driver.success:
            self._driver.ok((status,), "cuStreamWriteValue")
        return self._launched(stream)

    def _fill(self, target: View, value: np.generic, shape: Ints, steps: Ints, run: int, stream: CudaStream) -> Ticket:
        """One launch, no staging: the element travels in the parameters."""
        pattern = value.tobytes()
        kernel = self._device.kernels.fill
        n0, n1 = (1, 1, *shape)[-2:]
        step0, step1 = (0, 0, *steps)[-2:]
        cycle = int.from_bytes(pattern * (8 // len(pattern)), "little")
        kernel.pack(target.memory.address + target.offset, cycle, run, n0, n1, step0, step1)
        runs = n0 * n1
        blocks = -(-runs // THREADS) if run <= 16 else runs
        kernel.launch(min(blocks, 4096), THREADS, stream.handle)
        return self._launched(stream)

    def _contiguous(self, target: View, value: np.ndarray[Any, Any], stream: CudaStream) -> Ticket:
        """A value for neighbouring bytes: in the parameters when small, else staged and uploaded."""
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        address = target.memory.address + target.offset
        if data.nbytes <= SMALL_BYTES:
            kernel = self._device.kernels.small
            params = kernel.params
            params["dst"], params["nbytes"] = address, data.nbytes
            params["data"][: data.nbytes] = data
            kernel.launch(1, THREADS, stream.handle)
            return self._launched(stream)
        device, ring = self._device, self._device.ring
        most = min(SPAN, ring.limit)
        ticket: Ticket = DONE
        for at in range(0, data.nbytes, most):
            span = ring.take(min(most, data.nbytes - at))
            try:
                span.buffer[:] = data[at : at + span.nbytes]
                self._upload_to(address + at, span.address, span.nbytes, stream)
            finally:
                event = device.events.record(stream.handle)
                ring.fence(span, event)
            ticket = CudaTicket(event)
        return ticket

    def _upload_to(self, address: int, source: int, nbytes: int, stream: CudaStream) -> None:
        (status,) = self._driver.api.cuMemcpyHtoDAsync(address, source, nbytes, stream.handle)
        if status is not self._driver.success:
            self._driver.ok((status,), "cuMemcpyHtoDAsync")
        counts = self._device._counts
        counts["uploads"] += 1
        counts["submissions"] += 1

    def _copy(self, target: View, source: View, stream: CudaStream) -> Ticket:
        """Between two views of this device, in stream order."""
        if len(target.shape) > 4 or len(source.shape) > 4:
            raise InvalidValue("a device value of more than four axes", cure="reshape it", argument="value")
        if source.shape != target.shape:
            source = _reshaped(source, target)
        kernel = self._device.kernels.copy_strided
        params = kernel.params
        pad = 4 - len(target.shape)
        params["dst"] = target.memory.address + target.offset
        params["src"] = source.memory.address + source.offset
        params["element"], params["count"] = target.dtype.itemsize, target.size
        params["shape"] = (1,) * pad + target.shape
        params["to"] = (0,) * pad + target.strides
        params["from"] = (0,) * pad + source.strides
        kernel.launch(min(-(-target.size // THREADS), 4096), THREADS, stream.handle)
        ticket = self._launched(stream)
        ticket.keep = (target.memory, source.memory)
        return ticket

    def _launched(self, stream: CudaStream) -> CudaTicket:
        counts = self._device._counts
        counts["launches"] += 1
        counts["submissions"] += 1
        return CudaTicket(self._device.events.record(stream.handle))


def _reshaped(source: View, target: View) -> View:
    """A contiguous source in the target's shape. Raises where the source would have to be copied first."""
    shape, _, _ = source.collapsed()
    if shape:
        raise InvalidValue(
            f"a strided device value of shape {source.shape} for a target of shape {target.shape}",
            cure="give a contiguous value, or one of the target's shape",
            argument="value",
        )
    return View.contiguous(source.memory, source.offset, target.shape, source.dtype, source.owner)
