"""Observers of one opened device: pluggy plugins whose wrappers see every hook call and can change none.

An observer is an object with wrappers of hooks, marked as pluggy's are::

    class Times:
        @hookimpl(wrapper=True)
        def insert_tasks(self, tasks):      # any of the hook's arguments, by name
            began = perf_counter()
            ticket = yield                  # raises what the call raised
            print(len(tasks), ticket.mode, perf_counter() - began)
            return ticket

        def ticket_ended(self, hook, ticket, error):   # optional
            ...

        def called(self, call, arguments):   # optional
            ...

        def timed(self, call, began, result, arguments):   # optional
            ...

Its wrappers run around the device's own hook, inside the policy, in pluggy's order (``tryfirst``, ``trylast``, else the
last registered is outermost). Its results and exceptions are dropped: the call continues with the device's own result
or error. An observer that raises is reported once, by name. The arguments are the caller's own objects; the contract
forbids writing to them.

``bound.observe(Times())`` registers one. An installed distribution offers an observer, a class or an object, in the
entry-point group ``hal.observers``. :func:`hal.open_device` uses those that the user names in ``HAL_OBSERVERS``
(separated by commas; none by default). ``hal devices`` lists them all, each with its distribution.

``ticket_ended`` is called once for each ticket of the device, when its end is noticed: where the ticket is waited for,
else at the next hook call, else at :meth:`hal_core.BoundDevice.close`. ``error`` is the work's error, or None.

``called`` is called after each other call of the opened device that has succeeded (``state``, ``write``,
``update_inputs``, ``set_drafts``, ``order_after_reads``, ``copy_out`` and so on), with its arguments by name.

``timed`` is called after each call of the opened device, hooks too, and takes less time than wrappers and ``called``:
``began`` is by :func:`time.monotonic_ns`, ``result`` what the caller gets, None if it raised. ``arguments`` is a tuple
that ends with those of the method of :class:`hal_core.BoundDevice`, in its order.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Sequence
from functools import cache
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pluggy

from ..contract import hookspecs
from ..contract.capabilities import HOOKS
from ..contract.markers import PROJECT
from ..errors import InvalidValue
from ..tickets import DONE

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
        self._called: list[tuple[str, Callable[..., object]]] = []
        self._timed: list[tuple[str, Callable[..., object]]] = []
        self._reported: set[str] = set()
        self.hooks = cast("Hooks", SimpleNamespace())
        """The four hooks with their observers; a hook without observers is the device's own."""
        self.wants_ends = False
        """Whether any observer has a ``ticket_ended``."""
        self.wants_calls = False
        """Whether any observer has a ``called``."""
        self.wants_times = False
        """Whether any observer has a ``timed``."""

    @property
    def names(self) -> tuple[str, ...]:
        """The observers' names, in the order of registration."""
        return tuple(self._names)

    def add(self, plugin: object, name: str) -> None:
        """Register an observer. Raises :class:`InvalidValue` for an object without observing methods, or a wrapper of
        an unknown hook."""
        wrappers = {hook: _wrapper(plugin, hook) for hook in HOOKS}
        wrong = [hook for hook in dir(plugin) if hook not in HOOKS and _marked(plugin, hook)]
        ended, called, timed = (getattr(plugin, optional, None) for optional in ("ticket_ended", "called", "timed"))
        if wrong:
            raise self._refused(
                name, f"wraps {', '.join(wrong)}, which is no hook", f"the hooks are {', '.join(HOOKS)}"
            )
        if not any(wrappers.values()) and not any(map(callable, (ended, called, timed))):
            raise self._refused(
                name,
                "has no wrapper of a hook, no ticket_ended, no called and no timed",
                "mark a method that has a hook's name with hookimpl(wrapper=True)",
            )
        if name in self._names:
            raise self._refused(name, "already observes the device", "give it another name")
        observer = SimpleNamespace(hal_name=name, **{hook: wrapper for hook, wrapper in wrappers.items() if wrapper})
        self._manager.register(observer, name=f"observer {name}")
        for hook in HOOKS:
            setattr(self.hooks, hook, self._observed_hook(hook))
        self._names.append(name)
        if callable(ended):
            self._ended.append((name, ended))
            self.wants_ends = True
        if callable(called):
            self._called.append((name, called))
            self.wants_calls = True
        if callable(timed):
            self._timed.append((name, timed))
            self.wants_times = True

    def _observed_hook(self, hook: str) -> Callable[..., Ticket]:
        """Return the device's hook inside its wrappers, in pluggy's order, each with the arguments that it names."""
        watchers: list[_Watcher] = []
        for found in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
            if not found.wrapper:
                own = cast("Callable[..., Ticket]", found.function)  # the device's, which comes last
                return _watched(hook, own, watchers, self.report) if watchers else own
            pick = _picker([*found.argnames, *found.kwargnames])
            watchers.append(_Watcher(found.plugin.hal_name, found.function, pick))
        raise AssertionError(hook)

    def end(self, hook: str, ticket: Ticket) -> None:
        """Call each observer's ``ticket_ended`` for a ticket that has ended."""
        error = None if ticket is DONE else ticket.failure()
        for name, ended in self._ended:
            try:
                ended(hook=hook, ticket=ticket, error=error)
            except Exception as met:  # noqa: BLE001 (an observer cannot change the call; its error is reported)
                self.report(name, "ticket_ended", met)

    def call(self, call: str, act: Callable[..., object], arguments: Sequence[object]) -> None:
        """Call each observer's ``called`` after a call that is no hook; ``act``: the function that was called."""
        given = dict(zip(_names_of(getattr(act, "__func__", act)), arguments, strict=False))
        for name, called in self._called:
            try:
                called(call=call, arguments=given)
            except Exception as met:  # noqa: BLE001 (an observer cannot change the call; its error is reported)
                self.report(name, "called", met)

    def time(self, call: str, began: int, result: object, arguments: Sequence[object]) -> None:
        """Call each observer's ``timed`` after a call."""
        for name, timed in self._timed:
            try:
                timed(call, began, result, arguments)
            except Exception as met:  # noqa: BLE001 (an observer cannot change the call; its error is reported)
                self.report(name, "timed", met)

    def report(self, name: str, where: str, error: BaseException) -> None:
        """Log, once, that an observer raised; it continues to observe."""
        if name not in self._reported:
            self._reported.add(name)
            log.warning("%s: observer %s raised in %s, which changes nothing: %r", self._device, name, where, error)

    def _refused(self, name: str, what: str, cure: str) -> InvalidValue:
        return InvalidValue(f"observer {name} {what}", cure=cure, device=self._device, argument="plugin")


class _Watcher(NamedTuple):
    """One observer's wrapper of a hook, and the function that selects its arguments."""

    name: str
    wrapper: Callable[..., Watching]
    pick: Callable[[dict[str, object]], tuple[object, ...]]


def _picker(names: Sequence[str]) -> Callable[[dict[str, object]], tuple[object, ...]]:
    if len(names) > 1:
        return itemgetter(*names)  # takes a third of the time of a comprehension
    return (lambda given: (given[names[0]],)) if names else lambda given: ()


def _watched(
    hook: str, own: Callable[..., Ticket], watchers: Sequence[_Watcher], report: Report
) -> Callable[..., Ticket]:
    """Return the device's hook with its observers. It returns and raises the same as the device's own.

    pluggy registers the observers, but the loop is our own: pluggy's takes more than twice as long
    (docs/decisions/02).
    """

    def call(**given: object) -> Ticket:
        watching = []
        for name, wrapper, pick in watchers:
            try:
                watch = wrapper(*pick(given))
                next(watch)
            except Exception as met:  # noqa: BLE001 (an observer cannot change the call; its error is reported)
                report(name, hook, met)
            else:
                watching.append((name, watch))
        try:
            ticket = own(**given)
        except BaseException as error:
            for name, watch in reversed(watching):
                if (another := _end(watch, error)) is not None:
                    report(name, hook, another)
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
    """Let a wrapper run to its end with the call's error; return another error that it raised, or None."""
    try:
        watch.throw(error)
    except StopIteration:
        return None
    except Exception as met:  # noqa: BLE001 (the caller reports it)
        return None if met is error else met  # A wrapper should pass the call's own error on.
    except BaseException as met:
        if met is not error:
            raise
        return None
    return _twice(watch)


def _twice(watch: Watching) -> BaseException:
    """Close a wrapper that yielded a second time, and return its fault."""
    try:
        watch.close()
    except Exception as met:  # noqa: BLE001 (the caller reports it)
        return met
    return RuntimeError("yielded a second time")


@cache
def _names_of(function: Callable[..., object]) -> tuple[str, ...]:
    """Return the parameters of a method's function, without ``self``."""
    names = tuple(inspect.signature(function).parameters)
    return names[1:] if names[:1] == ("self",) else names


def _marked(plugin: object, name: str) -> Any:  # noqa: ANN401 (pluggy's own options)
    """Return the options that pluggy's marker left on a method, or None. No property of the observer is evaluated."""
    return getattr(inspect.getattr_static(plugin, name, None), f"{PROJECT}_impl", None)


def _wrapper(plugin: object, hook: str) -> Callable[..., Watching] | None:
    """Return the observer's wrapper of a hook, or None without an attribute of that name.

    :raises InvalidValue: if the attribute is no marked wrapper: it would never be called.
    """
    if inspect.getattr_static(plugin, hook, None) is None:
        return None
    options = _marked(plugin, hook) or {}
    if not options.get("wrapper") or not inspect.isgeneratorfunction(getattr(plugin, hook)):
        raise InvalidValue(
            f"an observer's {hook} is not a wrapper",
            cure="mark it with hookimpl(wrapper=True), and yield once",
            argument="plugin",
        )
    method: Callable[..., Watching] = getattr(plugin, hook)
    unknown = set(inspect.signature(method).parameters) - set(_PARAMETERS[hook])
    if unknown:
        raise InvalidValue(
            f"an observer's {hook} asks for {', '.join(sorted(unknown))}",
            cure=f"the hook has {', '.join(_PARAMETERS[hook])}",
            argument="plugin",
        )
    return method
