"""The cpu device: state is host memory, every call is done when it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...contract.capabilities import Capabilities
from ...contract.markers import hookimpl
from ...memory.copies import CopyTicket, HostCopy
from ...memory.dlpack import DLPACK_CPU
from ...memory.plan import WritePlan
from ...memory.views import View
from ...ranks.host_group import HOST
from ...slots import update as reference
from ...tickets import DONE, Ticket
from ..base import check_index, check_options
from ..sync import SyncDevice
from .communicator import HostCommunicator, host_communicator
from .memory import HostMemory, Spreader, resolve_host

if TYPE_CHECKING:
    from ...contract.device import Device
    from ...group import Group
    from ...memory.values import Value
    from ...memory.views import ByteRange, Memory
    from ...slots.state import SlotState
    from ...slots.step import Step
    from ...streams import Stream

SYNCHRONOUS = "host memory: no copy engine takes the write, so it is done when the call returns"


class CpuDevice(SyncDevice):
    """Host memory as a device. Targets: state views, writable NumPy arrays, tensors of Paddle and torch there."""

    name = "cpu"
    dlpack_type = DLPACK_CPU
    capabilities = Capabilities(
        async_h2d=False,
        async_d2h=False,
        fused_scatter=True,
        pinned_host=False,
        can_hold_stream=False,
        collective=HOST,
        several_memories=True,
        fallbacks={"async_set_value": SYNCHRONOUS},
    )

    def __init__(self, index: int, options: Mapping[str, object]) -> None:
        check_index(self.name, index, 1)
        check_options(self.name, options)
        super().__init__(index)

    def allocate(self, nbytes: int) -> HostMemory:
        """Allocate host memory on a 64-byte boundary."""
        self.check_open()
        self.count("allocations")
        return HostMemory.allocate(self, nbytes)

    def resolve(self, target: object) -> View:
        """Return a view of a writable NumPy array, or of a tensor of Paddle or torch there, sharing its memory."""
        return target if isinstance(target, View) else resolve_host(self, target)

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Write the plan into host memory, as :func:`hal_core.memory.plan.apply_to_host` would."""
        return self.submit_all([plan], stream)

    def submit_all(self, plans: Sequence[WritePlan], stream: Stream) -> Ticket:
        """The same for plans of several blocks."""
        if not all(plan.empty for plan in plans):
            self.count("launches")
            self.count("submissions")
        for plan in plans:
            self._write(plan)
        return DONE

    def _write(self, plan: WritePlan) -> None:
        memory = plan.memory
        assert isinstance(memory, HostMemory)
        if plan.records is not None:
            scatter_map = plan.records.scatter_map
            spreader = memory.spreader
            if spreader is None or spreader.scatter_map is not scatter_map:
                spreader = memory.spreader = Spreader(memory, scatter_map)
            spreader.write(plan.records.slots, plan.records.data)
        if len(plan.writes):
            memory.write(plan.writes, plan.payload)

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy byte ranges; the copies are complete on return."""
        assert isinstance(memory, HostMemory)
        self.count("copies_out", len(parts))
        return HostCopy([memory.buffer[part.offset : part.end].copy() for part in parts])

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Run the reference on the state's own memory."""
        fields = {name: host_view(state.view(name)) for name in reference.STEP_FIELDS}
        reference.update_inputs(fields, state.sizes, speculative=step.speculative)
        return DONE

    def open_communicator(self, group: Group) -> HostCommunicator:
        """Open the group over hal's own collectives; see :func:`hal_core.devices.open_groups`."""
        return host_communicator(group, _bytes)

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Assign with NumPy; the value is there on return (G7)."""
        self._counts["fallbacks"] += 1
        view = target.host
        if view is None:
            view = host_view(target)
        if type(value) is View:
            source = host_view(value)
            view[...] = source.copy().reshape(view.shape)
        else:
            view[...] = value
        return DONE


def _bytes(memory: Memory, part: ByteRange) -> memoryview:
    assert isinstance(memory, HostMemory)
    return memory.host_bytes[part.offset : part.end]


def host_view(view: View) -> np.ndarray[Any, Any]:
    """Return the NumPy array over a view of host memory; made once for each view."""
    if view.host is None:
        memory = view.memory
        assert isinstance(memory, HostMemory)
        view.host = np.ndarray(view.shape, view.dtype.storage, memory.buffer, view.offset, view.strides)
    return view.host
