"""Liars on paths by the form of an argument, or by how much is pending: each was alive before its test."""

from __future__ import annotations

from typing import Any

import numpy as np
from hal_core import Device, Stream, Ticket
from hal_core.runtime.policy import Policy

from . import Lie, liar
from .proxies import HELD

Hooks = Any


@liar(3, "the host waits for the oldest once 128 values are pending", requires=HELD)
class WaitsBehindMany(Lie):
    """The runtime's queue has so many places."""

    def laid(self) -> None:
        """Begin without pending calls."""
        self.pending: list[Ticket] = []

    def submit_value(self, target: Any, value: Any, stream: Any) -> Any:  # noqa: ANN401
        """Wait for a place."""
        self.pending = [ticket for ticket in self.pending if not ticket.done()]
        if len(self.pending) >= 128:
            self.pending[0].wait(20)
        ticket: Ticket = super().submit_value(target, value, stream)  # type: ignore[misc]
        self.pending.append(ticket)
        return ticket


@liar(6, "of an array, the first 4096 elements are checked")
class LateElementsWrap(Policy):
    """The rest is cast, as a sample has shown the class of the values."""

    def async_set_value(self, device: Device, hooks: Hooks, target: object, value: object, stream: Stream) -> Ticket:
        """Cast the rest."""
        into = device.resolve(target).dtype
        if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind == "i" and into.kind == "int":
            rest = value[4096:].astype(into.storage).astype(value.dtype)
            value = np.concatenate([value[:4096], rest]).astype(value.dtype)
        return super().async_set_value(device, hooks, target, value, stream)


@liar(22, "copies between views do not wait for copies out of their target", requires=(*HELD, "async_d2h"))
class CopiesOverReads(Lie):
    """Only writes from the host were ordered after reads."""

    def copy_within(self, target: Any, value: Any, stream: Any) -> Any:  # noqa: ANN401
        """Copy at once."""
        device: Any = self
        reads, device.reads = device.reads, type(device.reads)()
        try:
            return super().copy_within(target, value, stream)  # type: ignore[misc]
        finally:
            device.reads = reads


@liar(22, "a copy out reads from its first range to its last", requires=(*HELD, "async_d2h"))
class LastRangeEndsThem(Lie):
    """An empty one before all others, given last, then hides them."""

    def laid(self) -> None:
        """Note the reads in that way."""
        reads: Any = self.reads  # type: ignore[attr-defined]  # of every device with streams

        def add(memory: Any, parts: Any, event: Any) -> None:  # noqa: ANN401
            reads.note(memory.address + parts[0].offset, memory.address + parts[-1].end, event)

        reads.add = add


@liar(26, "close does not wait for copies out", requires=(*HELD, "async_d2h"))
class CloseLeavesCopies(Lie):
    """Their tickets then never end, or end with memory that is freed."""

    def copy_out(self, memory: Any, parts: Any, stream: Any) -> Any:  # noqa: ANN401
        """Forget the copy's event."""
        device: Any = self
        ticket = super().copy_out(memory, parts, stream)  # type: ignore[misc]
        device.last.pop(device.own(stream).beside.stream_key, None)
        return ticket


@liar(28, "a state has 64 readers at most", requires=HELD)
class OldReadersAreForgotten(Lie):
    """The oldest leaves for the newest, whether it has passed or not."""

    def register_state(self, state: Any) -> None:  # noqa: ANN401
        """Give the state a short list."""
        super().register_state(state)  # type: ignore[misc]
        add = state.add_reader

        def short(slots: Any, event: Any) -> None:  # noqa: ANN401
            add(slots, event)
            del state._readers[:-64]

        state.add_reader = short
