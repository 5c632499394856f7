"""Observers of one opened device: pluggy plugins whose wrappers see every hook call, and can change none.

An observer is an object with wrappers of hooks, marked as pluggy's are::

    class Times:
        @hookimpl(wrapper=True)
        def insert_tasks(self, tasks):      # any of the hook's arguments, by name
            began = perf_counter()
            ticket = yield                  # raises what the call raised
            print(len(tasks), ticket.mode, perf_counter() - began)
            return ticket

        def ticket_ended(self, hook, ticket, error):   # if it wants to know
            ...

Its wrappers run around the device's own hook, inside the policy, in pluggy's order (``tryfirst``, ``trylast``, else who
came last is outermost). What one returns or raises is dropped: the call goes on with the device's own result or error,
and an observer that raises is reported once, by name. The arguments are the caller's own objects; the contract forbids
writing to them.

``bound.observe(Times())`` registers one. An installed distribution offers one under the entry-point group
``hal.observers``, a class or an object; :func:`hal.open_device` uses those that the user names in ``HAL_OBSERVERS``
(separated by commas; none by default), and ``hal devices`` lists them all. Every line about one says whose it is.

``ticket_ended`` is called once for each ticket that the observer's device gave, when the end is noticed: where the
ticket is waited for, else at the next hook call, else at :meth:`hal_core.BoundDevice.close`. ``error`` is what
the work ended with, or None.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pluggy

from ..contract import hookspecs
from ..contract.capabilities import HOOKS
from ..contract.markers import PROJECT
from ..errors import InvalidValue

if TYPE_CHECKING:
    from ..contract.device import Hooks
    from ..tickets import Ticket

log = logging.getLogger("hal")
_PARAMETERS = {hook: tuple(inspect.signature(getattr(hookspecs, hook)).parameters) for hook in HOOKS}
Watching = Generator[None, Any, object]
Report = Callable[[str, str, BaseException], None]


class Observers:
    """The observers of one device, registered with its pluggy manager."""

    def __init__(self, manager: pluggy.PluginManager, device: str) -> None:
        self._manager, self._device = manager, device
        self._names: list[str] = []
        self._ended: list[tuple[str, Callable[..., object]]] = []
        self._reported: set[str] = set()
        self.hooks = cast("Hooks", SimpleNamespace())
        """The four hooks by way of the observers, once there is one; a hook that nobody wraps is the device's own."""
        self.wants_ends = False
        """Whether any observer asks for the ends of tickets."""

    @property
    def names(self) -> tuple[str, ...]:
        """The observers' names, in the order in which they came."""
        return tuple(self._names)

    def add(self, plugin: object, name: str) -> None:
        """Register an observer. Raises :class:`InvalidValue` for what observes nothing, or wraps what is no hook."""
        wrappers = {hook: _wrapper(plugin, hook) for hook in HOOKS}
        wrong = [hook for hook in dir(plugin) if hook not in HOOKS and _marked(plugin, hook)]
        ended = getattr(plugin, "ticket_ended", None)
        if wrong:
            raise self._refused(
                name, f"wraps {', '.join(wrong)}, which is no hook", f"the hooks are {', '.join(HOOKS)}"
            )
        if not any(wrappers.values()) and not callable(ended):
            raise self._refused(
                name,
                "has no wrapper of a hook and no ticket_ended",
                "mark a method that is named as a hook with hookimpl(wrapper=True)",
            )
        if name in self._names:
            raise self._refused(name, "observes the device already", "give it another name")
        observer = SimpleNamespace(hal_name=name, **{hook: wrapper for hook, wrapper in wrappers.items() if wrapper})
        self._manager.register(observer, name=f"observer {name}")
        for hook in HOOKS:
            setattr(self.hooks, hook, self._road(hook))
        self._names.append(name)
        if callable(ended):
            self._ended.append((name, ended))
            self.wants_ends = True

    def _road(self, hook: str) -> Callable[..., Ticket]:
        """The device's hook with its wrappers around it, in pluggy's order and with the arguments that each names."""
        watchers: list[_Watcher] = []
        for found in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
            if not found.wrapper:
                own = cast("Callable[..., Ticket]", found.function)  # the device's, which comes last
                return _watched(hook, own, watchers, self.report) if watchers else own
            asked = _asked([*found.argnames, *found.kwargnames])
            watchers.append(_Watcher(found.plugin.hal_name, found.function, asked))
        raise AssertionError(hook)

    def end(self, hook: str, ticket: Ticket) -> None:
        """Tell those who want to know that a ticket has ended."""
        error = ticket.failure()
        for name, ended in self._ended:
            try:
                ended(hook=hook, ticket=ticket, error=error)
            except Exception as met:  # noqa: BLE001 (an observer changes nothing; it is reported)
                self.report(name, "ticket_ended", met)

    def report(self, name: str, where: str, error: BaseException) -> None:
        """Tell of an observer that raised, once; it goes on observing."""
        if name not in self._reported:
            self._reported.add(name)
            log.warning("%s: observer %s raised in %s, which changes nothing: %r", self._device, name, where, error)

    def _refused(self, name: str, what: str, cure: str) -> InvalidValue:
        return InvalidValue(f"observer {name} {what}", cure=cure, device=self._device, argument="plugin")


class _Watcher(NamedTuple):
    """One observer's wrapper of a hook, and what takes the arguments that it asks for out of all of them."""

    name: str
    wrapper: Callable[..., Watching]
    asked: Callable[[dict[str, object]], tuple[object, ...]]


def _asked(names: Sequence[str]) -> Callable[[dict[str, object]], tuple[object, ...]]:
    if len(names) > 1:
        return itemgetter(*names)  # a third of the time of a comprehension
    return lambda given: tuple([given[name] for name in names])


def _watched(
    hook: str, own: Callable[..., Ticket], watchers: Sequence[_Watcher], report: Report
) -> Callable[..., Ticket]:
    """The device's hook, whose every call the watchers see. It gives and raises what the device's own does.

    pluggy says who watches; the loop is not pluggy's, which takes more than twice as long (docs/decisions/0036).
    """

    def call(**given: object) -> Ticket:
        watching = []
        for name, wrapper, asked in watchers:
            try:
                watch = wrapper(*asked(given))
                next(watch)
            except Exception as met:  # noqa: BLE001 (an observer changes nothing; it is reported)
                report(name, hook, met)
            else:
                watching.append((name, watch))
        try:
            ticket = own(**given)
        except BaseException as error:
            for name, watch in reversed(watching):
                if (besides := _end(watch, error)) is not None:
                    report(name, hook, besides)
            raise
        for name, watch in reversed(watching):
            try:
                watch.send(ticket)
            except StopIteration:
                continue
            except Exception as met:  # noqa: BLE001
                report(name, hook, met)
            else:
                report(name, hook, _twice(watch))
        return ticket

    return call


def _end(watch: Watching, error: BaseException) -> BaseException | None:
    """Let a wrapper run to its end with the call's error; what it raised besides, if anything."""
    try:
        watch.throw(error)
    except StopIteration:
        return None
    except Exception as met:  # noqa: BLE001 (told by the caller)
        return None if met is error else met  # a wrapper should let the call's own error through
    except BaseException as met:
        if met is not error:
            raise
        return None
    return _twice(watch)


def _twice(watch: Watching) -> BaseException:
    """End a wrapper that did not end with its call; what is wrong with it."""
    try:
        watch.close()
    except Exception as met:  # noqa: BLE001 (told by the caller)
        return met
    return RuntimeError("yielded a second time")


def _marked(plugin: object, name: str) -> Any:  # noqa: ANN401 (pluggy's own options)
    """What pluggy's marker left on a method, or None."""
    try:
        return getattr(getattr(plugin, name, None), f"{PROJECT}_impl", None)
    except Exception:  # noqa: BLE001 (a property of the observer's own, which is no business of ours)
        return None


def _wrapper(plugin: object, hook: str) -> Callable[..., Watching] | None:
    """The observer's wrapper of a hook. Raises :class:`InvalidValue` for an implementation that is no wrapper."""
    options = _marked(plugin, hook)
    if options is None:
        return None
    method: Callable[..., Watching] = getattr(plugin, hook)
    if not options.get("wrapper") or not inspect.isgeneratorfunction(method):
        raise InvalidValue(
            f"an observer's {hook} is no wrapper",
            cure="mark it with hookimpl(wrapper=True), and yield once",
            argument="plugin",
        )
    unknown = set(inspect.signature(method).parameters) - set(_PARAMETERS[hook])
    if unknown:
        raise InvalidValue(
            f"an observer's {hook} asks for {', '.join(sorted(unknown))}",
            cure=f"the hook has {', '.join(_PARAMETERS[hook])}",
            argument="plugin",
        )
    return method
