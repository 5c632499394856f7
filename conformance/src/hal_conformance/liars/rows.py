"""Liars as rows of tables, and the classes that are made of them.

A table is a dictionary from a liar's story to its :func:`row`: name, guarantee, where it lies, and how. Where: a method
of the device (``"copy_out"``, or several: ``"submit async_set_value"``), of its ring (``"staging.fence"``), of the
vendor's primitives (``"primitives.launch"``) or of the policy (``"policy.save_output"``), or a seam of the core
(``"check of a batch"``, :mod:`.core_seams`). How: a function of the :class:`Call`, which returns what the place does::

    TABLE = {
        "copies out follow the work of the default stream": row(
            "CopiesOfTheDefaultStream", 1, "copy_out", lambda call: call(stream=call.me.default_stream), HELD
        ),
    }
    register(__name__, TABLE)

``when`` limits the lie to some calls. A liar that does not fit a row is a class with
:func:`hal_conformance.liars.liar`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

from hal_core.contract.markers import hookimpl
from hal_core.devices import AsyncDevice, Primitives, StagingRing
from hal_core.runtime.policy import Policy

from ..harness.lies import Lie, lay_below
from . import LIARS, Liar, Patch
from .core_seams import SEAMS
from .core_seams import put as put_seam
from .proxies import put


class Call:
    """One call of the place where a liar lies; its arguments are attributes, by the honest function's names.

    ``call()`` makes it honestly, ``call(stream=other)`` with another argument. ``me``: the device or the policy, and
    for a seam an object that lives as long as the liar.
    """

    def __init__(self, true: Callable[..., Any], me: Any, kind: type, given: inspect.BoundArguments) -> None:  # noqa: ANN401
        self._true, self.me, self._kind, self._given = true, me, kind, given

    def __call__(self, **changed: object) -> Any:  # noqa: ANN401 (the place's)
        """Make the call honestly, with other arguments where some are given."""
        given = inspect.BoundArguments(self._given.signature, {**self._given.arguments, **changed})
        return self._true(*given.args, **given.kwargs)

    def __contains__(self, name: str) -> bool:
        return name in self._given.arguments

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (an argument)
        if name not in self._given.arguments:
            raise AttributeError(f"no argument {name!r} among {[*self._given.arguments]}")
        return self._given.arguments[name]

    def honest(self, name: str) -> Any:  # noqa: ANN401 (a method)
        """Return another honest method of the device."""
        return getattr(super(self._kind, self.me), name)

    def kept(self, name: str, first: Any) -> Any:  # noqa: ANN401 (what the liar keeps)
        """Return what the liar keeps under ``name`` from call to call; ``first`` until something is set in it."""
        return self.me.__dict__.setdefault(name, first)

    def write(self, memory: Any, *runs: tuple[int, bytes]) -> Any:  # noqa: ANN401 (a memory; a ticket)
        """Write ``(offset, bytes)`` runs into a memory without checks, on the call's stream."""
        return put(self.me, memory, runs, self.stream)


How = Callable[[Call], object]
SET, SAVE, DRAFT = "async_set_value", "policy.save_output", "policy.set_drafts"
"""Places where many lie."""


@dataclass(frozen=True)
class Row:
    """One liar of a table; its story is the table's key. ``ways``: place to lie; ``has``: other attributes."""

    name: str
    guarantee: int
    ways: Mapping[str, How]
    requires: tuple[str, ...]
    seen: str
    has: Mapping[str, object]


def row(
    name: str,
    guarantee: int,
    where: str,
    how: How,
    requires: str | tuple[str, ...] = (),
    seen: str = "",
    *,
    when: Callable[[Call], object] | None = None,
    also: Mapping[str, How] | None = None,
    has: Mapping[str, object] | None = None,
) -> Row:
    """Return a row. ``seen``: where the fault was met; ``also``: further places of the same kind, and their lies;
    ``has``: further attributes of the liar's class."""
    places = [where] if where in SEAMS else where.split()
    lie = how if when is None else lambda call: how(call) if when(call) else call()
    return Row(
        name,
        guarantee,
        dict.fromkeys(places, lie) | dict(also or {}),
        (requires,) if isinstance(requires, str) else requires,
        seen,
        has or {},
    )


def register(module: str, table: Mapping[str, Row]) -> None:
    """Make a class of each row, of the module with that name, and register it as a liar."""
    for story, one in table.items():
        kind = _class_of(one)
        kind.__module__, kind.__doc__ = module, story
        LIARS.append(Liar(one.name, one.guarantee, story, kind, one.requires, one.seen))


class Patches(Patch):
    """A patch of several seams: ``ways``, seam to lie."""

    ways: ClassVar[Mapping[str, How]]

    @classmethod
    def apply(cls) -> Callable[[], None]:
        """Apply the lies; return the function that undoes them."""
        undo = [put_seam(seam, _in_place_of(way)) for seam, way in cls.ways.items()]

        def restore() -> None:
            for each in reversed(undo):
                each()

        return restore


def _class_of(one: Row) -> type:
    where, how = next(iter(one.ways.items()))
    if where in SEAMS:
        return type(one.name, (Patches,), {"seam": where, "ways": one.ways})
    part, _, method = where.rpartition(".")
    kind = type(one.name, (Policy if part == "policy" else Lie,), dict(one.has))
    if part == "policy":
        setattr(kind, method, _method(kind, Policy, method, how))
    elif part:
        below = type(one.name, (Lie,) if part == "primitives" else (), {})  # the layout of the part's own class
        for place, way in one.ways.items():
            method = place.rpartition(".")[2]
            setattr(below, method, _method(below, PARTS[part], method, way))
        lay = lay_below if part == "primitives" else _lay_over_the_ring
        kind.laid = lambda device: lay(device, below)  # type: ignore[attr-defined]
    else:
        lay_ways(kind, one.ways)
    return kind


PARTS = {"staging": StagingRing, "primitives": Primitives}
"""Parts of a device in which a row may lie, and the classes that have the parameters of their methods."""


def _lay_over_the_ring(device: Any, mixin: type) -> None:  # noqa: ANN401 (an opened device)
    ring = device.staging
    if not isinstance(ring, mixin):
        ring.__class__ = type(f"{mixin.__name__}Of{type(ring).__name__}", (mixin, type(ring)), {})
        ring.device = device


def _in_place_of(how: How) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def lie(true: Callable[..., Any]) -> Callable[..., Any]:
        me, signature = SimpleNamespace(), inspect.signature(true)

        def lying(*arguments: object, **named: object) -> object:
            return how(Call(true, me, Patch, _bound(signature, arguments, named)))

        return lying

    return lie


def _method(kind: type, honest: type, name: str, how: How) -> Callable[..., Any]:
    """Return the lying method of ``kind``; ``honest`` has the parameters of the true one."""
    true = inspect.unwrap(getattr(honest, name, None) or getattr(Lie, name))
    signature = inspect.signature(true)
    signature = signature.replace(parameters=[*signature.parameters.values()][1:])

    def answer(self: object, *arguments: object, **named: object) -> object:
        return how(Call(getattr(super(kind, self), name), self, kind, _bound(signature, arguments, named)))

    if honest is not Policy and name in HOOKS:
        return _hook(name, answer)
    answer.__signature__ = inspect.signature(true)  # type: ignore[attr-defined] # the binder reads a policy's
    return answer


def _bound(
    signature: inspect.Signature, arguments: tuple[object, ...], named: Mapping[str, object]
) -> inspect.BoundArguments:
    given = signature.bind(*arguments, **named)
    given.apply_defaults()
    return given


HOOKS = ("async_set_value", "broadcast_tokens", "insert_tasks", "save_output")


def _hook(hook: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook's method; pluggy reads the parameters in its code."""

    def async_set_value(self: Any, device: Any, target: Any, value: Any, stream: Any) -> Any:  # noqa: ANN401
        return answer(self, device, target, value, stream)

    def broadcast_tokens(self: Any, device: Any, state: Any, group: Any, stream: Any) -> Any:  # noqa: ANN401
        return answer(self, device, state, group, stream)

    def insert_tasks(self: Any, device: Any, state: Any, tasks: Any, stream: Any) -> Any:  # noqa: ANN401
        return answer(self, device, state, tasks, stream)

    def save_output(self: Any, device: Any, state: Any, step: Any, sink: Any, stream: Any) -> Any:  # noqa: ANN401
        return answer(self, device, state, step, sink, stream)

    made: Callable[..., Any] = hookimpl(locals()[hook])
    return made


def lay_ways(kind: type, ways: Mapping[str, How]) -> None:
    """Give a mixin over a device methods that lie."""
    for method, way in ways.items():
        setattr(kind, method, _method(kind, AsyncDevice, method, way))


def then(more: How) -> How:
    """Return a lie that makes the call honestly, does ``more``, and returns the call's result."""

    def lie(call: Call) -> object:
        given = call()
        more(call)
        return given

    return lie


def first(more: How) -> How:
    """Return a lie that does ``more``, and then makes the call honestly."""

    def lie(call: Call) -> object:
        more(call)
        return call()

    return lie


Errors = type[Exception] | tuple[type[Exception], ...]


def caught(kinds: Errors, act: Callable[[Call, Any], object]) -> How:
    """Return a lie: ``act(call, error)`` returns what the call does in place of an error of these kinds."""

    def lie(call: Call) -> object:
        try:
            return call()
        except kinds as error:
            return act(call, error)

    return lie


def noted(kinds: Errors, act: Callable[[Call, Any], object]) -> How:
    """Return a lie that does ``act(call, error)`` at an error of these kinds, which is raised then."""

    def lie(call: Call) -> object:
        try:
            return call()
        except kinds as error:
            act(call, error)
            raise

    return lie


def instead(kinds: Errors, other: Callable[[Any], BaseException]) -> How:
    """Return a lie that raises ``other(error)`` in place of an error of these kinds."""

    def lie(call: Call) -> object:
        try:
            return call()
        except kinds as error:
            if (made := other(error)) is error:
                raise
            raise made from None

    return lie


def meanwhile(change: Callable[[Call], tuple[Any, str, object]]) -> How:
    """Return a lie: an object has another attribute during the call: ``change(call)`` returns it, name and value."""

    def lie(call: Call) -> object:
        owner, name, value = change(call)
        kept = getattr(owner, name, _MISSING)
        setattr(owner, name, value)
        try:
            return call()
        finally:
            if kept is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, kept)

    return lie


_MISSING = object()
