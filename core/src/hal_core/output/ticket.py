"""From the copied output fields of a step to its record: the ticket of ``save_output``."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from ..errors import InvalidValue
from ..ranks.channel import OutputCheck
from ..tickets import PromiseTicket
from .records import OutputRecord
from .rows import Columns, OutputSnapshot, build_record

if TYPE_CHECKING:
    from ..memory.copies import CopyTicket
    from ..memory.views import ByteRange
    from ..slots.state import SlotState
    from ..slots.step import Step


class OutputTicket(PromiseTicket):
    """The output of one step: what ``save_output`` returns, and what a sink resolves, encodes and settles.

    Done when the record is queued for the wire (or discarded, on ranks that do not send). :meth:`record` gives the
    record earlier, to the worker that needs the tokens itself; it is built once.
    """

    __slots__ = (
        "_check",
        "_copy",
        "_facts",
        "_lock",
        "_part",
        "_record",
        "_state",
        "_violation",
        "batch_ids",
        "columns",
        "step",
    )

    def __init__(self, state: SlotState, step: Step, copy: CopyTicket, part: ByteRange) -> None:
        super().__init__(copy.mode)
        self.step = step.number
        self.columns: Columns = {}
        #: Of each row of the record, the batch id: where the step's order names its slot. There once the record is.
        self.batch_ids: tuple[int, ...] = ()
        self._state, self._copy, self._part = state, copy, part
        self._facts = OutputSnapshot.of(state, step)
        self._check = OutputCheck.of(state, step.group, part)
        self._lock = Lock()
        self._record: OutputRecord | None = None
        self._violation: InvalidValue | None = None

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The requests that the step may report; for errors that name what was lost."""
        return tuple(name for name in self._facts.names if name)

    @property
    def batch_size(self) -> int:
        """How many slots the step's order names."""
        return len(self._facts.order)

    def ready(self) -> bool:
        """True when the copy is there, so that :meth:`resolve` does not wait; never blocks."""
        return self._copy.done()

    def record(self, timeout: float | None = None) -> OutputRecord:
        """The record, for the worker; see :meth:`resolve`."""
        return self.resolve(timeout)

    def resolve(self, timeout: float | None = None) -> OutputRecord:
        """Wait for the copy and return the step's record, checked. ``timeout`` in seconds. From any thread."""
        if self._record is None:
            self._copy.wait(timeout)  # not under the lock: a thread that sleeps there wakes to cold caches
        with self._lock:
            if self._record is None:
                if self._check is not None:
                    self._check.verify(self._copy.data[0])
                self.columns = self._state.columns(self._copy.data[0], self._part)
                self._record, self.batch_ids, self._violation = build_record(self.columns, self._facts)
            return self._record

    def complete(self, error: BaseException | None = None) -> None:
        """Finish the ticket; what was found out of bounds is raised by it (G21)."""
        if self._violation is not None:
            device = self._state.device
            self._violation.located(device=f"{device.name}:{device.index}")
        super().complete(error or self._violation)
