"""Collectives of a group over NCCL, in order on the caller's stream.

A broadcast is queued on the stream and returns; its ticket is done when the GPU has run it. If a rank is lost, the
watchdog makes NCCL abort the communicator. Waiting work on the streams then ends, the tickets raise
:class:`hal_core.errors.GroupLost`, and the process continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING

import numpy as np
from hal_core import ByteRange, GroupLost, HalError, InvalidValue
from hal_core.devices import AsyncDevice, CollectiveTicket, Lease, RecordedEvent, opened

from .nccl import Comm

if TYPE_CHECKING:
    from collections.abc import Callable

    from hal_core import Group, Stream, Ticket
    from hal_core.devices import Communicator, CopyTicket, Memory, OpenGroup

    from .base import OnGpu

FIXED = Struct("<8Q")
"""``Fixed`` of native/broadcasting.c."""


class NcclTicket(CollectiveTicket):
    """A broadcast in flight. An error from NCCL counts as the loss of the group."""

    __slots__ = ("_comm",)

    def __init__(self, event: RecordedEvent, group: OpenGroup, number: int) -> None:
        super().__init__(event, group.watchdog, "async", number)
        self._comm: Comm = group.process_group

    def done(self) -> bool:
        if self._error is None:
            if (met := self._comm.failure()) is not None:
                self._watchdog.failed(met)  # aborts the group, with the reason
            if self._watchdog.reason and not self._comm.settled:
                return False
        return super().done()


class HeadedTicket(NcclTicket):
    """The same, with the copy of the slice's header."""

    __slots__ = ("header",)

    def __init__(self, event: RecordedEvent, group: OpenGroup, number: int, header: CopyTicket) -> None:
        super().__init__(event, group, number)
        self.header = header


class NcclCommunicator:
    """One group's collectives on one device; see :class:`hal_core.devices.Communicator`."""

    def __init__(self, device: OnGpu, group: Group, open_group: OpenGroup) -> None:
        self.group, self._device, self._open = group, device, open_group
        self.comm: Comm = open_group.process_group
        self._ranks = open_group.ranks
        self._source = self._ranks.index(group.source)
        if self.comm.index != device.index:
            raise InvalidValue(
                f"the group {group.ranks} was opened on GPU {self.comm.index}",
                cure=f"open groups with the device that uses them, or open cuda:{self.comm.index}",
                device=device.located,
                argument="group",
            )

    @property
    def lost(self) -> str:
        """Return why queued work may never end; "" while the group works, and again once NCCL has aborted it."""
        reason = self._open.watchdog.reason
        if reason:
            self.comm.settle()
        return "" if self.comm.ended else reason

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Make ``part`` equal to that of the group's first rank, in one collective, in place."""
        own = self._device.own_stream(stream)
        self._device.order_after_reads(own, memory)
        number = self._begin()
        try:
            self.comm.broadcast(self._device.address_of(memory) + part.offset, part.nbytes, self._source, own.handle)
            event = self._device.mark(own)
        except Exception as error:
            raise self._failed(error) from error
        self._device.count("collectives")
        return NcclTicket(event, self._open, number)

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Return every rank's block, by global rank, after one broadcast from each on a separate stream. Waits for
        them."""
        device, size = self._device, len(block)
        number = self._begin()
        try:  # not Paddle's memory: Paddle waits for the default stream, which may wait for a rank
            stream, memory = device.stream(), AsyncDevice.allocate(device, size * len(self._ranks))
            mine = memory.address + self._ranks.index(self.group.rank) * size
            device.upload(mine, np.frombuffer(block, np.uint8), stream)
            for place in range(len(self._ranks)):
                self.comm.broadcast(memory.address + place * size, size, place, stream.handle)
            event = device.mark(stream)
        except Exception as error:
            raise self._failed(error) from error
        NcclTicket(event, self._open, number).wait()
        copied = device.copy_out(memory, [ByteRange(0, memory.nbytes)], stream)
        copied.wait()
        data = copied.data[0].tobytes()
        return {rank: data[at * size : (at + 1) * size] for at, rank in enumerate(self._ranks)}

    def _begin(self) -> int:
        """Return the number of a new collective. If the group is lost, raise :class:`GroupLost` once no work waits for
        it."""
        try:
            return self._open.watchdog.begin()
        except GroupLost:
            self.comm.settle()
            raise

    def _failed(self, error: Exception) -> GroupLost:
        """Abort the group; return the error with the reason once no work waits for it."""
        lost = self._open.watchdog.failed(error)
        self.comm.settle()
        return lost

    def close(self) -> None:
        """Do nothing: the group stays open for the process (:func:`hal_core.devices.close_groups`)."""


class NativeCommunicator(NcclCommunicator):
    """The same by native calls. One call makes an announced broadcast: header, collective, events, header's copy."""

    def __init__(self, device: OnGpu, group: Group, open_group: OpenGroup, call: Callable[..., int]) -> None:
        super().__init__(device, group, open_group)
        self._call = call
        self._announced: tuple[Memory, ByteRange, bytes] | None = None
        self._fixed: tuple[Memory | None, ByteRange | None, int, int, bytes] = None, None, 0, 0, b""

    def announce(self, memory: Memory, place: ByteRange, header: bytes) -> None:
        """See :class:`hal_core.devices.Communicator`. It replaces an earlier announced header."""
        self._announced = memory, place, header

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Do the same in one function: each Python call here would cost a fiftieth of a broadcast."""
        announced, self._announced = self._announced, None
        if announced is None or announced[0] is not memory or announced[1].offset != part.offset:
            return super().broadcast(memory, part, stream)
        device, group, comm, counts = self._device, self._open, self.comm, self._device._counts
        events = device.events
        own = device.own_stream(stream)
        if device.reads.under_way:
            device.reads.order(memory, own)
        begin, end, fixed = self._places(memory, part, announced[1])
        copies = own.copy_stream or own
        lease = Lease(device.blocks, device.blocks.take(end - begin))
        number = self._begin()
        event, copied = events.take(own), events.take(copies)
        lease.event = copied
        try:
            with comm.lock:
                if not comm.handle:
                    raise comm.gone()
                status = self._call(
                    fixed, announced[2], comm.handle, own.raw, event.raw, copies.raw, lease.block.address, copied.raw
                )
            if status:
                comm.library.check(status, "ncclBroadcast")
        except Exception as error:
            with suppress(HalError):  # part of the broadcast may be in flight
                event, lease.event = device.mark(own), device.mark(copies)
            raise self._failed(error) from error
        finally:
            device.reads.note(begin, end, lease.event)
            device.last[own.stream_key], device.last[copies.stream_key] = event, lease.event
        counts["collectives"] += 1
        counts["copies_out"] += 1
        if announced[2]:
            counts["launches"] += 1
            counts["submissions"] += 1
        return HeadedTicket(event, group, number, device.copy_type(copied, lease, ((0, end - begin),)))

    def _places(self, memory: Memory, part: ByteRange, place: ByteRange) -> tuple[int, int, bytes]:
        """Return the header's begin and end, and the native call's arguments for this part, computed once."""
        known, of, begin, end, fixed = self._fixed
        if known is not memory or of is not part:
            device = self._device
            at, small = device.address_of(memory), device.kernels.small
            begin, end = at + place.offset, at + place.end
            function = self.comm.library.address("broadcast")
            fixed = FIXED.pack(
                function, self._source, at + part.offset, part.nbytes, begin, place.nbytes, small.function, small.at
            )
            self._fixed = memory, part, begin, end, fixed
        return begin, end, fixed

    def close(self) -> None:
        """Do the same, and free the memory."""
        self._announced, self._fixed = None, (None, None, 0, 0, b"")


def open_communicator(device: OnGpu, group: Group, timeout: float | None = None) -> Communicator:
    """Return the group opened by ``hal_core.devices.open_groups``, else the group of all ranks of the job.

    All its ranks must call this in the same order, each with its own GPU.
    """
    found = opened(group, backend=device.groups_by, timeout=timeout, make=device.make_group)
    native = device.driver.native
    if native is None:
        return NcclCommunicator(device, group, found)
    return NativeCommunicator(device, group, found, native.calls.broadcast)
