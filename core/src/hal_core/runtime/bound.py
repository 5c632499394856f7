"""An opened device with its hooks bound: what a worker holds. One fresh pluggy manager for each."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import pluggy

from ..contract import hookspecs
from ..contract.capabilities import HOOKS, Capabilities
from ..contract.counters import Counters
from ..contract.markers import PROJECT
from ..errors import DeviceClosed, HalError, PluginError
from ..tickets import DONE, Ticket
from .implementations import HookManager, check_implementation
from .observers import Observers
from .open_tickets import OpenTickets, tell
from .policy import Policy, check_kinds, is_stream, no_stream

if TYPE_CHECKING:
    from ..contract.device import Device, Hooks
    from ..group import Group
    from ..memory.copies import CopyTicket
    from ..memory.views import ByteRange, Memory
    from ..output.sinks import Sink
    from ..ranks.communicator import Communicator
    from ..slots.fields import StateConfig
    from ..slots.state import SlotState
    from ..slots.step import Step
    from ..slots.tasks import Task, TaskBatch
    from ..streams import Stream

log = logging.getLogger("hal")
T = TypeVar("T")
Given = TypeVarTuple("Given")
_HOOK_OF = {"open_group": "broadcast_tokens"}
"""What errors of calls that are no hooks name, where it is a hook."""


class NoStream:
    """In place of a stream, for calls that are given none."""


NO_STREAM = NoStream()
_open: weakref.WeakSet[BoundDevice] = weakref.WeakSet()


class BoundDevice:
    """One opened device: the four hooks, each behind the policy, by keyword. A context manager.

    Hooks are called from one thread; tickets may be waited for from any. An error of an earlier call that nobody
    waited for is raised by the next hook call, before it does anything, and by :meth:`close`. After a fork the
    child's copy refuses every call.
    """

    def __init__(self, device: Device, manager: pluggy.PluginManager, policy: Policy) -> None:
        self.device, self.policy = device, policy
        self.name, self.index, self._refusal = f"{device.name}:{device.index}", device.index, ""
        self._hooks: Hooks = device  # straight to the device, as long as nobody observes
        self._observers = Observers(manager, self.name)
        self._tickets = OpenTickets(self._observers)
        self._streams: set[type] = {NoStream}  # classes that were seen to be streams
        _open.add(self)

    @property
    def capabilities(self) -> Capabilities:
        """What the device can do."""
        return self.device.capabilities

    @property
    def note(self) -> str:
        """What else the device says of itself, one line, or ""."""
        return str(getattr(self.device, "note", ""))

    @property
    def default_stream(self) -> Stream:
        """The stream on which the framework computes."""
        return self.device.default_stream

    def counters(self) -> Counters:
        """Counts since the device was opened."""
        return self.device.counters()

    def state(self, sizes: StateConfig, *, name: str = "target", beside: Sequence[str] = ()) -> SlotState:
        """A new slot state on this device, every slot empty.

        :param beside: names of companions: states in the same memory that hold the same requests, each in a slot order
            of its own (``state.companions``). One ``insert_tasks`` into the state serves them too.
        """
        return self._call("state", NO_STREAM, self.policy.state, (self.device, sizes, name, beside))

    def async_set_value(self, *, target: object, value: object, stream: Stream) -> Ticket:
        """Write a value into device memory; see :func:`hal_core.contract.hookspecs.async_set_value`.

        :param target: a view (``state.view(name)`` and its slices), or a tensor of the device's framework.
        :param value: a Python scalar, which fills; a list, an array or a host tensor of as many elements as the target;
            or a view or tensor on this device, of the target's dtype. It may be changed once this returns (G2).
        :param stream: one of this device's streams; work put on it later sees the value.
        :raises InvalidValue: for a target or stream that is none of this device, or whose elements share memory.
        :raises ConversionRefused: for a value of another class or out of the dtype's range (G6).
        :raises ShapeMismatch: for another number of elements.
        :raises OutOfMemory: when the staging ring stays full until its deadline; nothing was queued.
        """
        act = self.policy.async_set_value
        return self._call("async_set_value", stream, act, (self.device, self._hooks, target, value, stream))

    def insert_tasks(self, *, state: SlotState, tasks: TaskBatch | Sequence[Task], stream: Stream) -> Ticket:
        """Put requests into their slots; see :func:`hal_core.contract.hookspecs.insert_tasks`.

        :param state: a state of this device.
        :param tasks: a :class:`hal_core.TaskBatch`, or tasks that one is made of; requests in them were admitted for
            this state's sizes.
        :param stream: one of this device's streams; steps put on it later see the requests.
        :raises InvalidBatch: with every problem of the batch; nothing was inserted (G8).
        """
        act = self.policy.insert_tasks
        return self._call("insert_tasks", stream, act, (self.device, self._hooks, state, tasks, stream))

    def open_group(self, *, state: SlotState, group: Group) -> None:
        """Have all ranks of a group compare what they hold of a state (G14), which else its first broadcast does.

        Every rank of the group calls it, and waits for the others.

        :raises StateUnusable: on every rank, if they differ.
        :raises GroupLost: when a rank does not come within the group's timeout.
        """
        self._call("open_group", NO_STREAM, self.policy.open_group, (self.device, state, group))

    def broadcast_tokens(self, *, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Make all ranks agree with the first; see :func:`hal_core.contract.hookspecs.broadcast_tokens`.

        :param group: the caller's tensor-parallel group; every rank of it makes the same calls in one order.
        :raises StateUnusable: when the ranks hold the state differently (G14).
        :raises GroupLost: when it is opened here and a rank does not come; later losses raise by the ticket (G16).
        """
        act = self.policy.broadcast_tokens
        return self._call("broadcast_tokens", stream, act, (self.device, self._hooks, state, group, stream))

    def save_output(self, *, state: SlotState, step: Step, sink: Sink, stream: Stream) -> Ticket:
        """Hand the step's tokens to the engine; see :func:`hal_core.contract.hookspecs.save_output`.

        :param step: which step, with the order of its rows for this state.
        :param sink: where the record goes: ``MemorySink()``, or what ``hal.open_sink(url)`` returned. Ranks that do not
            send leave it alone.
        :return: the ticket to give to ``state.take``, which gives the record.
        :raises InvalidValue: for a step that does not fit the state (G21).
        :raises SinkFull: when the sink took nothing until its deadline; the record is kept and sent later.
        :raises SinkClosed: when the sink is closed; ``error.ticket`` leads to the tokens that nobody was sent.
        """
        act = self.policy.save_output
        return self._call("save_output", stream, act, (self.device, self._hooks, state, step, sink, stream))

    def update_inputs(self, *, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Let the state change as a step changes it by itself; see :mod:`hal_core.slots.update`.

        After the broadcast (or the sampling, of one rank) and before ``save_output``, on the step's stream.

        :raises InvalidValue: for a plain step, where :meth:`set_drafts` has handed drafts over for it to verify.
        """
        return self._call("update_inputs", stream, self.policy.update_inputs, (self.device, state, step, stream))

    def set_drafts(
        self, *, state: SlotState, step: Step, drafts: Mapping[int, Sequence[int]], stream: Stream
    ) -> Ticket:
        """Hand a state the drafts that its next step verifies: tokens, their number and what it feeds, at once.

        Once for each step and state, after ``update_inputs`` with that step and before the next one's; before
        ``save_output`` for slots whose role is PREFILL, as its record takes their drafts along. ``update_inputs`` drops
        what was drafted before it, so a call out of this order is refused.

        :param step: the step whose tokens the drafts follow; its ``update_inputs`` has been called.
        :param drafts: slot to token ids, at most ``sizes.max_draft_tokens`` each, for slots that decoded in that step.
            Slots without drafts feed their next token alone, named or not. Slots that have stopped since do not run.
        :return: done when the drafts are in place.
        :raises InvalidValue: for a call out of order, or drafts that do not fit, with every slot; nothing was written.
        """
        return self._call("set_drafts", stream, self.policy.set_drafts, (self.device, state, step, drafts, stream))

    def copy_out(self, *, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy byte ranges to the host, as they are after the work that is on ``stream`` now.

        :param memory: of this device: ``state.memory``, or a view's.
        :param parts: bytes of it; a view's are at ``view.bounds()``, a field's in ``state.layout``.
        :return: a ticket whose ``data`` has a uint8 array for each part, once it is done.
        :raises InvalidValue: for memory of another device, or a part outside it.
        """
        return self._call("copy_out", stream, self.policy.copy_out, (self.device, memory, parts, stream))

    def communicator(self, *, group: Group) -> Communicator:
        """A group's collectives, which all its ranks call in one order. Raises CapabilityMissing or GroupLost (G16)."""
        return self._call("communicator", NO_STREAM, self.device.communicator, (group,))

    def order_after_reads(self, *, memory: Memory, stream: Stream) -> None:
        """Let ``stream`` wait for copies out that still read ``memory``, before work of the caller's own (a model's)
        writes there. The host does not wait; what the hooks write is ordered so by itself."""
        self._call("order_after_reads", stream, self.device.order_after_reads, (stream, memory))

    def observe(self, plugin: object, *, name: str = "") -> None:
        """Let a pluggy plugin see every hook call of this device; see :mod:`hal_core.runtime.observers`.

        :param name: what errors and reports call it; by default the name of its class.
        :raises InvalidValue: for what observes nothing, or is registered already.
        """
        self._begin()
        self._observers.add(plugin, name or f"{type(plugin).__module__}.{type(plugin).__qualname__}")
        self._hooks = self._observers.hooks

    @property
    def observers(self) -> tuple[str, ...]:
        """The names of the observers."""
        return self._observers.names

    def close(self) -> None:
        """Close the device; raise an error that nobody waited for. Calling it again does nothing."""
        if self._refusal:
            return
        tickets, self._refusal = self._tickets, "the device is closed"
        unseen = tickets.unseen()
        try:
            self.device.close()
        finally:
            tickets.tell_ends()
            tell(unseen + tickets.unseen())  # work that was under way has met its end while the device was closed

    def __enter__(self) -> BoundDevice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the device. What closing it meets becomes a note of an error that is under way: the cause stays."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as late:  # noqa: BLE001 (told as a note; the error under way goes on)
            error.add_note(f"closing the device met: {late!r}")

    def __repr__(self) -> str:
        return f"<BoundDevice {self.name}{' closed' if self._refusal else ''}>"

    def _begin(self) -> None:
        if self._refusal:
            raise DeviceClosed(self._refusal, cure="open a device in this process", device=self.name)
        if self._tickets.watched:
            self._tickets.tell_ends()
        if self._tickets.pending:
            tell(self._tickets.unseen())

    def _call(self, name: str, stream: object, act: Callable[[*Given], T], arguments: tuple[*Given]) -> T:
        """The one road of every call: closed or not, earlier errors, the stream, the policy, errors that name who."""
        tickets = self._tickets
        if tickets.pending or self._refusal or tickets.watched:
            self._begin()
        if type(stream) not in self._streams:
            arguments = self._with_stream(stream, name, arguments)
        try:
            result = act(*arguments)
        except HalError as error:
            raise error.located(device=self.name, hook=_HOOK_OF.get(name, name)) from error.__cause__
        except (AttributeError, TypeError):
            self._blame(_HOOK_OF.get(name, name), signature(act).bind(*arguments).arguments)
            raise
        if (result is not DONE and getattr(result, "watched", False)) or self._observers.wants_ends:  # an ABC is slow
            tickets.track(name, result)
        return result

    def _with_stream(self, stream: object, hook: str, arguments: tuple[*Given]) -> tuple[*Given]:
        """The arguments, whose last is a stream of a class that was not seen before: as it is, where it is one in hal's
        words; a framework's as the device takes it."""
        taken = stream
        try:
            if not is_stream(stream):
                take = getattr(self.device, "foreign_stream", None)
                if take is None or stream is None or isinstance(stream, type | bool | int | str):
                    raise no_stream(stream)
                taken = take(stream)
        except HalError as error:
            raise error.located(device=self.name, hook=hook) from None
        except (AttributeError, TypeError, ValueError):
            raise no_stream(stream).located(device=self.name, hook=hook) from None
        if taken is stream:
            self._streams.add(type(stream))
            return arguments
        given: tuple[Any, ...] = arguments
        changed: Any = (*given[:-1], taken)  # every call has its stream last
        return changed  # type: ignore[no-any-return]

    def _blame(self, hook: str, arguments: dict[str, Any]) -> None:
        """Raise what is wrong with the arguments of a call that failed rawly; nothing, where they are sound."""
        try:
            check_kinds(arguments)
        except HalError as error:
            raise error.located(device=self.name, hook=hook) from None


def bind(device: Device, policy: Policy | None = None) -> BoundDevice:
    """Bind a device's hooks: each present once, no wrappers, with exactly the contract's parameters.

    Raises :class:`PluginError` naming the hook and what is wrong with it. Logs once what falls back, and why (G7).
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
    if device.capabilities.fallbacks:
        reasons = "; ".join(f"{hook}: {why}" for hook, why in device.capabilities.fallbacks.items())
        log.warning("%s works with fallbacks: %s", name, reasons)
    return BoundDevice(device, manager, policy or Policy())


def _refuse_after_fork() -> None:
    for bound in list(_open):
        bound._refusal = "the device was opened before a fork, which its streams and threads do not survive"


os.register_at_fork(after_in_child=_refuse_after_fork)
