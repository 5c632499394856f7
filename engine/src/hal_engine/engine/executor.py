"""The protocol between the engine and its executor, which runs the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hal_core import OutputRecord, SinkClosed, SinkFull, Task


class Executor(Protocol):
    """Runs the steps of one or several groups, each with a scheduler of its own. One thread calls it.

    :class:`hal_engine.stepping.Stepper` runs them in this process,
    :class:`hal_engine.distributed.rank_executor.RankExecutor` on
        ranks. Each step is received once; those of one group in the order in which they were given.
    """

    @property
    def sockets(self) -> Sequence[Any]:
        """Sockets that become readable when :meth:`receive` may find something; empty if it waits for the device."""

    @property
    def drafts(self) -> tuple[int, ...]:
        """Drafts that were fed and accepted, and turns of a slot that decodes, so far."""

    @property
    def device_seconds(self) -> float | None:
        """The device's time in steps so far; None if it is not measured."""

    def order(self, group: int, tasks: Sequence[Task], taken: int) -> SinkFull | SinkClosed | None:
        """Start a group's next step. ``taken``: how many of its steps were received when ``tasks`` were made.

        Return the error of the sink that takes the step's record, or None: the step runs all the same. Raises
        :class:`hal_core.errors.GroupLost` if ranks are lost.
        """

    def receive(self, timeout: float) -> tuple[int, OutputRecord] | None:
        """Return the next output with the number of its group, or None if none came in ``timeout`` seconds.

        Raises the step's error: :class:`hal_core.errors.GroupLost` if ranks are lost.
        """
