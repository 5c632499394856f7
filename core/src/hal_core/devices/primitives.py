"""The primitives of an asynchronous device that a vendor writes, each a call or two of the vendor's runtime.

The terms are CUDA's. Streams and events are the runtime's own objects: the base creates, keeps and returns them, but
never inspects them. Device addresses and host addresses are whole numbers.

**Rules of all of them.** A primitive does not wait for the device, unless its text allows it; each may wait for a full
launch queue. Each may raise. The error reaches the caller of the hook, and the failed call must have queued no work.
All are called from the thread that calls the hooks, except those of the group "from any thread". None is called in the
child of a fork. After the device was closed only releasing ones are called, from the thread that drops the last
reference. A runtime whose calls need a current context sets it when it is opened, and enters it in those "from any
thread". If only one thread may query events, those primitives forward to that thread; they are the only ones to do so.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..errors import CapabilityMissing, GroupLost
from ..memory.packing import Packed
from ..timeouts import TIMEOUTS

if TYPE_CHECKING:
    from .health import Health

RawStream = Any
"""A stream of the vendor's runtime."""
RawEvent = Any
"""An event of the vendor's runtime."""
Launch = Any
"""The object to launch: :class:`PlanLaunch`, or one that a vendor's device passes to ``launch_staged``."""
LATE = 1 / 16
"""A long wait queries less often: its end is noticed late by this share of it, and by at most ``poll_most``."""


def poll(done: Callable[[], bool], timeout: float | None) -> bool:
    """Query until the answer is true (True), or for ``timeout`` seconds (False). Other threads run meanwhile."""
    if done():
        return True
    began, least, most = time.monotonic(), TIMEOUTS.poll, TIMEOUTS.poll_most
    while not done():
        waited = time.monotonic() - began
        left = most if timeout is None else timeout - waited
        if left <= 0:
            return False
        time.sleep(min(max(least, waited * LATE), most, left))
    return True


class PlanLaunch(NamedTuple):
    """The parameters of a write plan's launch (:mod:`hal_core.memory.plan`, :mod:`hal_core.memory.packing`).

    - ``address``, ``nbytes``: the memory that is written, on the device.
    - ``scatter_map``: device address of the table of :data:`hal_core.memory.plan.SCATTER_MAP` for the records; 0
      without records.
    - ``fields``: rows of that table. ``slots``: a slot of a record is below this.
    - ``packed``: the layout of the plan in the block.
    """

    address: int
    nbytes: int
    scatter_map: int
    fields: int
    slots: int
    packed: Packed


class StreamPrimitives(ABC):
    """Streams, events and locked host memory."""

    rerecords: ClassVar[bool] = False
    """True if an event may be recorded again while an earlier record or a wait for it is still queued, as in CUDA.
    Otherwise the base uses an event that has passed, or creates another."""
    counts: dict[str, int]
    """The device's counts, set by the device."""
    health: Health
    """Where :meth:`event_synchronize` may report a failure that it does not raise; set by the device."""

    def count(self, name: str) -> None:
        """Count one of ``uploads``, ``launches``; for overridden compound primitives, after each."""
        self.counts[name] += 1
        self.counts["submissions"] += 1

    # -- streams ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def stream_create(self) -> RawStream:
        """Create a queue whose work is executed in order, concurrently with other queues. Without ``can_hold_stream``
        one queue may serve several streams, each with a :meth:`stream_handle` of its own."""

    def stream_destroy(self, stream: RawStream) -> None:  # noqa: B027 (some runtimes do it themselves)
        """Destroy an unreferenced stream. Its work has been executed, or will be without it."""

    def stream_handle(self, stream: RawStream) -> int:
        """Return a number unique among the process's streams; by default its attribute ``handle``."""
        return int(stream.handle)

    @abstractmethod
    def stream_wait(self, stream: RawStream, event: RawEvent) -> None:
        """Make work queued on ``stream`` from now on wait for ``event`` as it is recorded now; the host does not wait.

        A later recording of the event has no effect on this. The event may be of another device of this class.
        """

    # -- events -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def event_create(self) -> RawEvent:
        """Create an event; until it is recorded it counts as passed."""

    def event_destroy(self, event: RawEvent) -> None:  # noqa: B027 (some runtimes do it themselves)
        """Destroy an event; it has passed, or its device has failed."""

    @abstractmethod
    def event_record(self, event: RawEvent, stream: RawStream) -> None:
        """Make the event pass when all work that is now on ``stream`` has been executed."""

    def event_create_timed(self) -> RawEvent:
        """Create an event that notes the device's time when it passes.

        :raises CapabilityMissing: by default; not called on a device without ``timed_events``.
        """
        raise CapabilityMissing("has no timed events", cure="leave timed_events off, or write event_create_timed()")

    # -- events, from any thread --------------------------------------------------------------------------------------

    @abstractmethod
    def event_query(self, event: RawEvent) -> bool:
        """Return True once the event, as it was last recorded, has passed. Raises the device's error if the query
        reports one."""

    def event_synchronize(self, event: RawEvent, timeout: float | None) -> bool:
        """Block the thread until the event has passed (True), or for ``timeout`` seconds (False). Let other threads
        run.

        Raises the device's error if waiting reports one. By default the event is queried repeatedly.
        """
        return poll(lambda: self.event_query(event), timeout)

    def event_seconds(self, earlier: RawEvent, event: RawEvent) -> float:
        """Return the device's seconds between two timed events that have passed.

        :raises CapabilityMissing: by default; not called on a device without ``timed_events``.
        """
        raise CapabilityMissing("has no timed events", cure="leave timed_events off, or write event_seconds()")

    def event_error(self, event: RawEvent) -> Exception | None:
        """Return the error of the work before a passed event; for runtimes whose events pass even if the work failed.

        Called once for each ticket that is checked. It must keep working on a faulty device.
        """
        return None

    def spoils(self, error: Exception) -> bool:
        """Return True if an error reported by an event makes the device unusable: later calls are then refused.

        By default true except for a lost group: its tickets report it, and work without a group continues (G16).
        """
        return not isinstance(error, GroupLost)

    # -- host memory --------------------------------------------------------------------------------------------------

    def allocate_host(self, nbytes: int) -> int | None:
        """Return the address of host memory that the device reads and writes asynchronously: page-locked, aligned to
        256 bytes. None if the runtime has none: then pageable memory is used, and copies must still be asynchronous,
        reading it when they run.

        Raises :class:`hal_core.errors.OutOfMemory`. Called when a ring or a pool grows; it may take long, but must not
        wait for work on streams.
        """
        return None

    def free_host(self, address: int) -> None:  # noqa: B027 (nothing to do where allocate_host gives None)
        """Release host memory whose work has been executed. It must not wait for other work, as hooks call it. If the
        runtime's own call waits for the whole device (CUDA's does), keep the block for the next :meth:`allocate_host`.
        """

    def host_write(self, address: int, nbytes: int) -> None:  # noqa: B027 (for checkers of races)
        """Note that the host is about to write this staging memory. Only race checkers need it."""

    def host_read(self, address: int, nbytes: int) -> None:  # noqa: B027 (for checkers of races)
        """Note that the host reads copied-out bytes, or has read them until now; from any thread. Only race checkers
        need it."""


class Primitives(StreamPrimitives):
    """All primitives that :class:`hal_core.devices.asynchronous.AsyncDevice` needs: also memory, copies and
    launches."""

    # -- device memory ------------------------------------------------------------------------------------------------

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Return the address of new device memory, aligned to 64 bytes, its contents undefined. It may take long, but
        must not wait for work on streams: a value larger than the ring is allocated here.

        ``nbytes`` may be 0. Raises :class:`hal_core.errors.OutOfMemory` if no memory is left.
        """

    @abstractmethod
    def free(self, address: int) -> None:
        """Free unreferenced device memory. What hal had queued, on every stream of the device, before the last
        reference was dropped has been executed, so it may be released at once.

        It must not wait for other work (``cuMemFree`` does, ``cuMemFreeAsync`` does not): an allocation frees finished
        memory, and hooks allocate.
        """

    # -- copies and launches ------------------------------------------------------------------------------------------

    @abstractmethod
    def copy_in(self, target: int, source: int, nbytes: int, stream: RawStream) -> None:
        """Copy from staging memory to device memory in stream order. The source, at any byte of a block of
        :meth:`allocate_host` (of pageable memory, where that gives None), stays valid until the copy is executed."""

    @abstractmethod
    def copy_out(self, target: int, source: int, nbytes: int, stream: RawStream) -> None:
        """Copy from device memory to host memory, of :meth:`allocate_host` as in :meth:`copy_in`, in stream order. Both
        stay valid until the copy is executed."""

    def launch(self, launch: Launch, block: int, stream: RawStream) -> None:
        """Launch one kernel that reads the bytes staged at ``block``, in stream order; it must support every
        :class:`PlanLaunch`.

        ``block`` is device memory (or an address chosen by :meth:`submit`), valid until the launch is executed. For a
        plan, scatter the records, then make the writes, as :func:`hal_core.memory.packing.apply_packed` does.

        :raises CapabilityMissing: by default; not called on a device without ``fused_scatter``.
        """
        raise CapabilityMissing("cannot launch a write plan", cure="leave fused_scatter off, or write launch()")

    # -- compounds: one native call, where there is one ---------------------------------------------------------------

    def submit(
        self, source: int, target: int, nbytes: int, launch: Launch | None, stream: RawStream, event: RawEvent
    ) -> None:
        """Upload a staging block, launch the kernel that reads it (if ``launch`` is given), and record the event.

        A block of ``nbytes`` at host address ``source`` goes to device address ``target``: for a launch, memory of the
        same size that belongs to the block. ``event`` is not recorded yet; when it passes, both may be reused.

        Part of the work may go to other streams, as long as the event comes after it. The upload may be skipped if the
        launch reads the block in place. If this raises, part of the work may be on ``stream``, but no launch; the base
        then records its own event.
        """
        if nbytes:  # some launches read no bytes of the block
            self.copy_in(target, source, nbytes, stream)
            self.count("uploads")
        if launch is not None:
            self.launch(launch, target, stream)
            self.count("launches")
        self.event_record(event, stream)

    def submit_copy_out(
        self,
        target: int,
        parts: Sequence[tuple[int, int]],
        after: RawStream,
        stream: RawStream,
        before: RawEvent,
        event: RawEvent,
    ) -> None:
        """Copy ``parts`` (device address, bytes) to consecutive host memory from address ``target``, on ``stream``,
        after the work that is now on ``after``, which does not wait; then record ``event``.

        ``before`` is an event for that order. If this raises, part of the work may be on ``stream``.
        """
        self.event_record(before, after)
        self.stream_wait(stream, before)
        for source, nbytes in parts:
            if nbytes:
                self.copy_out(target, source, nbytes, stream)
                self.counts["copies_out"] += 1
            target += nbytes
        self.event_record(event, stream)
