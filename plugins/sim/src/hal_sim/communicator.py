"""A group's collectives on the sim device, over shared memory, without Paddle.

The ranks meet under a name that all ranks of a job derive in the same way. The accelerator notices the loss and silence
of a peer within its option ``collective_timeout_ms``, which is read when the group is opened.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from hal_core import ByteRange, GroupLost, Ticket
from hal_core.devices import AsyncTicket, RecordedEvent

from hal_sim.group import Group as NativeGroup

if TYPE_CHECKING:
    from hal_core import Group, Stream
    from hal_core.devices import Memory

    from hal_sim.base import OnAccelerator

_opened: dict[tuple[str, tuple[int, ...]], int] = {}
"""How often this process has opened a group; all ranks open their groups in the same order."""


def job_name() -> str:
    """Return the name of this process's job: ``HALSIM_JOB``, else a name derived from common properties of its ranks.

    These are the parent process, its start time, and the endpoints of ``paddle.distributed``. Ranks started by
    different processes need ``HALSIM_JOB`` or the option ``job``.
    """
    named = os.environ.get("HALSIM_JOB")
    if named:
        return named
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/stat") as file:
            started = file.read().rpartition(")")[2].split()[19]
    except OSError:
        started = "0"
    return f"{parent}_{started}_{os.environ.get('PADDLE_TRAINER_ENDPOINTS', '')}"


def _segment_name(job: str, ranks: tuple[int, ...]) -> str:
    """Return the name of the group's segment; its prefix allows segments of finished jobs to be removed
    (``group.cc``)."""
    count = _opened[job, ranks] = _opened.get((job, ranks), 0) + 1
    process, _, rest = job.partition("_")
    started = rest.partition("_")[0]
    maker = f"{process}_{started}" if process.isdigit() and started.isdigit() else "0_0"
    return f"/halsim_{maker}_{hashlib.sha256(f'{job}|{ranks}|{count}'.encode()).hexdigest()[:16]}"


class SimCommunicator:
    """One rank's membership in a group; see :class:`hal_core.devices.Communicator`. A lost group stays lost."""

    def __init__(self, device: OnAccelerator, group: Group) -> None:
        """Wait for the other ranks to join, at most ``collective_timeout_ms``."""
        self._device, self.ranks, self.rank = device, tuple(sorted(group.ranks)), group.rank
        self._source, self.closed = self.ranks.index(group.source), False
        self._at_close: GroupLost | None = None
        name, place = _segment_name(device.job, self.ranks), self.ranks.index(group.rank)
        try:
            self._group = NativeGroup(name, len(self.ranks), place)
        except GroupLost as error:
            raise self._loss(error.what) from error

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Make ``part`` of ``memory`` equal to that of the group's first rank, in one collective on ``stream``."""
        device, own = self._device, self._device.own_stream(stream)
        self._check()
        device.order_after_reads(own, memory)
        self._group.broadcast(memory.address + part.offset, part.nbytes, np.uint8, self._source, own.raw)
        device.count("collectives")
        return GroupTicket(device.mark(own), self)

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Return every rank's block, by global rank: one collective. Waits for the other ranks."""
        device, stream, size = self._device, self._device.stream(), len(block)
        accelerator, blocks = device.accelerator, device.blocks
        self._check()
        mine, everyones = device.allocate(size), device.allocate(size * len(self.ranks))
        staged = blocks.take(size)
        accelerator.host_write(staged.address, size)
        staged.buffer[:size] = np.frombuffer(block, np.uint8)
        try:
            accelerator.h2d(mine.address, staged.address, size, stream.raw)
            self._group.all_gather(mine.address, everyones.address, size, np.uint8, stream.raw)
        finally:
            event = device.mark(stream)
            blocks.give_after(event, staged)
        GroupTicket(event, self).wait()
        copied = device.copy_out(everyones, [ByteRange(0, everyones.nbytes)], stream)
        copied.wait()
        data = copied.data[0].tobytes()
        return {rank: data[at * size : (at + 1) * size] for at, rank in enumerate(self.ranks)}

    def failure(self) -> GroupLost | None:
        """Return why the group is lost, or None."""
        try:
            self._check()
        except GroupLost as error:
            return error
        return None

    def fate(self) -> GroupLost | None:
        """Return the error for finished work: the group's error while it is open, then its error at the time of
        leaving."""
        return self._at_close if self.closed else self.failure()

    def _check(self) -> None:
        """Raise if the group is lost."""
        if self.closed:
            raise self._loss("it was closed here")
        try:
            self._group.check()
        except GroupLost as error:
            raise self._loss(error.what) from error

    def _loss(self, why: str) -> GroupLost:
        return GroupLost(
            f"the group of rank {self.rank} is lost: {why}",
            cure="its ranks no longer agree: end all of them and start them again",
            device=self._device.located,
            hook="broadcast_tokens",
            argument="group",
        )

    def close(self) -> None:
        """Leave the group; waiting peers are notified. Idempotent."""
        if not self.closed:
            self._at_close = self.failure()
            self.closed = True
            self._group.leave()


class GroupTicket(AsyncTicket):
    """A collective. It fails if the group is lost when the ticket is checked, or was lost when the group was left."""

    __slots__ = ("_communicator",)

    def __init__(self, event: RecordedEvent, communicator: SimCommunicator) -> None:
        super().__init__(event)
        self._communicator = communicator

    def _find(self, event: RecordedEvent) -> Exception | None:
        fault = super()._find(event)
        return self._communicator.fate() or fault
