"""An opened device with its hooks bound: what a worker holds. One fresh pluggy manager for each."""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pluggy

from . import hookspecs
from .capabilities import HOOKS, Capabilities
from .counters import Counters
from .dispatch import direct
from .errors import DeviceClosed, HalError, OutOfMemory, PluginError
from .markers import PROJECT
from .policy import Policy, check_kinds, check_stream
from .tickets import DONE, Ticket

if TYPE_CHECKING:
    from .device import Device, Stream
    from .fields import Sizes
    from .group import Group
    from .sinks import Sink
    from .state import SlotState
    from .steps import Step
    from .tasks import Task, TaskBatch

log = logging.getLogger("hal")
_open: weakref.WeakSet[BoundDevice] = weakref.WeakSet()


class BoundDevice:
    """One opened device: the four hooks, each behind the policy, by keyword. A context manager.

    Hooks are called from one thread; tickets may be waited for from any. An error of an earlier call that nobody
    waited for is raised by the next hook call, before it does anything, and by :meth:`close`. After a fork the
    child's copy refuses every call.
    """

    def __init__(self, device: Device, hooks: Any, policy: Policy) -> None:  # noqa: ANN401 (pluggy's relay)
        self.device, self.policy = device, policy
        self.name = f"{device.name}:{device.index}"
        self._pending: list[Ticket] = []
        self._refusal = ""
        self._streams: set[type] = set()  # classes that were seen to be streams
        self._async_set_value = direct(hooks.async_set_value)
        self._insert_tasks = direct(hooks.insert_tasks)
        self._broadcast_tokens = direct(hooks.broadcast_tokens)
        self._save_output = direct(hooks.save_output)
        _open.add(self)

    @property
    def capabilities(self) -> Capabilities:
        """What the device can do."""
        return self.device.capabilities

    @property
    def default_stream(self) -> Stream:
        """The stream on which the framework computes."""
        return self.device.default_stream

    def counters(self) -> Counters:
        """Counts since the device was opened."""
        return self.device.counters()

    def state(self, sizes: Sizes, *, name: str = "target") -> SlotState:
        """A new slot state on this device, every slot empty."""
        from .state import SlotState  # imported here, as the state imports what the policy imports

        self._begin()
        try:
            return SlotState(self.device, sizes, name=name)
        except HalError as error:
            argument = "sizes" if isinstance(error, OutOfMemory) else ""
            raise error.located(device=self.name, hook="state", argument=argument) from error.__cause__
        except MemoryError as error:
            raise OutOfMemory(
                f"no room for {sizes}: {error}",
                cure="free memory, or give fewer slots or smaller sizes",
                device=self.name,
                hook="state",
                argument="sizes",
            ) from error

    def async_set_value(self, *, target: object, value: object, stream: Stream) -> Ticket:
        """Write a value into a device tensor or a view of it; see :func:`hal_core.hookspecs.async_set_value`."""
        if self._pending or self._refusal:
            self._begin()
        if type(stream) not in self._streams:
            self._learn_stream(stream, "async_set_value")
        try:
            ticket = self.policy.async_set_value(self.device, self._async_set_value, target, value, stream)
        except HalError as error:
            raise error.located(device=self.name, hook="async_set_value") from error.__cause__
        return ticket if ticket is DONE else self._track(ticket)

    def insert_tasks(self, *, state: SlotState, tasks: TaskBatch | Sequence[Task], stream: Stream) -> Ticket:
        """Put requests into their slots; see :func:`hal_core.hookspecs.insert_tasks`."""
        self._begin()
        if type(stream) not in self._streams:
            self._learn_stream(stream, "insert_tasks")
        try:
            ticket = self.policy.insert_tasks(self.device, self._insert_tasks, state, tasks, stream)
        except HalError as error:
            raise error.located(device=self.name, hook="insert_tasks") from error.__cause__
        except (AttributeError, TypeError):
            self._blame("insert_tasks", state=state, tasks=tasks)
            raise
        return self._track(ticket)

    def open_group(self, *, state: SlotState, group: Group) -> None:
        """Have all ranks of a group compare what they hold of a state (G14), which else its first broadcast does.

        Every rank of the group calls it, and every rank raises :class:`hal_core.errors.StateUnusable` if they differ.
        """
        self._begin()
        try:
            if group.size > 1 and group.ranks not in state.agreements:
                self.policy.open_group(self.device, state, group)
        except HalError as error:
            raise error.located(device=self.name, hook="broadcast_tokens") from error.__cause__
        except (AttributeError, TypeError):
            self._blame("broadcast_tokens", state=state, group=group)
            raise

    def broadcast_tokens(self, *, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Make all ranks agree with the first; see :func:`hal_core.hookspecs.broadcast_tokens`."""
        self._begin()
        if type(stream) not in self._streams:
            self._learn_stream(stream, "broadcast_tokens")
        try:
            ticket = self.policy.broadcast_tokens(self.device, self._broadcast_tokens, state, group, stream)
        except HalError as error:
            raise error.located(device=self.name, hook="broadcast_tokens") from error.__cause__
        except (AttributeError, TypeError):
            self._blame("broadcast_tokens", state=state, group=group)
            raise
        return self._track(ticket)

    def save_output(self, *, state: SlotState, step: Step, sink: Sink, stream: Stream) -> Ticket:
        """Hand the step's tokens to the engine; see :func:`hal_core.hookspecs.save_output`."""
        self._begin()
        if type(stream) not in self._streams:
            self._learn_stream(stream, "save_output")
        try:
            ticket = self.policy.save_output(self.device, self._save_output, state, step, sink, stream)
        except HalError as error:
            raise error.located(device=self.name, hook="save_output") from error.__cause__
        except (AttributeError, TypeError):
            self._blame("save_output", state=state, step=step, sink=sink)
            raise
        return self._track(ticket)

    def advance(self, *, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Let the state change as the step changes it by itself; see :mod:`hal_core.advance`."""
        self._begin()
        if type(stream) not in self._streams:
            self._learn_stream(stream, "advance")
        try:
            ticket = self.policy.advance(self.device, state, step, stream)
        except HalError as error:
            raise error.located(device=self.name, hook="advance") from error.__cause__
        except (AttributeError, TypeError):
            self._blame("advance", state=state, step=step)
            raise
        return self._track(ticket)

    def close(self) -> None:
        """Close the device; raise an error that nobody waited for. Calling it again does nothing."""
        if self._refusal:
            return
        self._refusal = "the device is closed"
        try:
            self._raise_unobserved()
        finally:
            self.device.close()

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
        if self._pending:
            self._raise_unobserved()

    def _learn_stream(self, stream: object, hook: str) -> None:
        """Look at a stream of a class that was not seen before: the devices do not, and some take anything."""
        try:
            check_stream(stream)
        except HalError as error:
            raise error.located(device=self.name, hook=hook) from None
        self._streams.add(type(stream))

    def _blame(self, hook: str, **arguments: object) -> None:
        """Raise what is wrong with the arguments of a call that failed rawly; nothing, where they are sound."""
        try:
            check_kinds(arguments)
        except HalError as error:
            raise error.located(device=self.name, hook=hook) from None

    def _track(self, ticket: Ticket) -> Ticket:
        if ticket is not DONE and ticket.watched:
            self._pending.append(ticket)
        return ticket

    def _raise_unobserved(self) -> None:
        """Forget tickets that are done; raise the first error among them that nobody has seen, naming the others."""
        left = []
        unseen = []
        for ticket in self._pending:
            if not ticket.done():
                left.append(ticket)
            elif not ticket.observed and (failure := ticket.failure()) is not None:
                ticket.observed = True
                unseen.append(failure)
        self._pending = left
        if unseen:
            first, *others = dict.fromkeys(unseen)
            first.add_note("met by an earlier call, whose ticket nobody waited for")
            for other in others:
                first.add_note(f"another such call met: {other!r}")
            raise first


def bind(device: Device, policy: Policy | None = None) -> BoundDevice:
    """Bind a device's hooks: each present once, no wrappers, with exactly the contract's parameters.

    Raises :class:`PluginError` naming the hook and what is wrong with it. Logs one record for a device that
    has fallbacks (G7).
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    name = f"{device.name}:{device.index}"
    try:
        manager.register(device, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(str(error), cure="compare with hal_core.hookspecs", device=name) from error
    for hook in HOOKS:
        _check_implementation(manager, hook, name)
    if device.capabilities.fallbacks:
        reasons = "; ".join(f"{hook}: {why}" for hook, why in device.capabilities.fallbacks.items())
        log.warning("%s works with fallbacks: %s", name, reasons)
    return BoundDevice(device, manager.hook, policy or Policy())


def _check_implementation(manager: pluggy.PluginManager, hook: str, device: str) -> None:
    found = getattr(manager.hook, hook).get_hookimpls()
    if len(found) != 1:
        raise PluginError(
            f"{len(found)} implementations of the hook",
            cure="mark exactly one method with hookimpl",
            device=device,
            hook=hook,
        )
    (implementation,) = found
    if implementation.hookwrapper or implementation.wrapper:
        raise PluginError("a device may not wrap hooks", cure="implement the hook itself", device=device, hook=hook)
    wanted = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    has = inspect.signature(implementation.function).parameters
    if list(has) != wanted or any(p.default is not p.empty for p in has.values()):
        raise PluginError(
            f"takes ({', '.join(map(str, has.values()))})",
            cure=f"the contract is ({', '.join(wanted)}), without defaults",
            device=device,
            hook=hook,
        )


def _refuse_after_fork() -> None:
    for bound in list(_open):
        bound._refusal = "the device was opened before a fork, which its streams and threads do not survive"


os.register_at_fork(after_in_child=_refuse_after_fork)
