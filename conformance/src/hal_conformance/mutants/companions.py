"""Liars about companions: states that one insertion must serve with the target."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hal_core.contract.markers import hookimpl
from hal_core.slots.companions import tasks_beside
from hal_core.slots.insertion import plan_insert
from hal_core.tickets import Ticket

from . import Lie, Patch, liar

if TYPE_CHECKING:
    from hal_core.contract.device import Device
    from hal_core.slots.state import SlotState
    from hal_core.slots.tasks import TaskBatch
    from hal_core.streams import Stream


@liar(9, "the companions of a state are left as they were")
class ForgetsCompanions(Lie):
    """A device that plans only for the given state."""

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Insert as if the state had no companions."""
        kept, state.companions = state.companions, ()
        try:
            return super().insert_tasks(device, state, tasks, stream)  # type: ignore[misc,no-any-return]
        finally:
            state.companions = kept


@liar(9, "companions are written in the target's slot order", seen="FastDeploy (one runner of mtp.py takes no map)")
class OneSlotOrder(Patch):
    """A proposer's insertion without the map of slots."""

    seam = "plan of a companion's tasks"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Use the target's own tasks."""
        return lambda companion, tasks: tasks


@liar(10, "each companion is a submission of its own", requires="fused_scatter", seen="FastDeploy (insert_tasks_v1)")
class CompanionsApart(ForgetsCompanions):
    """A second insertion for the proposer's state, after the target's."""

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Make one call for each state."""
        ticket = super().insert_tasks(device, state, tasks, stream)
        for companion in state.companions:
            plan = plan_insert(companion, tasks_beside(companion, tasks))
            ticket = self.submit(plan, stream)  # type: ignore[attr-defined]
        return ticket
