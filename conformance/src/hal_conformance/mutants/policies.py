"""Liars in the policy: what is checked, who sends, when it is cleaned up."""

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
    """Assigns as NumPy does."""

    def async_set_value(self, device: Device, hooks: Hooks, target: object, value: object, stream: Stream) -> Ticket:
        """Cast to the target's type before the rules can object."""
        if isinstance(target, View) and not isinstance(value, View) and target.dtype.name != "bfloat16":
            try:
                with np.errstate(all="ignore"):
                    value = np.asarray(value).astype(target.dtype.storage)
            except (TypeError, ValueError, OverflowError):
                return super().async_set_value(device, hooks, target, value, stream)
        return super().async_set_value(device, hooks, target, value, stream)


@liar(26, "an error says what, and neither argument nor cure")
class SaysNoCure(Policy):
    """Raises bare messages."""

    def async_set_value(self, device: Device, hooks: Hooks, target: object, value: object, stream: Stream) -> Ticket:
        """Replace the error by its fact alone."""
        try:
            return super().async_set_value(device, hooks, target, value, stream)
        except HalError as error:
            raise type(error)(error.what) from None


@liar(8, "the valid part of an invalid batch goes in")
class InsertsTheRest(Policy):
    """Leaves out what is wrong, and reports it."""

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
    """Stops checking too early."""

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
    """A fast path that is too fast."""

    seam = "check of a batch"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Find nothing unless the first task is among the problems."""

        def check(*arguments: Any) -> list[str]:  # noqa: ANN401 (whatever the true one takes)
            found: list[str] = true(*arguments)
            return found if any(text.startswith("task 0 ") for text in found) else []

        return check


@liar(12, "a handoff is taken, whether its keys and values are there or not", seen="hal")
class HandoffWithoutKeys(Patch):
    """Nobody asks for the blocks, with drafts or without."""

    seam = "check of a batch"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Leave that problem out."""
        return lambda *arguments: [text for text in true(*arguments) if "declared present" not in text]


@liar(12, "drafts are taken at any time; update_inputs drops those that come before it", seen="hal")
class DraftsAtAnyTime(Patch):
    """The order of a step is not looked at."""

    seam = "order of drafts"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Let every call through."""
        return lambda state, step: None


@liar(12, "drafts are written, but the next step is not told to feed them", seen="FastDeploy 7172")
class DraftsThatNobodyFeeds(Patch):
    """Writes tokens and their number, and forgets ``seq_lens_this_time``."""

    seam = "plan of drafts"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Leave the last field out."""

        def plan(state: SlotState, drafts: Any) -> WritePlan:  # noqa: ANN401 (as the true one takes it)
            whole: WritePlan = true(state, drafts)
            place = state.layout.fields["seq_lens_this_time"]
            begin, end = place.offset, place.offset + place.stride * state.sizes.num_slots
            kept = [not begin <= dst < end for dst in whole.writes["dst"].tolist()]
            return WritePlan(whole.memory, whole.writes[np.array(kept)], whole.pieces)

        return plan


@liar(12, "a plain step drops the drafts that a slot was handed, and says nothing")
class PlainStepOverDrafts(Patch):
    """Nobody looks who holds drafts."""

    seam = "plain step over drafts"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Let every step through."""
        return lambda book, mirror, step: None


@liar(15, "a group of one opens a communicator and broadcasts to itself")
class TalksToItself(Policy):
    """No check of the group's size."""

    def broadcast_tokens(self, device: Device, hooks: Hooks, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Always call the plugin."""
        ticket: Ticket = hooks.broadcast_tokens(device=device, state=state, group=group, stream=stream)
        return ticket


@liar(14, "a state that ranks disagree about may be used all the same")
class UsesAnything(Patch):
    """The check is missing."""

    seam = "use of a state"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Never object."""
        return lambda state: None


@liar(17, "rank 1 sends too", seen="FastDeploy 7172")
class EveryRankSends(Policy):
    """Every rank takes itself for the first."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Forget the group."""
        return super().save_output(device, hooks, state, replace(step, group=ALONE), sink, stream)


@liar(18, "an early return skips the clean-up on ranks that do not send", seen="FastDeploy 7172")
class EarlyReturn(Policy):
    """``if rank > 0: return`` before the clean-up."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Copy, and nothing else."""
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
    """No running request, no output."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Send only where a slot is held."""
        if step.group.is_first and not state.host_table.admission_ids[step.order(state.name)].any():
            step = replace(step, group=_second())
        return super().save_output(device, hooks, state, step, sink, stream)


@liar(20, "rows are in slot order instead of batch-id order", seen="FastDeploy 7442")
class SlotOrder(Policy):
    """Walks the slots."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Sort the orders."""
        orders = {name: np.sort(order) for name, order in step.orders.items()}
        return super().save_output(device, hooks, state, replace(step, orders=orders), sink, stream)


@liar(21, "bounds that the host knows are not checked")
class NoBounds(Patch):
    """The check of a step gives its order and nothing else."""

    seam = "check of a step"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Take any order, cut to what exists."""
        return lambda state, step: step.orders.get(state.name, np.zeros(0, np.int32)) % state.sizes.num_slots


@liar(23, "output for a full sink is dropped silently", seen="ZeroMQ's high-water mark")
class DropsSilently(Policy):
    """A full queue is nobody's problem."""

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Swallow the error."""
        try:
            return super().save_output(device, hooks, state, step, sink, stream)
        except SinkFull:
            return DONE


@liar(27, "the policy knows devices by name")
class KnowsNames(Policy):
    """A special case for a device whose name it does not know."""

    def insert_tasks(
        self, device: Device, hooks: Hooks, state: SlotState, tasks: TaskBatch | Sequence[Task], stream: Stream
    ) -> Ticket:
        """Forget the last task on unknown devices."""
        if device.name in ("", "renamed") and not isinstance(tasks, TaskBatch):
            tasks = tasks[:-1]
        return super().insert_tasks(device, hooks, state, tasks, stream)


@liar(28, "writes do not wait for the last step that reads the slot", requires=("async_h2d", "can_hold_stream"))
class NoGuard(Patch):
    """The freed slot is given to a new request at once (sglang 18746)."""

    seam = "guard of slots"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Wait for nothing."""
        return lambda state, slots, stream: None


def _second() -> Group:
    from ..harness.groups import FOLLOWER

    return FOLLOWER
