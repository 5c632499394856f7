"""Sinks for tests: one that keeps the outputs for later, and ones that are full or dead."""

from __future__ import annotations

from hal_core.errors import SinkClosed, SinkFull
from hal_core.output.records import OutputRecord
from hal_core.output.sinks import PendingOutput

from .asserts import assert_no_error


class KeepingSink:
    """Takes outputs and resolves none until :meth:`resolve_all`: the slowest possible reader."""

    session = 1

    def __init__(self) -> None:
        self.pending: list[PendingOutput] = []
        self.records: list[OutputRecord] = []

    def put(self, pending: PendingOutput) -> None:
        """Keep the output unresolved."""
        self.pending.append(pending)

    def resolve_all(self) -> list[OutputRecord]:
        """Resolve everything in order, complete it, and return the records; an error becomes a failed assertion."""
        __tracebackhide__ = True
        for pending in self.pending:
            self.records.append(assert_no_error(pending.resolve, "an output that a sink resolves"))
            pending.complete(None)
        self.pending.clear()
        return self.records

    def close(self, timeout: float) -> None:
        """Return at once."""


class FullSink(KeepingSink):
    """Raises that it is full, and keeps the output, as the contract of sinks requires."""

    def put(self, pending: PendingOutput) -> None:
        """Keep the output and raise."""
        super().put(pending)
        raise SinkFull("no room before the deadline", cure="read faster", hook="save_output", argument="sink")


class DeadSink(KeepingSink):
    """Refuses every output."""

    def put(self, pending: PendingOutput) -> None:
        """Refuse the output."""
        raise SinkClosed("the reader is gone", cure="open a new sink", hook="save_output", argument="sink")
