"""Copies out of one part on the native path: an output's and a broadcast's header, each in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.devices import AsyncStream, Lease, RecordedEvent

if TYPE_CHECKING:
    from hal_core import ByteRange, Stream
    from hal_core.devices import CopyTicket, Memory

    from .base import OnGpu
    from .native import Native


class NativeCopies:
    """Copies for one device. One event orders all of them after their streams' work: a stream that was made to wait
    for it keeps the record that it met."""

    def __init__(self, device: OnGpu, native: Native) -> None:
        self._device, self._copy = device, native.calls.copy_out
        self._before = device.events.take(device.uploads)

    def copy_out(self, memory: Memory, part: ByteRange, stream: Stream) -> CopyTicket:
        """Copy a part, which lies in the memory. Written out, as every call of Python's here is a fortieth of it."""
        device = self._device
        if device._closed or device.driver.broken or device.health.unusable:
            device.check_open()
        events, blocks, nbytes = device.events, device.blocks, part.nbytes
        after = stream if type(stream) is AsyncStream and stream.pool is events else device.own(stream)
        begin = device.address_of(memory) + part.offset
        copies = after._beside or after.beside()
        lease = Lease(blocks, blocks.take(nbytes))
        free, key = events.free, copies.stream_key
        event = lease.event = RecordedEvent(events, free.popleft(), key) if free else events.take(copies)
        try:
            self._copy(lease.block.address, after.raw, copies.raw, self._before.raw, event.raw, (begin, nbytes))
        except BaseException:
            event = lease.event = device.mark(copies)  # it may be under way
            raise
        finally:
            device.reads.under_way.append((begin, begin + nbytes, event))
            device.last[key] = event
        if nbytes:
            device._counts["copies_out"] += 1
        return device.copy_type(event, lease, ((0, nbytes),))
