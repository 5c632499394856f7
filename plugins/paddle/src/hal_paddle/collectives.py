"""Collectives of devices with Paddle memory: one broadcast of one slice, through ``paddle.distributed``.

Over gloo (the CPU place) that is :class:`hal_core.devices.PaddleCommunicator`. Device libraries (XCCL, BKCL) queue
their work on the stream and return; this module watches it. Paddle has no call to abort them. If a rank is lost, the
ticket raises :class:`hal_core.GroupLost` within the timeout, and the process must be ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hal_core.devices import CollectiveTicket, PaddleCommunicator, exchange_blocks, opened, paddle_device

from .paddle_memory import PaddleMemory, Tensor

if TYPE_CHECKING:
    from hal_core import ByteRange, Group, Stream, Ticket
    from hal_core.devices import Communicator, Memory, OpenGroup

    from .work import WorkingPlace


class DeviceCommunicator(PaddleCommunicator):
    """One group on one device, over its own library; see :class:`hal_core.devices.Communicator`."""

    def __init__(self, device: WorkingPlace, group: Group, open_group: OpenGroup) -> None:
        super().__init__(group, open_group, _bytes)
        self._device = device

    @property
    def lost(self) -> str:
        """The reason why the group was given up, or "". Work on the device that waits for it never ends."""
        return self._open.watchdog.reason

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Make ``part`` equal to that of the group's first rank, in one collective, in place."""
        self._device.before_write(memory, stream)
        ticket = self._collective(self._tensor(memory, part), self._source, stream, memory)
        self._device.count("collectives")
        return ticket

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Return every rank's block, by global rank."""
        stream = self._device.default_stream
        # Paddle's own copies wait for the stream without limit, and a collective that is still on it may never end.
        event, ticket = self._device.after_work(stream, None)
        CollectiveTicket(event, self._open.watchdog, ticket.mode, self._open.watchdog.calls).wait()

        def send(tensor: Tensor, source: int) -> None:
            self._collective(tensor, source, stream, tensor).wait()

        with paddle_device(self._device.place):
            return exchange_blocks(block, self.group.rank, self._open.ranks, send, self._device.place)

    def _collective(self, tensor: Tensor, source: int, stream: Stream, keep: object) -> CollectiveTicket:
        """Queue one broadcast on the stream; ``keep`` lives until it is done."""
        watchdog = self._open.watchdog
        number = watchdog.begin()
        try:
            with self._device.current(stream):
                self._open.start(tensor, source)
            event, ticket = self._device.after_work(stream, keep)
        except Exception as error:  # the library's own error types differ
            raise watchdog.failed(error) from error
        return CollectiveTicket(event, watchdog, ticket.mode, number)


def open_collectives(device: WorkingPlace, group: Group, backend: str) -> Communicator:
    """Open the group over gloo, or over the device's own library; see :func:`hal_core.devices.open_groups`."""
    if backend == "gloo":
        return PaddleCommunicator(group, opened(group), _bytes)
    with paddle_device(device.place):
        return DeviceCommunicator(device, group, opened(group, backend=backend))


def _bytes(memory: Memory, part: ByteRange) -> Tensor:
    assert isinstance(memory, PaddleMemory)
    return memory.bytes(part.offset, part.nbytes)
