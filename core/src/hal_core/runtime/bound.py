"""An opened device with its hooks bound, as a worker uses it. Each has its own pluggy manager."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from time import monotonic_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, TypeVarTuple, cast

import pluggy

from ..contract import hookspecs
from ..contract.capabilities import HOOKS, Capabilities
from ..contract.counters import Counters
from ..contract.markers import PROJECT
from ..devices.base import others_stream
from ..errors import DeviceClosed, HalError, PluginError
from ..tickets import DONE, Ticket
from .hook_checks import HookManager, check_copies, check_implementation
from .observers import Observers
from .open_tickets import OpenTickets, raise_unseen
from .policy import Policy, check_arguments, is_stream, no_stream

if TYPE_CHECKING:
    from ..contract.device import Device, Hooks
    from ..group import Group
    from ..memory.copies import CopyTicket
    from ..memory.views import ByteRange, Memory
    from ..memory.writes import Writes
    from ..output.sinks import Sink
    from ..output.ticket import OutputTicket
    from ..ranks.communicator import Communicator
    from ..slots.declared import Companion, StateField
    from ..slots.fields import StateConfig
    from ..slots.state import SlotState
    from ..slots.step import Step
    from ..slots.tasks import Task, TaskBatch
    from ..streams import Stream, TimedEvent

log = logging.getLogger("hal")
T = TypeVar("T")
Given = TypeVarTuple("Given")
Unchecked: TypeAlias = Any
"""A stream as the caller gave it: any object."""
_HOOK_OF = {"open_group": "broadcast_tokens"}
"""The hook named in errors of calls that are not hooks themselves."""


class NoStream:
    """Placeholder for calls without a stream."""


class NoneSeen:
    """Placeholder for the class of a device's own streams until one was given."""

    pool: object


NO_STREAM = NoStream()
_open: weakref.WeakSet[BoundDevice] = weakref.WeakSet()


class BoundDevice:
    """One opened device: the four hooks, each called by keyword through the policy. A context manager.

    Hooks are called from one thread; tickets may be waited for from any. If an error of an earlier call was never
    waited for, the next hook call raises it before doing any work, and so does :meth:`close`. After a fork the child's
    copy refuses every call. ``name`` is the plugin's with the index, ``cuda:0``, as errors and logs have it.
    """

    def __init__(self, device: Device, manager: pluggy.PluginManager, policy: Policy) -> None:
        self.device, self.policy = device, policy
        self.name, self.index, self._refusal = f"{device.name}:{device.index}", device.index, ""
        self._hooks: Hooks = device  # the device itself, until an observer is added
        self._observers = Observers(manager, self.name)
        self._tickets = OpenTickets(self._observers)
        self._streams: set[type] = {NoStream}  # classes without a pool, already checked to be streams
        self._pooled: type[Any] = NoneSeen  # the class of streams with the pool of this device
        self._pool = getattr(device, "stream_pool", None)  # what this device's own streams carry as ``pool``
        _open.add(self)

    @property
    def capabilities(self) -> Capabilities:
        """The device's capabilities."""
        return self.device.capabilities

    @property
    def note(self) -> str:
        """An extra line of the device about itself, or ""."""
        return str(getattr(self.device, "note", ""))

    @property
    def default_stream(self) -> Stream:
        """The stream on which the framework computes."""
        return self.device.default_stream

    @property
    def deadline(self) -> float | None:
        """Seconds that a call waits for the device at most, before it raises; None if no call ever waits for it."""
        return self.device.deadline

    def counters(self) -> Counters:
        """Counts since the device was opened."""
        return self.device.counters()

    def state(
        self,
        sizes: StateConfig,
        *,
        name: str = "target",
        companions: Sequence[str | Companion] = (),
        fields: Sequence[StateField] = (),
        beside: Sequence[str | Companion] = (),
    ) -> SlotState:
        """Create a slot state on this device, every slot empty.

        :param companions: by name or as :class:`hal_core.Companion`: states in the same memory that hold the same
            requests (``state.companions``). One ``insert_tasks`` into the state serves them too. ``beside``, their name
            in release 1.1, is taken for one release more.
        :param fields: fields of this state besides the slot table's: :class:`hal_core.StateField`.
        :raises TicketTimeout: when the default stream is busy until the device's deadline; there is no state then.
        """
        return self._call(
            "state", NO_STREAM, self.policy.state, (self.device, sizes, name, companions or beside, fields)
        )

    def async_set_value(self, *, target: object, value: object, stream: Stream) -> Ticket:
        """Write a value into device memory; see :func:`hal_core.contract.hookspecs.async_set_value`.

        :param target: a view (``state.view(name)`` and its slices), or a tensor of the device's framework.
        :param value: a Python scalar, which fills; a list, an array or a host tensor of as many elements as the target;
            or a view or tensor on this device, of the target's dtype. It may be changed once this returns (G2).
        :param stream: one of this device's streams; work put on it later sees the value.
        :raises InvalidValue: for a target or stream of another device, or a target whose elements share memory.
        :raises ConversionRefused: for a value of another class or out of the dtype's range (G6).
        :raises ShapeMismatch: for another number of elements.
        :raises OutOfMemory: when the staging ring stays full until its deadline; no part was queued.
        """
        act = self.policy.async_set_value
        return self._call("async_set_value", stream, act, (self.device, self._hooks, target, value, stream))

    def write(self, *, writes: Writes, stream: Stream) -> Ticket:
        """Write to any number of memories: tensors that a framework has allocated (``device.resolve``), and states.

        One submission where the device has ``several_memories``, else one for each memory, in their order: an error of
        one then leaves those before it written.

        :param writes: what to write; unchanged until this returns (G2).
        :param stream: one of this device's streams; work put on it later sees the values.
        :raises InvalidValue: for memory or a stream of another device, and for two memories that overlap.
        :raises OutOfMemory: when the staging ring stays full until its deadline.
        """
        return self._call("write", stream, self.policy.write, (self.device, writes, stream))

    def insert_tasks(self, *, state: SlotState, tasks: TaskBatch | Sequence[Task], stream: Stream) -> Ticket:
        """Put requests into their slots; see :func:`hal_core.contract.hookspecs.insert_tasks`.

        :param state: a state of this device.
        :param tasks: a :class:`hal_core.TaskBatch`, or tasks to make one of; their requests were admitted for this
            state's sizes.
        :param stream: one of this device's streams; steps put on it later see the requests.
        :raises InvalidBatch: with every problem of the batch; no task was inserted (G8).
        """
        act = self.policy.insert_tasks
        return self._call("insert_tasks", stream, act, (self.device, self._hooks, state, tasks, stream))

    def open_group(self, *, state: SlotState, group: Group) -> None:
        """Compare a state's configuration (sizes, slot table, layout, version) on all ranks of a group (G14), which its
        first broadcast does otherwise.

        Every rank of the group calls it, and waits for the other ranks.

        :raises StateUnusable: on every rank, if they differ.
        :raises GroupLost: when a rank does not come within the group's timeout.
        """
        self._call("open_group", NO_STREAM, self.policy.open_group, (self.device, state, group))

    def broadcast_tokens(self, *, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Make all ranks agree with the first; see :func:`hal_core.contract.hookspecs.broadcast_tokens`.

        :param group: the caller's tensor-parallel group; every rank of it makes the same calls in the same order.
        :raises StateUnusable: when the ranks hold the state differently (G14).
        :raises GroupLost: when the group is opened here and a rank does not come; later losses are raised by the ticket
            (G16).
        """
        act = self.policy.broadcast_tokens
        return self._call("broadcast_tokens", stream, act, (self.device, self._hooks, state, group, stream))

    def save_output(self, *, state: SlotState, step: Step, sink: Sink, stream: Stream) -> OutputTicket:
        """Hand the step's tokens to the engine; see :func:`hal_core.contract.hookspecs.save_output`.

        :param step: the step's number, and the order of its rows for this state.
        :param sink: the destination of the record: ``MemorySink()``, or a transport's, as
            ``hal_engine.transport.open_sink(url)`` returns. Ranks that do not send ignore it.
        :return: the ticket for ``state.take``, which gives the record.
        :raises InvalidValue: for a step that does not fit the state (G21).
        :raises SinkFull: when the sink took no record until its deadline; the record is kept and sent later.
        :raises SinkClosed: when the sink is closed; ``error.ticket`` gives the tokens that were not sent.
        """
        act = self.policy.save_output
        saved = self._call("save_output", stream, act, (self.device, self._hooks, state, step, sink, stream))
        return cast("OutputTicket", saved)  # a device makes no other for it (SlotState.take)

    def update_inputs(self, *, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Advance the state by one step; see :mod:`hal_core.slots.update`.

        Called on the step's stream, after the broadcast (with one rank: the sampling) and before ``save_output``.

        :raises InvalidValue: for a plain step after :meth:`set_drafts` gave drafts that it must verify.
        """
        return self._call("update_inputs", stream, self.policy.update_inputs, (self.device, state, step, stream))

    def set_drafts(
        self, *, state: SlotState, step: Step, drafts: Mapping[int, Sequence[int]], stream: Stream
    ) -> Ticket:
        """Give a state the drafts that its next step verifies: tokens, their number and the step's inputs, in one
        submission.

        Called once for each step and state, after ``update_inputs`` with that step and before the next one's. For slots
        with role PREFILL it comes before ``save_output``, whose record includes their drafts. ``update_inputs`` drops
        earlier drafts, so a call out of this order is refused.

        :param step: the step whose tokens the drafts follow; its ``update_inputs`` has been called.
        :param drafts: slot to token ids, at most ``sizes.max_draft_tokens`` each, for slots that decoded in that step.
            Slots without drafts feed only their next token, named or not. Slots that have stopped since do not run.
        :return: done when the drafts are in place.
        :raises InvalidValue: for a call out of order, or drafts that do not fit, with every slot; no draft was written.
        """
        return self._call("set_drafts", stream, self.policy.set_drafts, (self.device, state, step, drafts, stream))

    def copy_out(self, *, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy byte ranges to the host, as they are after the work that is now on ``stream``.

        :param memory: memory of this device: ``state.memory``, or a view's.
        :param parts: byte ranges of it. A view's: ``ByteRange(first, end - first)`` with ``first, end =
            view.bounds()``; a group's of fields: ``state.layout.groups[name]``.
        :return: a ticket whose ``data`` has a uint8 array for each part, once it is done.
        :raises InvalidValue: for memory of another device, or a part outside it or that is no ByteRange.
        """
        return self._call("copy_out", stream, self.policy.copy_out, (self.device, memory, parts, stream))

    def communicator(self, *, group: Group) -> Communicator:
        """Return a group's collectives, which all its ranks call in the same order. Raises CapabilityMissing or
        GroupLost (G16)."""
        return self._call("communicator", NO_STREAM, self.device.communicator, (group,))

    def order_after_reads(self, *, memory: Memory, stream: Stream) -> None:
        """Make ``stream`` wait for copies out that still read ``memory``, before the caller's own work (a model's)
        writes there. The host does not wait. Writes of the hooks are already ordered so.

        :param memory: memory of this device: ``state.memory``, or a view's.
        :raises InvalidValue: for memory of another device.
        """
        self._call("order_after_reads", stream, self.policy.order_after_reads, (self.device, memory, stream))

    def timed_event(self, *, stream: Stream) -> TimedEvent | None:
        """Return an event after all work that is now on ``stream`` and that notes the device's time.

        The device's seconds between two that have passed: ``later.seconds_since(earlier)``.

        :return: None on a device without ``timed_events``.
        """
        return self._call("timed_event", stream, self.device.timed_event, (stream,))

    def launch_graphs(self, *, graphs: Sequence[int], stream: Stream) -> None:
        """Launch graphs of the caller's own (a model's) on ``stream``, one after the other.

        It is one call, so that a busy Python thread delays a step with several graphs no more than one with a single
        graph: on cuda's native path it keeps the interpreter's lock.

        :param graphs: handles of instantiated graphs (on cuda ``cudaGraphExec_t``), at most 16; the caller keeps them.
        :raises CapabilityMissing: where the device has no graphs.
        :raises InvalidValue: for a stream that is being captured; nothing was launched.
        """
        self._call("launch_graphs", stream, self.device.launch_graphs, (graphs, stream))

    def observe(self, plugin: object, *, name: str = "") -> None:
        """Let a pluggy plugin observe every hook call of this device; see :mod:`hal_core.runtime.observers`.

        :param name: its name in errors and reports; by default the name of its class.
        :raises InvalidValue: for an object without observing methods, or one that is already registered.
        """
        self._begin()
        self._observers.add(plugin, name or f"{type(plugin).__module__}.{type(plugin).__qualname__}")
        self._hooks = self._observers.hooks

    @property
    def observers(self) -> tuple[str, ...]:
        """The names of the observers."""
        return self._observers.names

    def close(self) -> None:
        """Close the device; raise an error that was never waited for. Idempotent."""
        if self._refusal:
            return
        tickets, self._refusal = self._tickets, "the device is closed"
        unseen = tickets.unseen()
        try:
            self.device.close()
        finally:
            tickets.report_ends()
            raise_unseen(unseen + tickets.unseen())  # running work may have failed while the device was closed

    def __enter__(self) -> BoundDevice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the device. If an error is already propagating, an error of closing becomes a note of it."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as late:  # noqa: BLE001 (added as a note to the error that is being raised)
            error.add_note(f"closing the device raised: {late!r}")

    def __del__(self) -> None:
        """Log errors that no wait raised, where no close raises them."""
        if not getattr(self, "_refusal", "not opened") and not sys.is_finalizing():
            for error in self._tickets.unseen():
                log.error("%s was dropped without a close, after an earlier call had failed: %r", self.name, error)

    def __repr__(self) -> str:
        return f"<BoundDevice {self.name}{' closed' if self._refusal else ''}>"

    def _begin(self) -> None:
        if self._refusal:
            raise DeviceClosed(self._refusal, cure="open a device in this process", device=self.name)
        if self._tickets.for_observers:
            self._tickets.report_ends()
        if self._tickets.pending:
            raise_unseen(self._tickets.unseen())

    def _call(self, name: str, stream: Unchecked, act: Callable[[*Given], T], arguments: tuple[*Given]) -> T:
        """Run a call: check for closing, earlier errors and the stream, run the policy, and complete errors."""
        tickets = self._tickets
        if tickets.pending or self._refusal or tickets.for_observers:
            self._begin()
        if (type(stream) is not self._pooled or stream.pool is not self._pool) and type(stream) not in self._streams:
            arguments = self._with_stream(stream, name, arguments)
        observers, result = self._observers, None
        began = monotonic_ns() if observers.wants_times else 0
        try:
            result = act(*arguments)
        except HalError as error:
            if (health := getattr(self.device, "health", None)) is not None:
                health.note_reported(error)
            raise error.located(device=self.name, hook=_HOOK_OF.get(name, name)) from error.__cause__
        except (AttributeError, TypeError):
            self._blame(_HOOK_OF.get(name, name), signature(act).bind(*arguments).arguments)
            raise
        finally:
            if began:
                observers.time(name, began, result, arguments)
        wants_end = observers.wants_ends and name in HOOKS
        if result is DONE:
            if wants_end:
                observers.end(name, DONE)
        elif wants_end or getattr(result, "watched", False):  # isinstance on an abstract class is slow
            tickets.track(name, result)
        if observers.wants_calls and name not in HOOKS:
            observers.call(name, act, arguments)
        return result

    def _with_stream(self, stream: object, hook: str, arguments: tuple[*Given]) -> tuple[*Given]:
        """Return the arguments with a checked last one, a stream of a class not seen before or of another opened
        device, which is refused. A hal stream is unchanged; the device converts a framework's."""
        taken = stream
        try:
            if not is_stream(stream):
                take = getattr(self.device, "foreign_stream", None)
                if take is None or stream is None or isinstance(stream, type | bool | int | str):
                    raise no_stream(stream)
                taken = take(stream)
            elif not hasattr(stream, "pool"):
                self._streams.add(type(stream))
            elif (pool := stream.pool) is self._pool:
                self._pooled = type(stream)
            elif pool is not None and getattr(stream, "owned", False):  # not owned: a framework's
                raise others_stream()
        except HalError as error:
            raise error.located(device=self.name, hook=hook) from None
        except (AttributeError, TypeError, ValueError):
            raise no_stream(stream).located(device=self.name, hook=hook) from None
        if taken is stream:
            return arguments
        given: tuple[Any, ...] = arguments
        changed: Any = (*given[:-1], taken)  # every call has its stream last
        return changed  # type: ignore[no-any-return]

    def _blame(self, hook: str, arguments: dict[str, Any]) -> None:
        """Raise the error for wrong arguments of a call that failed with a raw exception; return if they are valid."""
        try:
            check_arguments(arguments)
        except HalError as error:
            raise error.located(device=self.name, hook=hook) from None


def bind(device: Device, policy: Policy | None = None) -> BoundDevice:
    """Bind a device's hooks: each present once, no wrappers, with exactly the contract's parameters.

    Raises :class:`PluginError` naming the hook and its fault, or the ``copy_within`` that a device with ``async_h2d``
    has to write. Logs once which hooks fall back, and why (G7).
    """
    manager = HookManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    name = f"{device.name}:{device.index}"
    try:
        manager.register(device, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(str(error), cure="compare with hal_core.contract.hookspecs", device=name) from error
    for hook in HOOKS:
        check_implementation(manager, hook, name)
    check_copies(device, name)
    if device.capabilities.fallbacks:
        reasons = "; ".join(f"{hook}: {why}" for hook, why in device.capabilities.fallbacks.items())
        log.warning("%s works with fallbacks: %s", name, reasons)
    return BoundDevice(device, manager, policy or Policy())


def _refuse_after_fork() -> None:
    for bound in list(_open):
        bound._refusal = "the device was opened before a fork, which its streams and threads do not survive"


os.register_at_fork(after_in_child=_refuse_after_fork)
