"""Liars of the fourth set, by a hand that had seen no test: short ways of a vendor that no test of that time found."""

from __future__ import annotations

from typing import Any

import numpy as np
from hal_core import View, hookimpl
from hal_core.slots.host_table import BLOCKS
from hal_core.slots.task import TaskKind

from . import Lie, liar
from .proxies import HELD

BELOW = (*HELD, "primitives")


@liar(2, "read-only arrays are uploaded from the caller's memory", requires=BELOW)
class ReadOnlyIsBorrowed(Lie):
    """They look unchangeable, but the memory under a read-only view is the caller's."""

    def submit_value(self, target: Any, value: Any, stream: Any) -> Any:  # noqa: ANN401
        """Copy straight from a read-only array."""
        device: Any = self
        written = not isinstance(value, np.ndarray) or value.flags.writeable or target.collapsed()[0]
        if written or not value.nbytes:
            return super().submit_value(target, value, stream)  # type: ignore[misc]
        own = device.own(stream)
        device.order_after_reads(own, target.memory)
        place = device.address_of(target.memory) + target.offset
        device.primitives.copy_in(place, value.ctypes.data, value.nbytes, own.raw)
        device.primitives.count("uploads")
        ticket = device.ticket(own)
        ticket.keep = value
        return ticket


@liar(28, "the event after a stream's work is that after hal's own last work there", requires=BELOW)
class EventOfLastWork(Lie):
    """No event is recorded where one is known; a wait of the stream, or a model's kernels, may have come since."""

    def event(self, stream: Any) -> Any:  # noqa: ANN401
        """Return the known one."""
        device: Any = self
        own = device.own(stream)
        return device.last.get(own.stream_key) or device.events.record(own)


@liar(1, "a device value's stride of 0 means contiguous", requires=HELD)
class NoStrideIsContiguous(Lie):
    """Tensors without strides are contiguous in DLPack, and the kernel takes a stride of 0 for none."""

    def copy_within(self, target: Any, value: Any, stream: Any) -> Any:  # noqa: ANN401
        """Copy elements that follow one another."""
        if value.size > 1 and not any(value.strides):
            packed = View.contiguous(value.memory, value.offset, value.shape, value.dtype)
            value = packed if packed.bounds()[1] <= value.memory.nbytes else value
        return super().copy_within(target, value, stream)  # type: ignore[misc]


class BooksBlocksAsHeld:
    """A twin of a state's table that books all but the length that more blocks have written."""

    def __init__(self, table: Any) -> None:  # noqa: ANN401
        self.table = table

    def sound(self, _: Any) -> bool:  # noqa: ANN401
        """Leave the checks to the core."""
        return False

    def commit(self, batch: Any) -> bool:  # noqa: ANN401
        """Book the batch."""
        lengths, self.table.twin = self.table.row_lengths[BLOCKS].copy(), None
        try:
            self.table.commit(batch)
        finally:
            self.table.twin = self
        for kind, slot in zip(batch.plain["kinds"], batch.plain["slots"], strict=True):
            if kind == TaskKind.MORE_BLOCKS:
                self.table.row_lengths[BLOCKS][slot] = lengths[slot]
        return True


@liar(11, "native booking counts more blocks as held, and not as written")
class MoreBlocksAreNotBooked(Lie):
    """The next request's row is then reset to the length that the first task had written."""

    def register_state(self, state: Any) -> None:  # noqa: ANN401
        """Give the state the native table."""
        super().register_state(state)  # type: ignore[misc]
        state.host_table.twin = BooksBlocksAsHeld(state.host_table)


@liar(19, "what is known of the slots is kept while steps have the same orders")
class SlotsOfTheOrdersAreKept(Lie):
    """``Step.again`` gives a step the orders of an earlier one, and the slots may hold other requests by then."""

    def laid(self) -> None:
        """Begin without a known step."""
        self.known: Any = None

    @hookimpl
    def save_output(self, device: Any, state: Any, step: Any, sink: Any, stream: Any) -> Any:  # noqa: ANN401
        """Save with the snapshot of the step whose orders these were."""
        ticket = super().save_output(device=device, state=state, step=step, sink=sink, stream=stream)  # type: ignore[misc]
        if self.known and self.known[0] is state and self.known[1] is step.orders:
            ticket._snapshot = self.known[2]._replace(step=step)
        else:
            self.known = state, step.orders, ticket._snapshot
        return ticket


@liar(24, "log-probabilities are copied on the default stream", requires=(*HELD, "async_d2h"))
class LogprobsOnTheDefaultStream(Lie):
    """The way with log-probabilities was written when there was one stream."""

    @hookimpl
    def save_output(self, device: Any, state: Any, step: Any, sink: Any, stream: Any) -> Any:  # noqa: ANN401
        """Copy after the work of that stream."""
        if step.logprobs is not None:
            stream = device.default_stream
        return super().save_output(device=device, state=state, step=step, sink=sink, stream=stream)  # type: ignore[misc]


@liar(3, "a value above the limit does not wait for its stream", requires=HELD)
class LimitOfValuesIsIgnored(Lie):
    """It takes as much device memory as it needs, however long its stream is held."""

    def require_moving(self, nbytes: int, stream: object) -> None:
        """Count, and do not wait."""
        device: Any = self
        device.count("host_waits")


@liar(4, "fills of 0 from 64 KiB on run beside their stream", requires=HELD)
class ZerosRunBeside(Lie):
    """As a memset of the copy engine, after the stream's earlier work; the stream's later work does not wait for it."""

    def submit_value(self, target: Any, value: Any, stream: Any) -> Any:  # noqa: ANN401
        """Choose the engine's stream."""
        device: Any = self
        shape, _, nbytes = target.collapsed()
        if not isinstance(value, np.ndarray) and not value and not shape and nbytes >= 1 << 16:
            own = device.own(stream)
            stream = own.beside
            stream.wait(own.record())
        return super().submit_value(target, value, stream)  # type: ignore[misc]


@liar(26, "close waits for the default stream alone", requires=HELD)
class CloseWaitsForOneStream(Lie):
    """Work of other streams then finds its memory freed."""

    def _settled(self) -> bool:
        """Return whether that stream's work is done in time."""
        device: Any = self
        event = device.last.get(device.default_stream.stream_key)
        return event is None or bool(event.wait(device.staging.deadline))
