"""The ticket of ``save_output``: from a step's copied output fields to its record."""

from __future__ import annotations

from threading import Lock, get_ident
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidValue
from ..ranks.channel import OutputCheck
from ..slots.fields import FinishReason
from ..tickets import PromiseTicket
from ..timeouts import TIMEOUTS
from .records import OutputRecord
from .rows import Columns, build_record
from .snapshot import OutputSnapshot

if TYPE_CHECKING:
    from ..memory.copies import CopyTicket
    from ..memory.views import ByteRange
    from ..slots.state import SlotState
    from ..slots.step import Step


class OutputTicket(PromiseTicket):
    """The output of one step: returned by ``save_output``, and resolved, encoded and completed by a sink.

    Done when the record is queued for the wire (or discarded, on ranks that do not send). :meth:`record` gives the
    record earlier, to a worker that needs the tokens itself; it is built once.
    """

    __slots__ = (
        "_check",
        "_copy",
        "_lock",
        "_part",
        "_record",
        "_snapshot",
        "_state",
        "_taken",
        "_violation",
        "batch_ids",
        "columns",
        "step",
    )

    def __init__(self, state: SlotState, step: Step, copy: CopyTicket, part: ByteRange) -> None:
        super().__init__(copy.mode)
        self.step = step.number
        self.columns: Columns = {}
        #: The batch id of each row of the record: where the step's order names its slot. Set with the record.
        self.batch_ids: tuple[int, ...] = ()
        self._state, self._copy, self._part = state, copy, part
        self._snapshot = OutputSnapshot.of(state, step)
        self._check = OutputCheck.of(state, step.group, part) if state.channels else None
        self._lock, self._taken = Lock(), Lock()
        self._taken.acquire()  # held until the record exists
        self._record: OutputRecord | None = None
        self._violation: InvalidValue | None = None

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The requests that the step may report, for errors that name lost output."""
        return tuple(name for name in self._snapshot.names if name)

    @property
    def batch_size(self) -> int:
        """The number of slots in the step's order."""
        return len(self._snapshot.order)

    @property
    def failed(self) -> list[tuple[int, int]]:
        """Slot and admission id of each request whose row is an error. Requires the record."""
        assert self._record is not None
        order, held = self._snapshot.order, self._snapshot.admission_ids
        rows = np.flatnonzero(self._record.finish == FinishReason.ERROR).tolist()
        return [(int(order[at]), int(held[at])) for at in (self.batch_ids[row] for row in rows)]

    def ready(self) -> bool:
        """Return True when the copy has arrived, so that :meth:`resolve` does not wait; never blocks."""
        return self._copy.done()

    def record(self, timeout: float | None = None) -> OutputRecord:
        """Return the record, for the worker; see :meth:`resolve`."""
        return self.resolve(timeout)

    def resolve(self, timeout: float | None = None) -> OutputRecord:
        """Wait for the copy and return the step's record, checked. ``timeout`` in seconds. From any thread.

        If a worker takes its steps itself, a sink's thread waits for the worker. Otherwise the thread would poll the
        device, and compete for the interpreter just when the worker needs it.
        """
        columns: Columns | None = None
        if self._record is None:
            if timeout is None and self._state.taker not in (0, get_ident()):
                self._wait_for_worker()
            elif (ahead := self._copy.ahead()) is not None:
                # Work that needs none of the bytes, before waiting for them.
                columns = self._state.columns(ahead[0], self._part)
            self._copy.wait(timeout)  # not under the lock: a thread that sleeps there wakes to cold caches
        with self._lock:
            if self._record is None:
                data = self._copy.data[0]
                if self._check is not None:
                    self._check.verify(data)
                self.columns = self._state.columns(data, self._part) if columns is None else columns
                self._record, self.batch_ids, self._violation = build_record(self.columns, self._snapshot)
                self._taken.release()
            return self._record

    def _wait_for_worker(self) -> None:
        """Wait until the worker has made the record, or until the copy has arrived while the worker is busy."""
        while not self._copy.done():
            if self._taken.acquire(timeout=TIMEOUTS.output_look):
                self._taken.release()  # for the next waiting thread
                return

    def complete(self, error: BaseException | None = None) -> None:
        """Finish the ticket. It raises the error for values out of bounds (G21)."""
        if self._violation is not None:
            device = self._state.device
            self._violation.located(device=f"{device.name}:{device.index}")
        super().complete(error or self._violation)
