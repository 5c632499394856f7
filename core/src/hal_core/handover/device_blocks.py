"""Blocks in device memory: a :class:`BlockCache` over one allocation, for runners that keep their cache there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hal_core.memory.copies import Bytes
from hal_core.memory.dtypes import UINT8
from hal_core.memory.views import ByteRange, Memory, View
from hal_core.tickets import Ticket

if TYPE_CHECKING:
    from hal_core.streams import Stream


class Copies(Protocol):
    """The device methods used here; a bound device has them."""

    @property
    def deadline(self) -> float | None:
        """Seconds that a call waits for the device at most."""

    @property
    def default_stream(self) -> Any:  # noqa: ANN401 (a stream of the device's)
        """The stream on which steps run."""

    def copy_out(self, *, memory: Memory, parts: Sequence[ByteRange], stream: Any) -> Any:  # noqa: ANN401
        """Copy byte ranges to the host; return a ticket with ``data``."""

    def async_set_value(self, *, target: View, value: Any, stream: Any) -> Ticket:  # noqa: ANN401
        """Write a value after the work on the stream."""


class AllOf(Ticket):
    """A ticket that is done when all its tickets are; it fails with the first of their errors."""

    mode = "async"

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tickets

    @property
    def observed(self) -> bool:
        """Whether an error was raised or reported: that of its tickets, which the device asks."""
        return all(ticket.observed for ticket in self._tickets)

    @observed.setter
    def observed(self, value: bool) -> None:
        for ticket in self._tickets:
            ticket.observed = value

    def done(self) -> bool:
        """See :class:`Ticket`."""
        return all(ticket.done() for ticket in self._tickets)

    def _block(self, timeout: float | None) -> bool:
        end = None if timeout is None else monotonic() + timeout
        return all(ticket._block(None if end is None else max(0.0, end - monotonic())) for ticket in self._tickets)

    def failure(self) -> BaseException | None:
        """See :class:`Ticket`."""
        return next((error for ticket in self._tickets if (error := ticket.failure()) is not None), None)


class DeviceBlocks:
    """``blocks`` contiguous blocks of ``block_bytes`` bytes each, from the start of ``memory``.

    They are read and written in the order of ``stream``, the stream on which steps run.
    """

    def __init__(
        self,
        device: Copies,
        memory: Memory,
        blocks: int,
        block_bytes: int,
        facts: Mapping[str, str],
        stream: Stream | None = None,
    ) -> None:
        self.blocks, self.block_bytes = blocks, block_bytes
        self._device, self._memory, self._facts = device, memory, dict(facts)
        self._stream = device.default_stream if stream is None else stream

    def facts(self) -> Mapping[str, str]:
        """Return the facts given to the constructor."""
        return self._facts

    def read(self, blocks: Sequence[int]) -> Bytes:
        """See :class:`hal_core.handover.BlockCache`. Waits for the work on the stream, up to the device's deadline."""
        parts = [ByteRange(block * self.block_bytes, self.block_bytes) for block in blocks]
        copied = self._device.copy_out(memory=self._memory, parts=parts, stream=self._stream)
        copied.wait(self._device.deadline)
        return np.array([np.asarray(data, np.uint8).reshape(-1) for data in copied.data])

    def write(self, blocks: Sequence[int], data: Bytes) -> Ticket:
        """See :class:`hal_core.handover.BlockCache`."""
        size = self.block_bytes
        views = [View.contiguous(self._memory, block * size, (size,), UINT8) for block in blocks]
        set_value = self._device.async_set_value
        return AllOf(
            [set_value(target=view, value=row, stream=self._stream) for view, row in zip(views, data, strict=True)]
        )
