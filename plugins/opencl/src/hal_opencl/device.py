"""The opencl device: the primitives behind the contract, with kernels where the base would go by way of the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hal_core import Capabilities, Counters, Ticket, View
from hal_core.devices import STEP_FIELDS, AsyncDevice, Packed, RingOptions, WritePlan, check_index, cut_long_writes

from . import cl
from .primitives import BELOW, OpenCLPrimitives
from .runtime import check_process, context
from .structs import Update

if TYPE_CHECKING:
    from hal_core import SlotState, Step, Stream


class OpenCLDevice(AsyncDevice):
    """One OpenCL device. Targets are views of its own memory."""

    name = "opencl"
    capabilities = Capabilities(
        async_h2d=True,
        async_d2h=True,
        fused_scatter=True,
        pinned_host=True,
        can_hold_stream=True,
        collective="",
        async_update=True,
    )

    def __init__(self, index: int, options: Mapping[str, object]) -> None:
        chosen = RingOptions.of(self.name, options)
        check_index(self.name, index, len(cl.devices()))
        check_process()
        self.runtime = OpenCLPrimitives(cl.devices()[index])
        super().__init__(index, self.runtime, chosen)

    def pack(self, plan: WritePlan) -> tuple[WritePlan, Packed]:
        """The plan with long runs cut, so that several work groups share one, and its layout."""
        cut = cut_long_writes(plan)
        return cut, Packed.of(cut)

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """One kernel over all slots; the host takes no part."""
        self.check_open()
        own, base, sizes = self.own_stream(stream), state.memory.address & BELOW, state.sizes
        self.order_after_reads(own, state.memory)
        views = [state.view(name) for name in STEP_FIELDS]
        update = Update(
            tuple(base + view.offset for view in views), tuple(view.strides[0] for view in views),
            sizes.max_accept, sizes.max_stop_length, sizes.max_model_len, step.speculative,
        )  # fmt: skip
        self.runtime.update(state.memory.address, sizes.num_slots, update, own.raw)
        return self.ticket(own)

    def copy_within(self, target: View, value: View, stream: Stream) -> Ticket:
        """Two strided copies by way of memory between them: the views may overlap, and differ in shape."""
        self.check_open()
        own = self.own_stream(stream)
        self.order_after_reads(own, target.memory)
        if target.size:
            between = self.allocate(target.size * target.dtype.itemsize)
            try:
                launches = self.runtime.copy_strided(value, between.address, own.raw, inward=False)
                launches += self.runtime.copy_strided(target, between.address, own.raw, inward=True)
            finally:
                ticket = self.ticket(own)  # before the memory between is dropped, which waits for it
            for _ in range(launches):
                self.primitives.count("launches")
            return ticket
        return self.ticket(own)

    @contextmanager
    def hold_stream(self, stream: Stream) -> Iterator[None]:
        """Let the stream wait for an event that the host sets."""
        gate = cl.create("clCreateUserEvent", context())
        try:
            self.own_stream(stream).raw.wait(gate)
            yield
        finally:
            cl.call("clSetUserEventStatus", gate, cl.COMPLETE)
            cl.call("clReleaseEvent", gate)

    def probe_counts(self) -> Counters:
        """What reached the driver, for the conformance kit; an update is no write, so it does not count."""
        ran = self.runtime.ran
        launches = ran["launches"] - ran["updates"]
        return Counters(ran["uploads"] + launches, ran["uploads"], launches, ran["copies_out"])
