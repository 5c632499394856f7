"""The communicator of a group over NCCL, through ``paddle.distributed``; lost peers are found by the shared watchdog.

A broadcast is put on the stream and returns; its ticket is done when the GPU is. NCCL cannot be told to give up from
outside, so a rank that is lost leaves the stream waiting: the ticket then raises :class:`GroupLost` within the timeout,
every later call does so too, and the process has to be ended.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from hal_core.errors import GroupLost, InvalidValue
from hal_core.paddle_world import DEFAULT_TIMEOUT, distributed, exchange, join_world
from hal_core.peers import Endpoint, Listener
from hal_core.tickets import Mode, Ticket
from hal_core.watchdog import Watchdog

from .streams import POLL, CudaEvent

if TYPE_CHECKING:
    from hal_core.device import Stream
    from hal_core.group import Group
    from hal_core.layout import ByteRange
    from hal_core.views import Memory

    from .device import CudaDevice


class NcclTicket(Ticket):
    """A broadcast under way: done when its event has passed, failed when the watchdog has given the group up."""

    __slots__ = ("_error", "_event", "_watchdog")
    mode: Mode = "async"

    def __init__(self, event: CudaEvent, watchdog: Watchdog) -> None:
        super().__init__()
        self._event, self._watchdog = event, watchdog
        self._error: BaseException | None = None

    def done(self) -> bool:
        if self._error is None and not self._event.passed:
            if self._event.done():
                self._watchdog.end()
            elif self._watchdog.reason:
                self._error = self._watchdog.error(self._watchdog.reason)
        return self._error is not None or self._event.passed

    def _block(self, timeout: float | None) -> bool:
        end = None if timeout is None else monotonic() + timeout
        while not self.done():
            if end is not None and monotonic() >= end:
                return False
            sleep(POLL)
        return True

    def failure(self) -> BaseException | None:
        return self._error


class NcclCommunicator:
    """One group on one GPU. ``broadcast`` is one collective over a slice of the state, in place."""

    def __init__(self, device: CudaDevice, group: Group, process_group: Any, watchdog: Watchdog) -> None:  # noqa: ANN401
        self._device, self.group = device, group
        self._process_group, self._watchdog = process_group, watchdog
        self._ranks = tuple(sorted(group.ranks))
        self._source = self._ranks.index(group.source)
        self._tensors: dict[tuple[int, ByteRange], Any] = {}

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Make ``part`` equal to that of the group's first rank."""
        key = (memory.address, part)
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._tensors[key] = tensor_over(memory, part)
        self._watchdog.begin()
        self._process_group.broadcast(tensor, self._source, True).wait()  # orders the stream, not the host
        self._device.count("collectives")
        event = stream.record()
        assert isinstance(event, CudaEvent)
        return NcclTicket(event, self._watchdog)

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Every rank's block, by global rank."""
        return exchange(block, self.group.rank, self._ranks, self._send)

    def _send(self, tensor: Any, source: int) -> None:  # noqa: ANN401
        self._watchdog.begin()
        self._process_group.broadcast(tensor, self._ranks.index(source), True).wait()
        self._watchdog.end()

    def close(self) -> None:
        """Say goodbye to the other ranks."""
        self._tensors.clear()
        self._watchdog.close()


def tensor_over(memory: Memory, part: ByteRange) -> Any:  # noqa: ANN401 (a Paddle tensor)
    """The part as a tensor that shares the memory: a slice of the int64 base that Paddle itself allocated.

    The slice ends on a whole element: what lies behind a field up to the next is padding (hal_core.layout.ALIGNMENT).
    """
    base = getattr(memory, "keep", None)
    if base is None or not hasattr(base, "data_ptr"):
        raise InvalidValue(
            "the state's memory is not Paddle's, and NCCL is reached through Paddle",
            cure="import a CUDA build of paddle before the device is opened",
            argument="state",
        )
    return base[part.offset // 8 : -(-part.end // 8)]


def open_communicator(device: CudaDevice, group: Group, timeout: float = DEFAULT_TIMEOUT) -> NcclCommunicator:
    """Open ``group``, which must be all ranks of the job; all of them call this in one order."""
    me, size = join_world(backend="nccl", timeout=timeout)
    ranks = tuple(sorted(group.ranks))
    dist = distributed()
    host = os.environ["PADDLE_CURRENT_ENDPOINT"].rpartition(":")[0].strip("[]")
    with Listener(socket.gethostbyname(host) if host else "127.0.0.1") as listener:
        blocks = exchange(listener.endpoint.pack(), me, range(size), lambda t, rank: dist.broadcast(t, rank) and None)
        endpoints = {rank: Endpoint.unpack(block) for rank, block in blocks.items()}
        links = listener.meet(me, [ranks], endpoints, timeout)
    made = dist.new_group(list(ranks), backend="nccl") if len(ranks) < size else dist.collective._get_default_group()
    if group.rank != me:
        raise InvalidValue(f"rank {group.rank} is not this process, which is {me}", argument="group")
    watchdog = Watchdog(me, links[0], timeout, lambda: None)
    return NcclCommunicator(device, group, made.process_group, watchdog)


__all__ = ["GroupLost", "NcclCommunicator", "open_communicator"]
