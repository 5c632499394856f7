"""The cpu device: state is host memory, every call is done when it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import advance as reference
from ..base import DeviceBase
from ..capabilities import Capabilities
from ..errors import DeviceClosed, InvalidValue
from ..markers import hookimpl
from ..paddle_groups import PaddleCommunicator, opened
from ..plan import WritePlan
from ..sync import SyncStream
from ..tickets import DONE, Ticket
from ..transfers import CopyTicket, HostCopy
from ..views import View
from .memory import HostMemory, Spreader, paddle_bytes, resolve_host

if TYPE_CHECKING:
    from ..device import Device, Stream
    from ..group import Group
    from ..layout import ByteRange
    from ..state import SlotState
    from ..steps import Step
    from ..values import Value
    from ..views import Memory

SYNCHRONOUS = "host memory: there is no copy engine to hand the write to, so it is done when the call returns"


class CpuDevice(DeviceBase):
    """Host memory as a device. Targets are state views, writable NumPy arrays and Paddle tensors on the CPU place."""

    name = "cpu"
    capabilities = Capabilities(
        async_h2d=False,
        async_d2h=False,
        fused_scatter=True,
        pinned_host=False,
        can_hold_stream=False,
        collective="gloo",
        fallbacks={"async_set_value": SYNCHRONOUS},
    )

    def __init__(self, index: int, options: Mapping[str, object]) -> None:
        if index != 0:
            raise InvalidValue(f"index {index}: there is one host", cure="open cpu:0", device="cpu", argument="index")
        if options:
            raise InvalidValue(f"unknown options {sorted(options)}", cure="give none", device="cpu", argument="options")
        super().__init__(index)
        self._stream = SyncStream(0)
        self._streams = 0
        self._closed = False
        self._spreaders: dict[int, Spreader] = {}
        self._communicators: dict[tuple[int, ...], PaddleCommunicator] = {}

    @property
    def default_stream(self) -> Stream:
        """The stream on which the framework computes."""
        return self._stream

    def stream(self) -> Stream:
        """A new stream; as all work is done at once, it differs in its handle alone."""
        self._streams += 1
        return SyncStream(self._streams)

    def allocate(self, nbytes: int) -> HostMemory:
        """A block of host memory on a 64-byte boundary."""
        if self._closed:
            raise DeviceClosed("the device is closed", cure="open it again", device="cpu:0")
        self.count("allocations")
        return HostMemory.allocate(self, nbytes)

    def resolve(self, target: object) -> View:
        """A view of a writable NumPy array or of a Paddle tensor on the CPU place, sharing its memory."""
        return target if isinstance(target, View) else resolve_host(self, target)

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Write the plan into host memory, as :func:`hal_core.plan.apply_to_host` would."""
        memory = plan.memory
        assert isinstance(memory, HostMemory)
        if plan.records is not None:
            spread = plan.records.spread
            spreader = self._spreaders.get(id(spread))
            if spreader is None or spreader.memory is not memory:
                spreader = self._spreaders[id(spread)] = Spreader(memory, spread)
            spreader.write(plan.records.slots, plan.records.data)
        if len(plan.writes):
            memory.write(plan.writes, plan.payload)
        return DONE

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy byte ranges; they are there on return."""
        assert isinstance(memory, HostMemory)
        self.count("copies_out", len(parts))
        return HostCopy([memory.buffer[part.offset : part.end].copy() for part in parts])

    def advance(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """The reference, on the state's own memory."""
        names = (*reference.READS, *reference.WRITES, "token_ids")
        fields = {name: host_view(state.view(name)) for name in names}
        reference.advance(fields, state.sizes, speculative=step.speculative)
        return DONE

    def communicator(self, group: Group) -> PaddleCommunicator:
        """The group over gloo; see :func:`hal_core.paddle_groups.open_groups`."""
        found = self._communicators.get(group.ranks)
        if found is None:
            found = self._communicators[group.ranks] = PaddleCommunicator(group, opened(group), paddle_bytes)
        return found

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """One assignment of NumPy; the value is there on return (G7)."""
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

    def close(self) -> None:
        """Forget the memory that was handed out; whoever still holds it keeps it alive."""
        self._closed = True
        self._spreaders.clear()
        for communicator in self._communicators.values():
            communicator.close()
        self._communicators.clear()


def host_view(view: View) -> np.ndarray[Any, Any]:
    """The NumPy array over a view of host memory; made once for each view."""
    if view.host is None:
        memory = view.memory
        assert isinstance(memory, HostMemory)
        view.host = np.ndarray(view.shape, view.dtype.storage, memory.buffer, view.offset, view.strides)
    return view.host
