"""Collectives of Paddle-backed devices: one broadcast of one slice, through ``paddle.distributed``.

Over gloo (the CPU place) that is :class:`hal_core.paddle_groups.PaddleCommunicator`. Device libraries (XCCL, BKCL) put
their work on the stream and return; what is here watches it. They cannot be told to give up from outside: where a rank
is lost, the ticket raises :class:`hal_core.errors.GroupLost` within the timeout, and the process has to be ended.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from ..errors import InvalidValue
from ..paddle_groups import PaddleCommunicator, opened
from ..paddle_world import DEFAULT_TIMEOUT, distributed, exchange, join_world
from ..peers import Endpoint, Listener
from ..tickets import Mode, Ticket
from ..watchdog import Watchdog
from .memory import WORD, PaddleMemory, Tensor
from .streams import POLL

if TYPE_CHECKING:
    from ..device import Communicator, Event, Stream
    from ..group import Group
    from ..layout import ByteRange
    from ..views import Memory
    from .device import PaddleDevice


class CollectiveTicket(Ticket):
    """A broadcast under way: done when its event has passed, failed when the watchdog has given the group up."""

    __slots__ = ("_error", "_event", "_watchdog", "mode")

    def __init__(self, event: Event, watchdog: Watchdog, mode: Mode) -> None:
        super().__init__()
        self._event, self._watchdog = event, watchdog
        self._error: BaseException | None = None
        self.mode: Mode = mode

    def done(self) -> bool:
        if self._error is not None:
            return True
        try:
            if self._event.done():
                self._watchdog.end()
                return True
        except Exception as error:  # noqa: BLE001 (kept for wait() and the next hook: done() never raises)
            self._error = self._watchdog.failed(error)
            return True
        if self._watchdog.reason:
            self._error = self._watchdog.error(self._watchdog.reason)
        return self._error is not None

    def _block(self, timeout: float | None) -> bool:
        end = None if timeout is None else monotonic() + timeout
        while not self.done():
            if end is not None and monotonic() >= end:
                return False
            sleep(POLL)
        return True

    def failure(self) -> BaseException | None:
        return self._error


class DeviceCommunicator:
    """One group on one device; see :class:`hal_core.device.Communicator`."""

    def __init__(self, device: PaddleDevice, group: Group, process_group: Any, watchdog: Watchdog) -> None:  # noqa: ANN401
        self._device, self.group = device, group
        self._process_group, self._watchdog = process_group, watchdog
        self._ranks = tuple(sorted(group.ranks))
        self._tensors: dict[tuple[int, ByteRange], Tensor] = {}

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Make ``part`` equal to that of the group's first rank, in one collective, in place.

        It goes as whole int64 words, which every library knows; what follows a field up to the next is padding.
        """
        assert isinstance(memory, PaddleMemory)
        key = (memory.address, part)
        tensor = self._tensors.get(key)
        if tensor is None:
            first = memory.begin + part.offset
            words = slice(first // WORD, -(-(first + part.nbytes) // WORD))
            tensor = self._tensors[key] = memory.typed("int64")[words]
        self._device.before_write(memory, stream)
        with self._device.current(stream):
            self._send(tensor, self.group.source)
        self._device.count("collectives")
        event, ticket = self._device.after_work(stream, memory)
        return CollectiveTicket(event, self._watchdog, ticket.mode)

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Every rank's block, by global rank."""

        def send(tensor: Tensor, source: int) -> None:
            self._send(tensor, source)
            self._watchdog.end()

        with _on(self._device):
            return exchange(block, self.group.rank, self._ranks, send)

    def close(self) -> None:
        """Say goodbye to the other ranks."""
        self._tensors.clear()
        self._watchdog.close()

    def _send(self, tensor: Tensor, source: int) -> None:
        self._watchdog.begin()
        try:
            # wait() lets the current stream wait for the library's own stream, and not the host.
            self._process_group.broadcast(tensor, self._ranks.index(source), True).wait()
        except Exception as error:  # the library's own error types differ
            raise self._watchdog.failed(error) from error


@contextmanager
def _on(device: PaddleDevice) -> Iterator[None]:
    """Let Paddle make new tensors on the device, as it does for collectives."""
    import paddle

    before = paddle.get_device()
    paddle.set_device(str(device.place).removeprefix("Place(").removesuffix(")"))
    try:
        yield
    finally:
        paddle.set_device(before)


def open_communicator(
    device: PaddleDevice, group: Group, backend: str, timeout: float = DEFAULT_TIMEOUT
) -> Communicator:
    """Open a group over gloo, or one of all ranks of the job over a device's own library."""
    if backend == "gloo":
        return PaddleCommunicator(group, opened(group), _host_bytes)
    with _on(device):
        me, size = join_world(backend=backend, timeout=timeout)
        ranks = tuple(sorted(group.ranks))
        if len(ranks) != size or group.rank != me:
            raise InvalidValue(
                f"the group {group.ranks}, rank {group.rank}, of a job of {size} ranks in which this process is {me}",
                cure=f"over {backend} a group is all ranks of the job",
                argument="group",
            )
        dist = distributed()
        host = os.environ["PADDLE_CURRENT_ENDPOINT"].rpartition(":")[0].strip("[]")
        with Listener(socket.gethostbyname(host) if host else "127.0.0.1") as listener:
            block = listener.endpoint.pack()
            blocks = exchange(block, me, ranks, lambda tensor, rank: dist.broadcast(tensor, rank) and None)
            endpoints = {rank: Endpoint.unpack(found) for rank, found in blocks.items()}
            links = listener.meet(me, [ranks], endpoints, timeout)
    watchdog = Watchdog(me, links[0], timeout, lambda: None)
    return DeviceCommunicator(device, group, dist.collective._get_default_group().process_group, watchdog)


def _host_bytes(memory: Memory, part: ByteRange) -> Tensor:
    assert isinstance(memory, PaddleMemory)
    return memory.bytes(part.offset, part.nbytes)
