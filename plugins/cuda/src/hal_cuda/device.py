"""The cuda device over the driver's primitives: the core's asynchronous base, with one kernel for a whole plan.

It is the fallback without the native part, and the base of :class:`hal_cuda.native_device.NativeDevice`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakMethod

import numpy as np
from hal_core import Capabilities, InvalidValue, Ticket, View
from hal_core.devices import (
    DLPACK_CUDA,
    LONGEST_WRITE,
    AsyncStream,
    DeviceMemory,
    Lease,
    Packed,
    RecordedEvent,
    cut_long_writes,
    paddle_piece,
    tensor_over,
)

from .base import OnGpu
from .context import Context, Options
from .device_copy import load_copy
from .driver import Driver, captured
from .frameworks import current_stream
from .primitives import LEGACY, CudaPrimitives
from .steps import StepKernel
from .structs import THREADS
from .targets import is_on_device, resolve

if TYPE_CHECKING:
    from hal_core import ByteRange, Event, Group, SlotState, Step, Stream
    from hal_core.devices import Communicator, CopyTicket, Memory, WritePlan

    from .nccl import Comm

SLOWER = ("insert_tasks", "save_output", "broadcast_tokens")
"""Hooks that are slower without the native part. ``async_set_value`` is slower too, but the contract reserves its entry
for devices with synchronous writes (G7)."""


MOST_GRAPHS = 16
"""``GRAPHS`` of native/calls.c."""


class CudaDevice(OnGpu):
    """One GPU. Targets are state views, and tensors of Paddle, torch, CuPy and similar libraries on it."""

    name = "cuda"
    capabilities = Capabilities(
        async_h2d=True,
        async_d2h=True,
        fused_scatter=True,
        pinned_host=True,
        can_hold_stream=True,
        collective="nccl",
        async_update=True,
        several_memories=True,
        timed_events=True,
    )
    dlpack_type = DLPACK_CUDA
    raises_faults = True  # device errors are sticky: the next call raises them
    piece = 4 << 20
    groups_by = "nccl by hal"
    """The name under which groups are opened. It differs from the name of Paddle's own NCCL groups for a model's
    tensors."""
    primitives_type: ClassVar[type[CudaPrimitives]] = CudaPrimitives

    def __init__(self, index: int, options: Mapping[str, object], driver: Driver) -> None:
        chosen = Options.of(self.name, options)
        self.driver = driver
        if driver.native is None:
            self.capabilities = replace(self.capabilities, fallbacks=dict.fromkeys(SLOWER, driver.why_fallback))
        self.context = Context.open(driver, index)
        give_back = self.context.close
        driver.when_full = WeakMethod(self._wait_for_room)
        try:
            self._runtime = self.primitives_type(self.context)
            give_back = self._runtime.close
            self.kernels = self._runtime.kernels
            super().__init__(index, self._runtime, chosen)
            self.steps = StepKernel(driver, self.kernels)
            self._given = chosen.stream
            self._open_parts(chosen)
        except BaseException:  # a context keeps hundreds of megabytes of the GPU
            give_back()
            raise

    def _open_parts(self, chosen: Options) -> None:
        """Create the parts of a subclass."""

    @property
    def note(self) -> str:  # type: ignore[override]  # read seldom, and it loads NCCL
        """Which path does the host's work, the NCCL for the ranks of a group, and the number of hardware queues."""
        from . import hardware_queues
        from .nccl import described

        path = "native" if self.driver.native else "fallback"
        return f"path: {path}; {described()}; hardware queues: {hardware_queues()}"

    # -- streams ------------------------------------------------------------------------------------------------

    @property
    def default_stream(self) -> AsyncStream:
        """The framework's current stream, or the one given at ``open``."""
        handle = current_stream(self.index)[0] if self._given is None else self._given
        return self.stream_at(handle)

    def stream_at(self, handle: int) -> AsyncStream:
        """Return a stream by its handle. Raise :class:`hal_core.errors.InvalidValue` for a stream of another
        context."""
        return self._wrapped.get(handle) or self.wrap(handle, lambda: self.context.check_stream(handle))

    def foreign_stream(self, stream: Any) -> AsyncStream:  # noqa: ANN401 (a framework's)
        """Return the stream of an object with ``__cuda_stream__``, of a torch or Paddle stream, or of a handle."""
        if isinstance(stream, int):
            return self.stream_at(stream)
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is not None:
            return self.stream_at(int(protocol()[1]))
        if type(stream) is AsyncStream:
            return self.stream_at(stream.handle)
        return self.stream_at(int(stream.cuda_stream))

    # -- memory -------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Return a block of device memory. If Paddle is loaded, Paddle allocates it, so that its collectives accept
        slices."""
        if current_stream(self.index)[1] != "paddle":
            return super().allocate(nbytes)
        import paddle

        self.check_open()
        self.count("allocations")
        zeros = np.zeros(-(-nbytes // 8) + 1, np.int64)
        with self.driver.during_captures():
            base = paddle.to_tensor(zeros, place=paddle.CUDAPlace(self.index))
        # A copy of pageable memory returns when the host's bytes are read, and may arrive on the GPU later than what
        # our streams write there next: ranks that share a GPU had empty slots.
        if not self._runtime.wait_for_default_stream(self.staging.deadline):
            raise self.deadline_error(f"CUDA's default stream was busy for {self.staging.deadline} s")
        return DeviceMemory(self, int(base.data_ptr()), nbytes, base)

    def resolve(self, target: object) -> View:
        """Return a view over a tensor's own memory, which is kept until the work on it is done."""
        if isinstance(target, View):
            return target
        self.retired.look()
        return resolve(self, self.driver, self.index, target)

    def tensor(self, view: View, framework: str = "") -> Any:  # noqa: ANN401 (a framework's)
        """Return a Paddle tensor over memory of Paddle's, else one by DLPack. Raise if the device is broken."""
        self.check_open()
        self.upload_stream.record().done()
        base = getattr(view.memory, "keep", None)
        if framework in ("", "paddle") and hasattr(base, "place"):
            return paddle_piece(base, 0, view)
        return tensor_over(view, framework)

    def before_consumer(self, stream: int | None) -> None:
        """Make the stream wait for the default one. Its user must order the work of further streams."""
        mine = self.default_stream
        if stream != -1 and (stream or LEGACY) != mine.handle:
            self.stream_at(stream or LEGACY).wait(mine.record())

    def is_device_value(self, value: object) -> bool:
        """Return True for a tensor on a CUDA device."""
        return not isinstance(value, int | float | list | tuple) and is_on_device(value)

    def register_state(self, state: SlotState) -> None:
        """Put the state's scatter map on the GPU, and describe the state to the kernel of ``update_inputs``."""
        super().register_state(state)
        self.steps.register_state(state)

    # -- streams captured into graphs ------------------------------------------------------------------------------

    def check_stream(self, stream: Stream) -> None:
        """Raise :class:`hal_core.errors.InvalidValue` for a stream that is being captured into a graph."""
        own = self.working(stream)
        if self._runtime.captures(own.raw):
            raise captured(own.raw)
        self._runtime.room(own.raw)

    def _wait_for_room(self, stream: int, event: Any) -> None:  # noqa: ANN401 (a CUevent)
        """Wait for an earlier event of a stream whose launch queue may be full, at most until the ring's deadline."""
        self.count("host_waits")
        if not self._runtime.event_synchronize(event, self.staging.deadline):
            raise self.deadline_error(
                f"the launch queue of stream {stream:#x} stayed full for {self.staging.deadline} s"
            )

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy as the base does; refuse a stream that is being captured."""
        self.check_stream(stream)
        return super().copy_out(memory, parts, stream)

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Submit as the base does; refuse a stream that is being captured."""
        self.check_stream(stream)
        return super().submit(plan, stream)

    def capture_update(self, state: SlotState, stream: Stream, *, speculative: bool) -> None:
        """Capture the kernel of :meth:`update_inputs` into the graph of the stream."""
        self.check_open()
        own = self.own_stream(stream)
        if not self._runtime.captures(own.raw):
            raise InvalidValue(
                f"stream {own.handle:#x} is not being captured", cure="begin the capture first", argument="stream"
            )
        self.steps.capture(state, own.handle, speculative=speculative)

    def replayed(self, event: Event) -> Ticket:
        """Count an update whose kernel the worker's graph has launched."""
        assert isinstance(event, RecordedEvent)
        self._runtime.count("launches")
        self.last[event.stream_key] = event
        return self.ticket_type(event)

    def launch_graphs(self, graphs: Sequence[int], stream: Stream) -> None:
        """Launch ``cudaGraphExec_t`` handles in order; on the native path in one call that keeps the GIL."""
        if len(graphs) > MOST_GRAPHS:
            raise InvalidValue(f"{len(graphs)} graphs at once", cure=f"give at most {MOST_GRAPHS}", argument="graphs")
        self._runtime.launch_graphs(graphs, self.working(stream).raw)

    # -- work ---------------------------------------------------------------------------------------------------

    def pack(self, plan: WritePlan) -> tuple[WritePlan, Packed]:
        """Pack as the base does, with long copies cut, so that several blocks of threads share them."""
        packed = Packed.of(plan)
        if packed.nbytes - packed.payload_at > LONGEST_WRITE:
            cut = cut_long_writes(plan)
            if cut is not plan:
                return cut, Packed.of(cut)
        return plan, packed

    def submit_value(self, target: View, value: np.ndarray[Any, Any] | np.generic, stream: Stream) -> Ticket:
        """Write as the base does; refuse a stream that is being captured."""
        self.check_stream(stream)
        return super().submit_value(target, value, stream)

    def copy_within(self, target: View, value: View, stream: Stream) -> Ticket:
        """Copy by kernels, in stream order."""
        self.check_stream(stream)
        own = self.own_stream(stream)
        self.order_after_reads(own, target.memory)
        for blocks in load_copy(self, target, value):
            self.kernels.copy_strided.launch(blocks, THREADS, own.handle)
            self._runtime.count("launches")
            ticket = self.ticket(own)
        return ticket

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Launch one kernel, with a thread for each slot; the host does no part of the update."""
        self.check_open()
        own = self.own_stream(stream)
        self.check_stream(own)  # a capture has CapturedUpdate instead
        self.order_after_reads(own, state.memory)
        self.steps.launch(state, own.handle, speculative=step.speculative)
        self._runtime.count("launches")
        return self.ticket(own)

    def open_communicator(self, group: Group) -> Communicator:
        """Return the group's NCCL communicator."""
        from .collectives import open_communicator

        return open_communicator(self, group)

    def make_group(self, ranks: Sequence[int], me: int, share: Callable[[bytes], bytes], timeout: float) -> Comm:
        """Create a group over NCCL together with its members; ``make`` of :func:`hal_core.devices.open_groups`."""
        from .nccl import make_group

        return make_group(self, ranks, me, share, timeout)

    @contextmanager
    def hold_stream(self, stream: Stream) -> Iterator[None]:
        """Hold a stream in a ``with`` block, by a kernel that waits for a flag in pinned memory."""
        self.check_stream(stream)
        own, lease = self.own_stream(stream), Lease(self.blocks, self.blocks.take(4))
        flag = lease.block.buffer[:4].view("u4")
        flag[0] = 0
        self.kernels.hold.params["flag"] = lease.block.address
        try:
            self.kernels.hold.launch(1, 1, own.handle)
            self._runtime.count("launches")
            lease.event = self.mark(own)  # other streams may delay the kernel for longer than the block
            yield
        finally:
            flag[0] = 1

    def release(self, *, settled: bool) -> None:
        """Release the memory, except after the loss of a group: a collective on a stream may then wait forever, and
        work behind it may still read the staging memory. That memory is only released when the process ends."""
        settled = settled and not self.driver.broken
        super().release(settled=settled)
        if settled:
            self._runtime.close()

    def check_open(self) -> None:
        """Raise if the device is closed or its context is corrupted."""
        self.driver.check_sound()
        super().check_open()
