"""The device: one page of primitives, and a kernel of its own."""

import ctypes
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from hal_core import Capabilities, Counters, SlotState, Step, Stream, Ticket, View
from hal_core.devices import (
    SCATTER_MAP,
    STEP_FIELDS,
    AsyncDevice,
    PlanLaunch,
    Primitives,
    apply_packed,
    check_index,
    check_options,
    update_inputs,
)

from .runtime import Mark, Queue, at


class QueuePrimitives(Primitives):
    """The runtime's operations; :class:`hal_core.devices.Primitives` describes each."""

    rerecords = True

    def __init__(self) -> None:
        self.memory: dict[int, object] = {}
        self.ran: Counter[str] = Counter()

    def stream_create(self) -> Queue:
        return Queue(self.ran)

    def stream_destroy(self, stream: Queue) -> None:
        stream.put(None)

    def stream_wait(self, stream: Queue, event: Mark) -> None:
        stream.put(event.passed.wait)

    def event_create(self) -> Mark:
        return Mark()

    def event_record(self, event: Mark, stream: Queue) -> None:
        event.record(stream)

    def event_query(self, event: Mark) -> bool:
        return event.passed.is_set()

    def event_synchronize(self, event: Mark, timeout: float | None) -> bool:
        return event.passed.wait(timeout)

    def event_error(self, event: Mark) -> Exception | None:
        return event.queue.error if event.queue else None

    def allocate(self, nbytes: int) -> int:
        block = np.empty(nbytes + 64, np.uint8)
        address = -(-block.ctypes.data // 64) * 64
        self.memory[address] = block
        return address

    def free(self, address: int) -> None:
        del self.memory[address]

    def copy_in(self, target: int, source: int, nbytes: int, stream: Queue) -> None:
        stream.put(partial(ctypes.memmove, target, source, nbytes), "uploads")

    def copy_out(self, target: int, source: int, nbytes: int, stream: Queue) -> None:
        stream.put(partial(ctypes.memmove, target, source, nbytes), "copies_out")

    def launch(self, launch: PlanLaunch, block: int, stream: Queue) -> None:
        scatter_map = at(launch.scatter_map, launch.fields * SCATTER_MAP.itemsize).view(SCATTER_MAP)
        staged, memory = at(block, launch.packed.nbytes), at(launch.address, launch.nbytes)
        stream.put(partial(apply_packed, launch.packed, staged, scatter_map, memory), "launches")


class QueueDevice(AsyncDevice):
    """The primitives as a device. What follows them is optional: kernels that spare a way by the host."""

    name = "queue"
    capabilities = Capabilities(
        async_h2d=True,
        async_d2h=True,
        fused_scatter=True,  # launch does a whole plan
        pinned_host=False,  # there is no allocate_host
        can_hold_stream=True,
        collective="",
        async_update=True,  # update_inputs is work on the queue
    )

    def __init__(self, index: int, options: Mapping[str, object]) -> None:
        check_index(self.name, index, 1)
        check_options(self.name, options)
        super().__init__(index, QueuePrimitives())

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """One kernel over all slots; the host takes no part."""
        self.check_open()
        own = self.own_stream(stream)
        self.order_after_reads(own, state.memory)
        fields = {name: array(state.view(name)) for name in STEP_FIELDS}
        own.raw.put(partial(update_inputs, fields, state.sizes, speculative=step.speculative))
        return self.ticket(own)

    def copy_within(self, target: View, value: View, stream: Stream) -> Ticket:
        """Between two views of this device, in stream order."""
        own, to, source = self.own_stream(stream), array(target), array(value)
        self.order_after_reads(own, target.memory)
        own.raw.put(lambda: np.copyto(to, source.reshape(to.shape).copy()))
        return self.ticket(own)

    @contextmanager
    def hold_stream(self, stream: Stream) -> Iterator[None]:
        """Block the stream until the context ends; for the kit's latches."""
        gate = threading.Event()
        self.own_stream(stream).raw.put(gate.wait)
        try:
            yield
        finally:
            gate.set()

    def probe_counts(self) -> Counters:
        """Count the runtime's calls, for the kit, which compares them with the device's own counts."""
        ran: Any = self.primitives.ran
        return Counters(ran["uploads"] + ran["launches"], ran["uploads"], ran["launches"], ran["copies_out"])


def array(view: View) -> np.ndarray[Any, Any]:
    """A view as kernels see it."""
    memory = view.memory
    return np.ndarray(view.shape, view.dtype.storage, at(memory.address, memory.nbytes), view.offset, view.strides)
