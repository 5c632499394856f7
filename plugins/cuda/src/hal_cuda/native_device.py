"""The cuda device with the native part: each hook is one native call that keeps the GIL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hal_core import Ticket, View
from hal_core.devices import ADMISSION_ID, REQUEST_ROW, MirroredBlock, plan_insert

from .base import OnNative
from .copies import Copies
from .device import CudaDevice
from .driver import Driver
from .insertion import Insertion
from .native import NativeHostTable
from .primitives import NativePrimitives
from .staged_requests import StagedRequests
from .writing import Writer

if TYPE_CHECKING:
    from hal_core import AdmittedRequest, ByteRange, Device, SlotState, Stream, TaskBatch, hookimpl
    from hal_core.devices import AdmittedColumns, CopyTicket, Memory, Value

    from .context import Options
else:
    from hal_core import hookimpl


def open_gpu(index: int, options: Mapping[str, object], driver: Driver | None = None) -> CudaDevice:
    """Open a GPU: on the native path, or as the fallback if the driver has no native part."""
    found = Driver() if driver is None else driver
    return (CudaDevice if found.native is None else NativeDevice)(index, options, found)


class NativeDevice(CudaDevice, OnNative):
    """One GPU on the native path."""

    primitives_type = NativePrimitives

    def _open_parts(self, chosen: Options) -> None:
        native = self.driver.native
        assert native is not None
        self.native, self.native_columns = native, native.columns
        self.writer = Writer(self)
        make = partial(MirroredBlock, self._runtime)
        limit, stage = chosen.admission_limit, native.module.stage
        stage_all = native.module.stage_all
        self.staged_requests = StagedRequests(make, self.context.entered, limit=limit, stage=stage, stage_all=stage_all)
        self.insertion = Insertion(self)
        self.copies: Copies | None = Copies(self)

    def register_state(self, state: SlotState) -> None:
        """Describe the state to the kernels and to native code."""
        super().register_state(state)
        params = self.insertion.describe(state, self.table(state.scatter_map, state.sizes.num_slots).address)
        state.host_table.twin = NativeHostTable(self.native, state, params)

    def on_admit(self, state: SlotState, request: AdmittedRequest) -> None:
        """Stage the request's bytes in pinned memory for its insertion; from any thread."""
        self.staged_requests.put(request, request.packed[REQUEST_ROW.itemsize :])

    def on_admit_all(self, state: SlotState, columns: AdmittedColumns) -> None:
        """Stage them by one call; one by one where that cannot be."""
        if not self.staged_requests.put_all(columns):
            super().on_admit_all(state, columns)

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy one part, such as an output, by one native call; copy several parts as the base does."""
        copies = self.copies
        if copies is not None and len(parts) == 1:
            part = parts[0]
            if 0 <= part.offset <= part.offset + part.nbytes <= memory.nbytes:
                return copies.copy_out(memory, part, stream)
        return super().copy_out(memory, parts, stream)

    def put_bytes(self, memory: Memory, offset: int, data: bytes, stream: Stream) -> Ticket:
        """Write a broadcast's header by one launch that has it in its parameters."""
        own = self.working(stream)
        if self.reads.under_way:
            self.reads.order(memory, own)
        return self.writer.small(self.address_of(memory) + offset, memoryview(data), own)

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Insert staged requests, and updates of requests in slots, by one entry each; any other batch as one plan."""
        own = self.working(stream)
        if not state.companions:
            ticket = self.insertion.submit(state, tasks, own)
            if ticket is not None:
                return ticket
        ticket = self.submit(plan_insert(state, tasks), own)
        with self.staged_requests.lock:
            self.staged_requests.inserted(tasks.request_rows[:, ADMISSION_ID])
        return ticket

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write by a fill, in the launch's parameters, by one upload, or as a plan, chosen by value and target."""
        own = self.working(stream)
        return self.writer.set_value(target, value, own)

    def release(self, *, settled: bool) -> None:
        """Release the parts of the native path first."""
        self.staged_requests.close(release=settled and not self.driver.broken)
        self.insertion.close()
        self.copies = None
        super().release(settled=settled)
