"""Collectives of devices with Paddle memory: one broadcast of one slice, through Paddle's process groups.

On the CPU place hal's own collectives move the bytes. Device libraries (XCCL, BKCL) queue their work on the stream and
return; this module watches it. Paddle has no call to abort them. If a rank is lost, the ticket raises
:class:`hal_core.GroupLost` within the timeout, and the process must be ended.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.devices import HOST, CollectiveTicket, host_communicator, opened

from .paddle_memory import PaddleMemory, Tensor
from .places import paddle_device
from .process_groups import PaddleGroup

if TYPE_CHECKING:
    from hal_core import ByteRange, Group, Stream, Ticket
    from hal_core.devices import Communicator, Maker, Memory, OpenGroup

    from .work import WorkingPlace


class DeviceCommunicator:
    """One group on one device, over its own library; see :class:`hal_core.devices.Communicator`."""

    def __init__(self, device: WorkingPlace, group: Group, open_group: OpenGroup) -> None:
        self.group, self._device, self._open = group, device, open_group
        made: PaddleGroup = open_group.process_group
        self._library = made.group
        self._tensors: weakref.WeakKeyDictionary[Memory, dict[ByteRange, Tensor]] = weakref.WeakKeyDictionary()

    @property
    def lost(self) -> str:
        """The reason why the group was given up, or "". Work on the device that waits for it never ends."""
        return self._open.watchdog.reason

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Make ``part`` equal to that of the group's first rank, in one collective, in place."""
        self._device.before_write(memory, stream)
        ticket = self._collective(self._tensor(memory, part), self.group.source, stream, memory)
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
                # wait() makes the current stream, and not the host, wait for the library's own stream.
                self._library.broadcast(tensor, self._open.ranks.index(source), True).wait()
            event, ticket = self._device.after_work(stream, keep)
        except Exception as error:  # the library's own error types differ
            raise watchdog.failed(error) from error
        return CollectiveTicket(event, watchdog, ticket.mode, number)

    def _tensor(self, memory: Memory, part: ByteRange) -> Tensor:
        """Return the tensor over these bytes, made once for each part."""
        tensors = self._tensors.setdefault(memory, {})
        if part not in tensors:
            assert isinstance(memory, PaddleMemory)
            tensors[part] = memory.bytes(part.offset, part.nbytes)
        return tensors[part]

    def close(self) -> None:
        """Forget the tensors; the group stays open for the process (:func:`hal_core.devices.close_groups`)."""
        self._tensors.clear()


def open_collectives(device: WorkingPlace, group: Group, backend: str, make: Maker | None) -> Communicator:
    """Open the group over hal's own library, or over the device's; see :func:`hal_core.devices.open_groups`."""
    if backend == HOST:
        return host_communicator(group, _host_bytes)
    return DeviceCommunicator(device, group, opened(group, backend=backend, make=make))


def exchange_blocks(
    block: bytes,
    me: int,
    ranks: Sequence[int],
    broadcast: Callable[[Tensor, int], None],
    on: Any,  # noqa: ANN401 (a Paddle place)
) -> dict[int, bytes]:
    """Return every rank's block, by global rank: one broadcast of a tensor on the place ``on`` from each in turn.

    All blocks have the same size; waits for the device.
    """
    import paddle

    found = {}
    for rank in ranks:
        mine = np.frombuffer(block, np.uint8) if rank == me else np.zeros(len(block), np.uint8)
        tensor = paddle.to_tensor(mine, place=on)
        broadcast(tensor, rank)
        found[rank] = tensor.numpy().tobytes()
    return found


def _host_bytes(memory: Memory, part: ByteRange) -> memoryview:
    """Return bytes of a Paddle tensor on the CPU place; the memory's base keeps them alive."""
    return memoryview((ctypes.c_char * part.nbytes).from_address(memory.address + part.offset)).cast("B")
