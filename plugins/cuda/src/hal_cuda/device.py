"""The cuda device: pinned staging under fences, one kernel for a whole plan, copies out on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hal_core.base import DeviceBase
from hal_core.capabilities import Capabilities
from hal_core.counters import Counters
from hal_core.errors import DeviceClosed
from hal_core.insertion import plan_insert
from hal_core.layout import BRIEF, STAGED
from hal_core.staging import StagingRing
from hal_core.tickets import DONE, Ticket
from hal_core.views import View

from .admissions import Admissions
from .context import Context, Options
from .copies import CudaCopy, Lease, OutputBlocks, PendingReads
from .driver import Driver
from .entering import Entering
from .frameworks import current_stream
from .launching import Kernels
from .memory import CudaMemory, PinnedBlock
from .steps import StepKernel
from .streams import CudaStream, CudaTicket, EventPool
from .targets import is_on_device, resolve
from .writing import Writer

if TYPE_CHECKING:
    from hal_core.device import Communicator, Device, Stream
    from hal_core.group import Group
    from hal_core.layout import ByteRange
    from hal_core.markers import hookimpl
    from hal_core.plan import WritePlan
    from hal_core.requests import AdmittedRequest
    from hal_core.state import SlotState
    from hal_core.steps import Step
    from hal_core.tasks import TaskBatch
    from hal_core.transfers import CopyTicket
    from hal_core.values import Value
    from hal_core.views import Memory
else:
    from hal_core.markers import hookimpl


class CudaDevice(DeviceBase):
    """One GPU. Targets are state views and tensors of Paddle, torch, CuPy and others on it."""

    name = "cuda"

    def __init__(self, index: int, options: Mapping[str, object], driver: Driver | None = None) -> None:
        super().__init__(index)
        chosen = Options.of(options)
        self.driver = Driver() if driver is None else driver
        self.context = Context.open(self.driver, index)
        self.events = EventPool(self.driver)
        self.kernels = Kernels(self.driver, self.context.arch)
        self.ring = StagingRing(
            lambda nbytes: PinnedBlock(self.driver, nbytes, mirrored=True),
            start=chosen.ring_start,
            limit=chosen.ring_limit,
            deadline=chosen.deadline,
        )
        self.blocks = OutputBlocks(self.driver)
        self.reads = PendingReads()
        self.writer = Writer(self)
        self.admissions = Admissions(
            lambda nbytes: PinnedBlock(self.driver, nbytes, mirrored=True),
            self.context.entered,
            limit=chosen.admission_limit,
        )
        self.entering = Entering(self)
        self.steps = StepKernel(self.driver, self.kernels)
        self._copies = self._new_stream()
        self._framework = ""
        self._given = chosen.stream
        self._wrapped: dict[int, CudaStream] = {}
        self.capabilities = Capabilities(
            async_h2d=True,
            async_d2h=True,
            fused_scatter=True,
            pinned_host=True,
            can_hold_stream=True,
            collective="nccl",
        )

    # -- streams ------------------------------------------------------------------------------------------------

    def _new_stream(self) -> CudaStream:
        flags = int(self.driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        handle = self.driver.ok(self.driver.api.cuStreamCreate(flags), "cuStreamCreate")
        return CudaStream(self.events, int(handle), handle)

    def stream(self) -> Stream:
        """A new stream that does not wait for CUDA's default stream."""
        return self._new_stream()

    @property
    def default_stream(self) -> Stream:
        """The framework's current stream, or the one given at ``open``."""
        handle = current_stream(self.index)[0] if self._given is None else self._given
        return self.wrap(handle)

    @property
    def staging(self) -> StagingRing:
        """The staging ring; the conformance kit makes it small and impatient."""
        return self.ring

    def wrap(self, handle: int) -> CudaStream:
        """A stream by its handle. Raises :class:`hal_core.errors.InvalidValue` for one of another context."""
        found = self._wrapped.get(handle)
        if found is None:
            self.context.check_stream(handle)
            found = self._wrapped[handle] = CudaStream(self.events, handle)
        return found

    # -- memory -------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> CudaMemory:
        """A block of device memory."""
        self._check()
        self.count("allocations")
        if current_stream(self.index)[1] == "paddle":
            return CudaMemory.of_paddle(self, nbytes, self.index)
        return CudaMemory.allocate(self, self.driver, nbytes)

    def resolve(self, target: object) -> View:
        """A view over a tensor's own memory."""
        return target if isinstance(target, View) else resolve(self, self.driver, self.index, target)

    def is_device_value(self, value: object) -> bool:
        """True for a tensor on a CUDA device."""
        return not isinstance(value, int | float | list | tuple) and is_on_device(value)

    def adopt(self, state: SlotState) -> None:
        """Put the state's spread table on the GPU, and describe the state to the kernel of ``advance``."""
        self._check()
        self.entering.adopt(state, self.writer.adopt(state.spread))
        self.steps.adopt(state)

    def stage(self, state: SlotState, request: AdmittedRequest) -> None:
        """Put the request's bytes into pinned memory, where its insertion finds them; from any thread."""
        self.admissions.put(request, request.packed[BRIEF.itemsize :])

    # -- work ---------------------------------------------------------------------------------------------------

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """One upload and one launch for each staging block that the plan fills."""
        self._check()
        return DONE if plan.empty else self.writer.submit(plan, self._own(stream))

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """New requests that were staged at admission by one entry each; every other batch as one plan."""
        self._check()
        own = self._own(stream)
        if tasks.all_prefill:
            ticket = self.entering.submit(state, tasks, own)
            if ticket is not None:
                return ticket
        ticket = self.submit(plan_insert(state, tasks), own)
        with self.admissions.lock:
            self.admissions.inserted(tasks.brief(state.layout)[:, STAGED])
        return ticket

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """A fill, a value in the launch's parameters, one upload, or a plan, by what the value is."""
        self._check()
        return self.writer.set_value(target, value, self._own(stream))

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy on the copy stream, after an event on ``stream``, which does not wait."""
        self._check()
        driver, copies = self.driver, self._copies
        block = self.blocks.take(sum(part.nbytes for part in parts))
        lease = Lease(self.blocks, block)
        copies.wait(self._own(stream).record())
        at, places = 0, []
        for part in parts:
            if part.nbytes:
                source = memory.address + part.offset
                result = driver.api.cuMemcpyDtoHAsync(block.address + at, source, part.nbytes, copies.handle)
                driver.ok(result, "cuMemcpyDtoHAsync")
            places.append((at, part.nbytes))
            at += part.nbytes
        self.count("copies_out", len(parts))
        event = self.events.record(copies.handle)
        lease.event = event
        if parts:
            assert isinstance(memory, CudaMemory)
            self.reads.add(memory, parts, event)
        return CudaCopy(event, lease, places)

    def advance(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """One kernel, a thread a slot; the host takes no part."""
        self._check()
        own = self._own(stream)
        self.reads.order(state.memory, own)
        self.steps.launch(state, own.handle, speculative=step.speculative)
        self.count_launch()
        return CudaTicket(self.events.record(own.handle))

    def count_launch(self) -> None:
        """Count a kernel that is no part of a plan."""
        self.count("launches")
        self.count("submissions")

    def counters(self) -> Counters:
        """Counts since the device was opened; waits for a full ring are the only ones a hook makes."""
        return replace(super().counters(), ring_waits=self.ring.waits, host_waits=self.ring.waits)

    def order_after_reads(self, stream: Stream) -> None:
        """Let ``stream`` wait for copies out under way, before kernels of the caller's own write what they read."""
        self.reads.order(None, self._own(stream))

    def open_communicator(self, group: Group) -> Communicator:
        """The group's NCCL communicator, through Paddle."""
        from .nccl import open_communicator

        return open_communicator(self, group)

    @contextmanager
    def hold(self, stream: Stream) -> Iterator[None]:
        """A kernel that spins on a flag in pinned memory until the context ends."""
        block = self.blocks.take(4)
        flag = block.buffer[:4].view("u4")
        flag[0] = 0
        self.kernels.hold.params["flag"] = block.address
        self.kernels.hold.launch(1, 1, self._own(stream).handle)
        self.count_launch()
        try:
            yield
        finally:
            flag[0] = 1
            self._own(stream).synchronize()
            self.blocks.give(block)

    def close(self) -> None:
        """Wait for the staging ring, then give everything back.

        Not so after a group was lost: a collective on a stream then waits for ever, what is behind it may still read
        the staging memory, and only the end of the process gives that back.
        """
        if self._closed:
            return
        lost = any(getattr(communicator, "lost", "") for communicator in self._communicators.values())
        super().close()
        whole = not self.driver.broken and not lost
        self.admissions.close(release=whole)
        if whole:
            self.ring.close()
            self.blocks.close()
            self.events.close()
            self.driver.free_unused()
            self.context.close()

    def _check(self) -> None:
        if self._closed:
            raise DeviceClosed("the device is closed", cure="open it again", device=f"cuda:{self.index}")
        self.driver.check_sound()

    def _own(self, stream: Any) -> CudaStream:  # noqa: ANN401 (ours, or a framework's)
        """The stream as ours: a CudaStream, an object with ``__cuda_stream__``, or a handle."""
        if type(stream) is CudaStream:
            return stream
        if isinstance(stream, int):
            return self.wrap(stream)
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is not None:
            return self.wrap(int(protocol()[1]))
        return self.wrap(int(stream.cuda_stream))
