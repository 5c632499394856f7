"""Liars in the policy: checks, the sender, the clean-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.errors import HalError, InvalidBatch, SinkFull
from hal_core.group import ALONE
from hal_core.memory.plan import WritePlan
from hal_core.memory.views import View
from hal_core.runtime.policy import Outbox, Policy
from hal_core.slots.tasks import Task, TaskBatch
from hal_core.tickets import DONE, Ticket

from . import Patch, liar

if TYPE_CHECKING:
    from hal_core.contract.device import Device, Hooks
    from hal_core.group import Group
    from hal_core.output.sinks import Sink
    from hal_core.slots.state import SlotState
    from hal_core.slots.step import Step
    from hal_core.streams import Stream


@liar(6, "values are cast with NumPy, whatever is lost", seen="every .astype(...) before a copy")
class CastsAnything(Policy):
    """An assignment by NumPy's rules."""

    def async_set_value(self, device: Device, hooks: Hooks, target: object, value: object, stream: Stream) -> Ticket:
        """Cast to the target's type before the rules apply."""
        if isinstance(target, View) and not isinstance(value, View) and target.dtype.name != "bfloat16":
            try:
                with np.errstate(all="ignore"):
                    value = np.asarray(value).astype(target.dtype.storage)
            except (TypeError, ValueError, OverflowError):
                return super().async_set_value(device, hooks, target, value, stream)
        return super().async_set_value(device, hooks, target, value, stream)


@liar(26, "an error has a fact, but neither argument nor cure")
class SaysNoCure(Policy):
    """Bare messages as errors."""

    def async_set_value(self, device: Device, hooks: Hooks, target: object, value: object, stream: Stream) -> Ticket:
        """Reduce the error to its fact."""
        try:
            return super().async_set_value(device, hooks, target, value, stream)
        except HalError as error:
            raise type(error)(error.what) from None


@liar(8, "the valid part of an invalid batch goes in")
class InsertsTheRest(Policy):
    """Invalid tasks that are left out and reported."""

    def insert_tasks(
        self, device: Device, hooks: Hooks, state: SlotState, tasks: TaskBatch | Sequence[Task], stream: Stream
    ) -> Ticket:
        """Insert one by one."""
        if isinstance(tasks, TaskBatch) or len(tasks) < 2:
            return super().insert_tasks(device, hooks, state, tasks, stream)
        problems: list[str] = []
        for task in tasks:
            try:
                super().insert_tasks(device, hooks, state, [task], stream)
            except InvalidBatch as error:
                problems += error.problems
        if problems:
            raise InvalidBatch(problems)
        return DONE


@liar(8, "the error names the first problem alone")
class FirstProblemAlone(Policy):
    """A check that stops too early."""

    def insert_tasks(
        self, device: Device, hooks: Hooks, state: SlotState, tasks: TaskBatch | Sequence[Task], stream: Stream
    ) -> Ticket:
        """Cut the list."""
        try:
            return super().insert_tasks(device, hooks, state, tasks, stream)
        except InvalidBatch as error:
            raise InvalidBatch(error.problems[:1]) from None


@liar(8, "only the first task of a batch is checked")
class ChecksOne(Patch):
    """A fast path with missing checks."""

    seam = "check of a batch"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Find no problem unless the first task has one."""

        def check(*arguments: Any) -> list[str]:  # noqa: ANN401 (whatever the true one takes)
            found: list[str] = true(*arguments)
            return found if any(text.startswith("task 0 ") for text in found) else []

        return check


@liar(12, "a handoff is taken, whether its keys and values are there or not", seen="hal")
class HandoffWithoutKeys(Patch):
    """A handoff whose blocks are not checked, with drafts or without."""

    seam = "check of a batch"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Drop that problem."""
        return lambda *arguments: [text for text in true(*arguments) if "declared present" not in text]


@liar(12, "drafts are taken at any time; update_inputs drops those that come before it", seen="hal")
class DraftsAtAnyTime(Patch):
    """An unchecked order of calls."""

    seam = "order of drafts"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Allow every call."""
        return lambda state, step: None


@liar(12, "drafts are written, but the next step does not feed them", seen="FastDeploy 7172")
class DraftsThatNobodyFeeds(Patch):
    """Tokens and their number without ``seq_lens_this_time``."""

    seam = "plan of drafts"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Leave out the last field."""

        def plan(state: SlotState, drafts: Any) -> WritePlan:  # noqa: ANN401 (as the true one takes it)
            whole: WritePlan = true(state, drafts)
            place = state.layout.fields["seq_lens_this_time"]
            begin, end = place.offset, place.offset + place.stride * state.sizes.num_slots
            kept = [not begin <= dst < end for dst in whole.writes["dst"].tolist()]
            return WritePlan(whole.memory, whole.writes[np.array(kept)], whole.pieces)

        return plan


@liar(12, "a plain step silently drops a slot's drafts")
class PlainStepOverDrafts(Patch):
    """An unchecked book of drafts."""

    seam = "plain step over drafts"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Allow every step."""
        return lambda book, mirror, step: None


@liar(15, "a group of one opens a communicator and broadcasts to itself")
class TalksToItself(Policy):
    """An unchecked group size."""

    def broadcast_tokens(self, device: Device, hooks: Hooks, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Always call the plugin."""
        ticket: Ticket = hooks.broadcast_tokens(device=device, state=state, group=group, stream=stream)
        return ticket


@liar(14, "a state that ranks disagree about may be used all the same")
class UsesAnything(Patch):
    """A missing check."""

    seam = "use of a state"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Never refuse."""
        return lambda state: None


@liar(17, "rank 1 sends too", seen="FastDeploy 7172")
class EveryRankSends(Policy):
    """A rank that considers itself the first."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Replace the group."""
        return super().save_output(device, hooks, state, replace(step, group=ALONE), sink, stream)


@liar(18, "an early return skips the clean-up on ranks that do not send", seen="FastDeploy 7172")
class EarlyReturn(Policy):
    """``if rank > 0: return`` before the clean-up."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Copy, and do no more."""
        if step.group.is_first:
            return super().save_output(device, hooks, state, step, sink, stream)
        outbox = Outbox()
        ticket: Ticket = hooks.save_output(device=device, state=state, step=step, sink=outbox, stream=stream)
        assert outbox.pending is not None
        outbox.pending.complete(None)
        return ticket


@liar(18, "the clean-up comes after sending, and not where sending fails")
class CleansUpAfterSending(Policy):
    """No ``finally``."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Copy, send, clean up."""
        outbox = Outbox()
        ticket: Ticket = hooks.save_output(device=device, state=state, step=step, sink=outbox, stream=stream)
        assert outbox.pending is not None
        if step.group.is_first:
            sink.put(outbox.pending)
        else:
            outbox.pending.complete(None)
        device.submit(state.cleanup_plan(step.order(state.name)), stream)
        state.host_table.reported(step.order(state.name).tolist())
        return ticket


@liar(18, "the clean-up is ordered before the copy")
class CleansUpFirst(Policy):
    """The fields are zero before they are copied."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Clean up, then do the rest."""
        order = step.order(state.name)
        if len(order) and int(order.min()) >= 0 and int(order.max()) < state.sizes.num_slots:
            device.submit(state.cleanup_plan(order), stream)
        return super().save_output(device, hooks, state, step, sink, stream)


@liar(19, "a batch that was preempted as a whole is not reported", seen="FastDeploy 7633")
class NothingRunsNothingToSay(Policy):
    """A step without running requests that sends no output."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Send only if a slot is held."""
        if step.group.is_first and not state.host_table.admission_ids[step.order(state.name)].any():
            step = replace(step, group=_second())
        return super().save_output(device, hooks, state, step, sink, stream)


@liar(20, "rows are in slot order instead of batch-id order", seen="FastDeploy 7442")
class SlotOrder(Policy):
    """Rows in slot order."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Sort the orders."""
        orders = {name: np.sort(order) for name, order in step.orders.items()}
        return super().save_output(device, hooks, state, replace(step, orders=orders), sink, stream)


@liar(21, "bounds known to the host are not checked")
class NoBounds(Patch):
    """A check of a step that only returns its order."""

    seam = "check of a step"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Accept any order, reduced to existing slots."""
        return lambda state, step: step.orders.get(state.name, np.zeros(0, np.int32)) % state.sizes.num_slots


@liar(23, "output for a full sink is dropped silently", seen="ZeroMQ's high-water mark")
class DropsSilently(Policy):
    """A full queue that is ignored."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Ignore the error."""
        try:
            return super().save_output(device, hooks, state, step, sink, stream)
        except SinkFull:
            return DONE


@liar(27, "the policy tests for device names")
class KnowsNames(Policy):
    """A special case for unknown device names."""

    def insert_tasks(
        self, device: Device, hooks: Hooks, state: SlotState, tasks: TaskBatch | Sequence[Task], stream: Stream
    ) -> Ticket:
        """Drop the last task on unknown devices."""
        if device.name in ("", "renamed") and not isinstance(tasks, TaskBatch):
            tasks = tasks[:-1]
        return super().insert_tasks(device, hooks, state, tasks, stream)


@liar(28, "writes do not wait for the last step that reads the slot", requires=("async_h2d", "can_hold_stream"))
class NoGuard(Patch):
    """A freed slot that is given to a new request at once (sglang 18746)."""

    seam = "guard of slots"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Do not wait."""
        return lambda state, slots, stream: None


def _second() -> Group:
    from ..harness.groups import FOLLOWER

    return FOLLOWER
