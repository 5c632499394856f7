"""Main loop of a running rank: steps in the engine's order, and KV transfer beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from hal_core import ENTERING, HalError, InvalidValue, OutputRecord, SinkFull

from hal_engine.stepping import AsyncLoop, Stepper
from hal_engine.timeouts import TIMEOUTS

from .control_messages import Message, Move, Release, Stop
from .requests import RequestTable
from .steps import StepOrder

if TYPE_CHECKING:
    from .control_channel import RankChannel
    from .kv_handover import KvHandover
    from .state_check import StateCheck


class StepLoop:
    """The loop of one rank of group ``number``."""

    def __init__(
        self,
        channel: RankChannel,
        worker: Stepper,
        number: int,
        check: StateCheck | None = None,
        handover: KvHandover | None = None,
    ) -> None:
        self._channel, self._worker, self._number = channel, worker, number
        self._check, self._handover = check, handover
        self._table = RequestTable(lambda request: worker.admit(request, entering=True))
        self._async_loop = AsyncLoop(worker, self._took)
        self.step = 0

    def run(self, *, overlap: bool, begins: Callable[[int], None], verdict: Callable[[Stop], HalError]) -> None:
        """Run until the engine's stop message. ``begins`` gets each step's number; ``verdict`` gives the error of a
        stop message with a reason.

        Raises the errors of steps and the engine's verdicts.
        """
        while not isinstance(message := self._receive(), Stop):
            if isinstance(message, StepOrder):
                self._check_number(message)
                self.step = message.number
                begins(message.number)
                self._take(message, overlap=overlap)
            elif self._handover is not None:
                if isinstance(message, Move | Release):
                    self._handover.on_message(message)
                else:
                    self._handover.look()
            if message is None and self._handover is None and self._async_loop.waiting:
                self._async_loop.idle()
        if message.what:
            raise verdict(message)

    def _receive(self) -> Message | StepOrder | None:
        """Return the engine's next message, or None: the transfer may have progressed, or the time has passed."""
        if self._handover is not None:
            self._channel.watch(self._handover.transfer.sockets)
            if self._async_loop.untold:  # its blocks are to be sent as soon as they are computed
                self._async_loop.tell()
                return self._channel.receive(TIMEOUTS.poll_most if self._async_loop.untold else 0.0)
        if self._async_loop.waiting:
            return self._channel.receive(TIMEOUTS.pause)
        moving = self._handover is not None and self._handover.busy
        return self._channel.receive(TIMEOUTS.look if moving else TIMEOUTS.starting)

    def _take(self, order: StepOrder, *, overlap: bool) -> None:
        """Run one step."""
        tasks = self._table.tasks(order)
        if self._handover is not None:
            self._async_loop.catch_up(order.taken)  # a new request may have the name of one that ended in those
            states = self._handover.launch(order.tasks)
            if states:
                self._worker.runner.take_over(states)  # type: ignore[attr-defined]
        check = self._check
        if check is not None and not check.first_admission_id:
            entering = (task.request.admission_id for task in tasks if task.kind in ENTERING)
            check.first_admission_id = next(entering, 0)
        with contextlib.suppress(SinkFull):  # the step is done; its record is sent when there is room
            if overlap:
                self._async_loop.step(tasks, order.taken)
            else:
                self._worker.step(tasks)
        if not overlap and self._worker.last is not None:
            self._took(self._worker.last)
        if check is not None:
            check.compare(order.number)

    def _took(self, record: OutputRecord) -> None:
        if self._handover is not None:
            states = getattr(self._worker.runner, "handed_over", {})
            self._handover.took(record, states)

    def _check_number(self, order: StepOrder) -> None:
        if (order.group, order.number) != (self._number, self.step + 1):
            raise InvalidValue(
                f"step {order.number} of group {order.group} came to rank {self._channel.rank}, which is in group "
                f"{self._number} and due for step {self.step + 1}",
                cure="a step message was lost, repeated or misrouted: restart the ranks",
                argument="step message",
            )
