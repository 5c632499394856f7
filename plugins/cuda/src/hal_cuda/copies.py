"""Copies out of one part, such as an output or a broadcast's header; a kernel on the stream makes the short ones.

The next step's writes to the copied bytes must wait for the copy. The copy engine, which works beside the stream, adds
14 us between two overlapping steps. A kernel in order with the step's own work adds 3 to 4 us, and costs the host one
launch and one event, without a second stream or a wait (docs/evidence/gap.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.devices import Lease, RecordedEvent

if TYPE_CHECKING:
    from hal_core import ByteRange, Stream
    from hal_core.devices import CopyTicket, Memory

    from .base import OnNative

BY_KERNEL = 64 << 10
"""Bytes: a kernel makes copies up to this size (64 KB take 6 us on an H200, less than the copy engine needs to begin).
A longer copy would delay the stream's own work, so the copy engine makes it beside the stream."""


class Copies:
    """Copies out for one device, each by one native call.

    One event orders all long copies after their streams' work; a waiting stream keeps the event's state of that moment.
    One function, as each Python call here would cost a fortieth of an output.
    """

    def __init__(self, device: OnNative) -> None:
        self._device, self._function = device, device.kernels.copy_out.function
        calls = device.native.calls
        self._copy, self._write, self._captures = calls.copy_out, calls.write_out, calls.capturing
        self._before = device.events.take(device.upload_stream)

    def copy_out(self, memory: Memory, part: ByteRange, stream: Stream) -> CopyTicket:
        """Copy a part of the memory."""
        device = self._device
        after = device.working(stream)
        device.retired.look()
        events, blocks, nbytes = device.events, device.blocks, part.nbytes
        begin = device.address_of(memory) + part.offset
        copies = after if nbytes <= BY_KERNEL else after.copy_stream or after
        lease = Lease(blocks, blocks.take(nbytes))
        free, key = events.free, copies.stream_key
        event = lease.event = RecordedEvent(events, free.popleft(), key) if free else events.take(copies)
        try:
            if copies is after:
                self._write(lease.block.address, begin, nbytes, after.raw, self._function, event.raw)
            else:
                self._copy(lease.block.address, after.raw, copies.raw, self._before.raw, event.raw, (begin, nbytes))
        except BaseException:
            if not self._captures(copies.raw):  # otherwise the copy was refused, and no work is in flight
                event = lease.event = device.mark(copies)
                device.reads.note(begin, begin + nbytes, event)
            raise
        device.reads.note(begin, begin + nbytes, event)
        device.last[key] = event
        if nbytes:
            device._counts["copies_out"] += 1
        return device.copy_type(event, lease, ((0, nbytes),))
