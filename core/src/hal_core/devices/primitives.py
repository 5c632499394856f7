"""What a vendor writes of an asynchronous device: primitives, each a call or two of the vendor's own runtime.

The words are CUDA's. Streams and events are the runtime's own objects here, whatever they are: the base makes them,
keeps them and hands them back, and never looks inside. Device addresses and host addresses are whole numbers.

**Rules of all of them.** None waits for the device, unless its text says so; each may wait for a full launch queue.
Each may raise; what it raises reaches the caller of the hook, and a call that has raised has put nothing on the stream.
All are called from the thread that calls the hooks, except those of the group "from any thread". None is called in the
child of a fork; after the device was closed only those that give something back, once their last holder is gone.

A runtime whose calls need a current context sets it where it is opened, and enters it in those "from any thread".
Where events can be asked by one thread alone, those primitives ask that thread; they are the only ones to do so.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..errors import CapabilityMissing, GroupLost
from ..memory.packing import Packed

if TYPE_CHECKING:
    from .health import Health

RawStream = Any
"""A stream of the vendor's runtime."""
RawEvent = Any
"""An event of the vendor's runtime."""
Launch = Any
"""What is launched: :class:`PlanLaunch`, or something that a device of the vendor gives to ``launch_staged``."""
POLL = 50e-6
"""Seconds between two looks at an event, where the runtime has no wait with a deadline."""
LATE, LATEST = 1 / 16, 2e-3
"""A wait that has taken long is looked at less often: the end is seen late by this share of it, and seconds at most."""


def poll(done: Callable[[], bool], timeout: float | None) -> bool:
    """Ask again and again until the answer is yes, True, or for ``timeout`` seconds, False. Other threads run."""
    began = time.monotonic()
    while not done():
        waited = time.monotonic() - began
        left = LATEST if timeout is None else timeout - waited
        if left <= 0:
            return False
        time.sleep(min(max(POLL, waited * LATE), LATEST, left))
    return True


class PlanLaunch(NamedTuple):
    """What the launch of a write plan is told (:mod:`hal_core.memory.plan`, :mod:`hal_core.memory.packing`).

    - ``address``, ``nbytes``: the memory that is written, on the device.
    - ``scatter_map``: device address of the table of :data:`hal_core.memory.plan.SCATTER_MAP` for the records; 0
      without records.
    - ``fields``: rows of that table. ``slots``: a slot of a record is below this.
    - ``packed``: where the parts of the plan lie in the block.
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
    """True where an event may be recorded anew while an earlier record of it, or a wait for that, is still queued, as
    CUDA's may. Else the base asks for one that has passed, or makes another."""
    counts: dict[str, int]
    """The device's counts; the device puts them here."""
    health: Health
    """Where :meth:`event_synchronize` may tell of a failure that it does not raise; the device puts it here."""

    def count(self, name: str) -> None:
        """Count one of ``uploads``, ``launches``; for those who override a compound primitive, after each it made."""
        self.counts[name] += 1
        self.counts["submissions"] += 1

    # -- streams ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def stream_create(self) -> RawStream:
        """A new queue, whose work is executed in order, beside that of other queues."""

    def stream_destroy(self, stream: RawStream) -> None:  # noqa: B027 (a runtime may have nothing to do)
        """Give a stream back that nobody holds. What was put on it has been executed, or will be without it."""

    def stream_handle(self, stream: RawStream) -> int:
        """A number that no other stream of the process has; by default its attribute ``handle``."""
        return int(stream.handle)

    @abstractmethod
    def stream_wait(self, stream: RawStream, event: RawEvent) -> None:
        """Let what is put on ``stream`` from now on wait for ``event`` as it is recorded now; the host does not wait.

        Recording the event anew afterwards changes nothing. It may be of another device of this class.
        """

    # -- events -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def event_create(self) -> RawEvent:
        """A new event; until it is recorded it counts as passed."""

    def event_destroy(self, event: RawEvent) -> None:  # noqa: B027 (a runtime may have nothing to do)
        """Give an event back; it has passed, or its device has failed."""

    @abstractmethod
    def event_record(self, event: RawEvent, stream: RawStream) -> None:
        """Let the event pass when all that is on ``stream`` now has been executed."""

    # -- events, from any thread --------------------------------------------------------------------------------------

    @abstractmethod
    def event_query(self, event: RawEvent) -> bool:
        """True once the event, as it was last recorded, has passed. Raises what the device met, where asking tells."""

    def event_synchronize(self, event: RawEvent, timeout: float | None) -> bool:
        """Block the thread until the event has passed, True, or for ``timeout`` seconds, False. Let other threads run.

        Raises what the device met, where waiting tells. By default the event is asked again and again.
        """
        return poll(lambda: self.event_query(event), timeout)

    def event_error(self, event: RawEvent) -> Exception | None:
        """What the work before an event that has passed has met; for runtimes whose events pass also when it failed.

        Asked once for each ticket that is looked at. It must go on answering while the device is faulty.
        """
        return None

    def spoils(self, error: Exception) -> bool:
        """True where an error that an event told of ends the device: later calls are then refused.

        By default yes, but for a lost group: its tickets tell of it, and what needs no group goes on (G16).
        """
        return not isinstance(error, GroupLost)

    # -- host memory --------------------------------------------------------------------------------------------------

    def allocate_host(self, nbytes: int) -> int | None:
        """The address of host memory that the device reads and writes while the host goes on: page-locked, aligned to
        256 bytes. None where the runtime has none: pageable memory is then used, and copies must be asynchronous all
        the same, reading it when they run.

        Raises :class:`hal_core.errors.OutOfMemory`. Called when a ring or a pool grows; it may take long, but must not
        wait for work on streams.
        """
        return None

    def free_host(self, address: int) -> None:  # noqa: B027 (nothing to do where allocate_host gives None)
        """Give it back; what used it has been executed. It must not wait for other work, for hooks come here: a runtime
        whose own call waits for the whole device (CUDA's does) keeps the block for the next :meth:`allocate_host`."""

    def host_write(self, address: int, nbytes: int) -> None:  # noqa: B027 (for checkers of races)
        """The host is about to write this staging memory. Nothing to do, except for a checker of races."""

    def host_read(self, address: int, nbytes: int) -> None:  # noqa: B027 (for checkers of races)
        """The host reads what was copied out, or has read it until now; from any thread. As before."""


class Primitives(StreamPrimitives):
    """Memory, copies and launches besides: all that :class:`hal_core.devices.asynchronous.AsyncDevice` asks for."""

    # -- device memory ------------------------------------------------------------------------------------------------

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """The address of new device memory, aligned to 64 bytes, its contents undefined. It may take long, but must not
        wait for work on streams: a value that is larger than the ring comes here.

        ``nbytes`` may be 0. Raises :class:`hal_core.errors.OutOfMemory` where there is none.
        """

    @abstractmethod
    def free(self, address: int) -> None:
        """Give device memory back. Nobody holds it, and all work that was put on streams before has been executed.

        It must not wait for other work (``cuMemFree`` does, ``cuMemFreeAsync`` does not): an allocation frees what is
        over, and hooks allocate.
        """

    # -- copies and launches ------------------------------------------------------------------------------------------

    @abstractmethod
    def copy_in(self, target: int, source: int, nbytes: int, stream: RawStream) -> None:
        """Copy from staging memory to device memory in stream order. The source stays until that is executed."""

    @abstractmethod
    def copy_out(self, target: int, source: int, nbytes: int, stream: RawStream) -> None:
        """Copy from device memory to host memory in stream order. Both stay until that is executed."""

    def launch(self, launch: Launch, block: int, stream: RawStream) -> None:
        """Launch one kernel that reads the bytes staged at ``block``, in stream order: of every :class:`PlanLaunch`.

        ``block`` is device memory (or what :meth:`submit` chose to give); it stays until that is executed. Of a plan
        the records are scattered, then the writes are made, as :func:`hal_core.memory.packing.apply_packed` does.

        :raises CapabilityMissing: by default; a device without ``fused_scatter`` is not asked.
        """
        raise CapabilityMissing("cannot launch a write plan", cure="leave fused_scatter off, or write launch()")

    # -- compounds: one native call, where there is one ---------------------------------------------------------------

    def submit(
        self, source: int, target: int, nbytes: int, launch: Launch | None, stream: RawStream, event: RawEvent
    ) -> None:
        """Upload a staging block, launch what reads it (or, without a launch, be done), and record the event.

        A block of ``nbytes`` at host address ``source`` goes to device address ``target``: for a launch, room of the
        same size that belongs to the block. ``event`` is not recorded yet; when it passes, both may be used again.
        This may put part of the work on other streams, as long as the event comes after it, and leave the upload out
        where the launch reads the block in place. Where it raises, part of it may be on ``stream``, but no launch; the
        base then records an event of its own.
        """
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
        """Copy ``parts`` (device address, bytes) to the host one after the other from address ``target``, on
        ``stream``, after what is on ``after`` now, which does not wait; then record ``event``.

        ``before`` is an event for that order. Where this raises, part of it may be on ``stream``.
        """
        self.event_record(before, after)
        self.stream_wait(stream, before)
        for source, nbytes in parts:
            if nbytes:
                self.copy_out(target, source, nbytes, stream)
                self.counts["copies_out"] += 1
            target += nbytes
        self.event_record(event, stream)
