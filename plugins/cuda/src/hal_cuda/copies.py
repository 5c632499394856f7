"""Copies out of one part, as of an output or a broadcast's header: a short one is made by a kernel, on its stream.

The next step's writes to the copied bytes must wait for the copy. With the copy engine, beside the stream, that takes
14 us between two overlapping steps. A kernel in order with the step's own work takes 3 to 4, and the host needs one
launch and one event, without a second stream or a wait (docs/evidence/gap.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.devices import AsyncStream, Lease, RecordedEvent

if TYPE_CHECKING:
    from hal_core import ByteRange, Stream
    from hal_core.devices import CopyTicket, Memory

    from .base import OnNative

BY_KERNEL = 64 << 10
"""Bytes; up to this size a kernel makes the copy, 64 KB in 6 us on an H200: less than the copy engine takes to begin. A
longer copy would delay the stream's own work, while the engine works beside it."""


class Copies:
    """Copies for one device, each in one native call.

    One event orders all long ones after their streams' work: a stream that waits for it keeps the record it met.
    Written out, as every Python call here is a fortieth of an output.
    """

    def __init__(self, device: OnNative) -> None:
        self._device, self._function = device, device.kernels.copy_out.function
        calls = device.native.calls
        self._copy, self._write, self._captures = calls.copy_out, calls.write_out, calls.capturing
        self._before = device.events.take(device.uploads)

    def copy_out(self, memory: Memory, part: ByteRange, stream: Stream) -> CopyTicket:
        """Copy a part, which lies in the memory."""
        device = self._device
        if device._closed or device.driver.broken or device.health.unusable:
            device.check_open()
        device.retired.look()
        events, blocks, nbytes = device.events, device.blocks, part.nbytes
        after = stream if type(stream) is AsyncStream and stream.pool is events else device.own(stream)
        begin = device.address_of(memory) + part.offset
        copies = after if nbytes <= BY_KERNEL else after.beside()
        lease = Lease(blocks, blocks.take(nbytes))
        free, key = events.free, copies.stream_key
        event = lease.event = RecordedEvent(events, free.popleft(), key) if free else events.take(copies)
        try:
            if copies is after:
                self._write(lease.block.address, begin, nbytes, after.raw, self._function, event.raw)
            else:
                self._copy(lease.block.address, after.raw, copies.raw, self._before.raw, event.raw, (begin, nbytes))
        except BaseException:
            if not self._captures(copies.raw):  # otherwise it was refused, and no work is in flight
                event = lease.event = device.mark(copies)
                device.reads.note(begin, begin + nbytes, event)
            raise
        device.reads.note(begin, begin + nbytes, event)
        device.last[key] = event
        if nbytes:
            device._counts["copies_out"] += 1
        return device.copy_type(event, lease, ((0, nbytes),))
