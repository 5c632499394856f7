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

Its wrappers run around the device's own hook, inside the policy. What one returns or raises is dropped: the call goes
on with the device's own result or error, and an observer that raises is reported once, by name. The arguments are the
caller's own objects; the contract forbids writing to them.

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
from collections.abc import Callable, Generator
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, cast

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


class Observers:
    """The observers of one device, registered with its pluggy manager."""

    def __init__(self, manager: pluggy.PluginManager, device: str) -> None:
        self._manager, self._device = manager, device
        self._names: list[str] = []
        self._ended: list[tuple[str, Callable[..., object]]] = []
        self._reported: set[str] = set()
        self.wants_ends = False
        """Whether any observer asks for the ends of tickets."""

    @property
    def names(self) -> tuple[str, ...]:
        """The observers' names, in the order in which they came."""
        return tuple(self._names)

    @property
    def hooks(self) -> Hooks:
        """The four hooks by way of pluggy and the observers."""
        return cast("Hooks", self._manager.hook)

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
        relays = {
            hook: _relay(partial(self.report, name, hook), wrapper) for hook, wrapper in wrappers.items() if wrapper
        }
        self._manager.register(_Relays(relays), name=f"observer {name}")
        self._names.append(name)
        if callable(ended):
            self._ended.append((name, ended))
            self.wants_ends = True

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


class _Relays:
    """What pluggy calls for one observer: under the name of each hook that it wraps, a function of :func:`_relay`."""

    def __init__(self, relays: dict[str, Callable[..., Watching]]) -> None:
        vars(self).update(relays)


def _relay(report: Callable[[BaseException], None], wrapper: Callable[..., Watching]) -> Callable[..., Watching]:
    """A wrapper that drives the observer's, asks for the same arguments, and gives back exactly what it got.

    One generator over the observer's own and nothing between: every call of the hook pays for it.
    """

    @wraps(wrapper)  # with its parameters, by whose names pluggy hands over the arguments, and its marker
    def watch(*arguments: object, **named: object) -> Watching:
        watching = wrapper(*arguments, **named)
        try:
            next(watching)
        except Exception as met:  # noqa: BLE001 (an observer changes nothing; it is reported)
            report(met)
            return (yield)
        try:
            result = yield
        except BaseException as error:
            _end(report, watching, error)
            raise
        try:
            watching.send(result)
        except StopIteration:
            return result
        except Exception as met:  # noqa: BLE001 (an observer changes nothing; it is reported)
            report(met)
            return result
        watching.close()
        report(RuntimeError("yielded a second time"))
        return result

    return watch


def _end(report: Callable[[BaseException], None], watching: Watching, error: BaseException) -> None:
    """Let the observer's wrapper run to its end with the call's error."""
    try:
        watching.throw(error)
    except StopIteration:
        return
    except Exception as met:  # noqa: BLE001 (an observer changes nothing; it is reported)
        if met is not error:  # else it let the call's own error through, as a wrapper should
            report(met)
        return
    except BaseException as met:
        if met is not error:
            raise
        return
    watching.close()
    report(RuntimeError("yielded a second time"))


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
