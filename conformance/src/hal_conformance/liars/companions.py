"""Liars about companions: states that one insertion must serve with the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from hal_core.contract.markers import hookimpl
from hal_core.errors import InvalidBatch, InvalidValue
from hal_core.memory.plan import WritePlan
from hal_core.runtime.policy import Policy
from hal_core.slots.companions import tasks_beside
from hal_core.slots.insertion import plan_insert
from hal_core.slots.tasks import LEAVING, Task, TaskBatch, TaskKind
from hal_core.tickets import Ticket

from . import Lie, Patch, liar
from .tickets import HELD

if TYPE_CHECKING:
    from hal_core.contract.device import Device, Hooks
    from hal_core.output.sinks import Sink
    from hal_core.slots.state import SlotState
    from hal_core.slots.step import Step
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


@liar(9, "a request that gets more blocks has its count of blocks raised in the target and the first companion alone")
class LaterCompanionsBehind(Lie):
    """Written when there was one."""

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Leave the counts of the later companions out of the plan."""
        if len(state.companions) < 2:
            return super().insert_tasks(device, state, tasks, stream)  # type: ignore[misc,no-any-return]
        plan, skipped = plan_insert(state, tasks), []
        for companion in state.companions[1:]:
            own, place = tasks_beside(companion, tasks).plain, companion.layout.fields["blocks_num"]
            for slot, kind in zip(own["slots"], own["kinds"], strict=True):
                if kind == TaskKind.MORE_BLOCKS:
                    skipped.append(place.offset + slot * place.stride)
        writes = plan.writes[~np.isin(plan.writes["dst"], np.array(skipped, np.uint64))]
        return self.submit(WritePlan(plan.memory, writes, plan.pieces, plan.records), stream)  # type: ignore[attr-defined,no-any-return]


@liar(28, "an insertion waits for the readers of its target alone", requires=(*HELD, "overlapped_update"))
class CompanionsUnguarded(Patch):
    """A proposer's step still reads the slot that the request gets there."""

    seam = "guard of a batch"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Guard states that have companions, and no companion."""
        return lambda state, tasks, stream: true(state, tasks, stream) if state.companions else None


@liar(26, "companions book an insertion that the driver refuses")
class CompanionsBookFailures(Policy):
    """Their host tables are changed before the write."""

    def insert_tasks(
        self, device: Device, hooks: Hooks, state: SlotState, tasks: TaskBatch | Sequence[Task], stream: Stream
    ) -> Ticket:
        """Book, whatever came of it."""
        try:
            return super().insert_tasks(device, hooks, state, tasks, stream)
        except RuntimeError:
            batch = tasks if isinstance(tasks, TaskBatch) else TaskBatch.of(tasks)
            for companion in state.companions:
                companion.host_table.commit(tasks_beside(companion, batch))
            raise


class CleansSomeCompanions(Policy):
    """Base of policies that leave companions out of a step's clean-up."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Hide some companions."""
        kept, state.companions = state.companions, self.cleaned(state.companions, step)
        try:
            return super().save_output(device, hooks, state, step, sink, stream)
        finally:
            state.companions = kept

    def cleaned(self, companions: tuple[SlotState, ...], step: Step) -> tuple[SlotState, ...]:
        """Those that are cleaned."""
        raise NotImplementedError


@liar(18, "a rank that sends nothing does not clean its companions")
class CompanionsOfTheFirstRank(CleansSomeCompanions):
    """The clean-up is a part of sending."""

    def cleaned(self, companions: tuple[SlotState, ...], step: Step) -> tuple[SlotState, ...]:
        """All on the first rank."""
        return companions if step.group.is_first else ()


@liar(18, "only the first companion is cleaned")
class FirstCompanionCleaned(CleansSomeCompanions):
    """Written when there was one."""

    def cleaned(self, companions: tuple[SlotState, ...], step: Step) -> tuple[SlotState, ...]:
        """The first."""
        return companions[:1]


@liar(8, "a batch that is refused is booked in the companions, as far as it is sound")
class CompanionsBookRefusals(Policy):
    """Slots are given while the batch is looked at."""

    def insert_tasks(
        self, device: Device, hooks: Hooks, state: SlotState, tasks: TaskBatch | Sequence[Task], stream: Stream
    ) -> Ticket:
        """Book the first task of a refused batch."""
        try:
            return super().insert_tasks(device, hooks, state, tasks, stream)
        except (InvalidBatch, InvalidValue):
            listed = list(tasks) if not isinstance(tasks, TaskBatch) else []
            for companion in state.companions:
                if listed:
                    companion.host_table.commit(tasks_beside(companion, TaskBatch.of(listed[:1])))
            raise


@liar(8, "companions are booked one after the other, also where a later one refuses the batch")
class CompanionsBookInTurn(Policy):
    """The last one's check comes after the first one's booking."""

    def insert_tasks(
        self, device: Device, hooks: Hooks, state: SlotState, tasks: TaskBatch | Sequence[Task], stream: Stream
    ) -> Ticket:
        """Book those before the one that refuses."""
        try:
            return super().insert_tasks(device, hooks, state, tasks, stream)
        except InvalidBatch:
            raise
        except InvalidValue:
            batch = tasks if isinstance(tasks, TaskBatch) else TaskBatch.of(tasks)
            for companion in state.companions:
                companion.host_table.commit(tasks_beside(companion, batch))
            raise


class Releases(Patch):
    """Base: a release of slots reaches the first ``reached`` companions."""

    seam = "release of slots"
    reached = 0

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Hide the rest meanwhile."""

        def release(state: SlotState, slots: Any) -> None:  # noqa: ANN401 (the core's)
            kept, state.companions = state.companions, state.companions[: cls.reached]
            try:
                true(state, slots)
            finally:
                state.companions = kept

        return release


@liar(9, "a release of slots reaches no companion")
class ReleasesReachNoCompanion(Releases):
    """The engine frees the target's slots alone."""


@liar(9, "a release of slots reaches the first companion alone")
class ReleasesReachOneCompanion(Releases):
    """A worker has one proposer, it is believed."""

    reached = 1


class Unguarded(Patch):
    """Base: batches of some kinds do not wait for the last readers of companions' slots."""

    seam = "guard of a batch"
    kinds: ClassVar[frozenset[TaskKind]]

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Wait for the rest, and for the target's."""

        def guard(state: SlotState, tasks: TaskBatch, stream: Stream) -> None:
            if state.name == "target" or not cls.kinds.issuperset(tasks.plain["kinds"]):
                true(state, tasks, stream)

        return guard


@liar(28, "requests leave companions beside a step that reads their slots", requires=(*HELD, "overlapped_update"))
class LeavesBesideACompanionsStep(Unguarded):
    """A slot without a request counts as unread."""

    kinds = frozenset(LEAVING)


@liar(28, "requests get blocks in companions beside a step that reads them", requires=(*HELD, "overlapped_update"))
class GrowsBesideACompanionsStep(Unguarded):
    """Blocks that are appended count as unread, as no step has used them yet."""

    kinds = frozenset({TaskKind.MORE_BLOCKS})
