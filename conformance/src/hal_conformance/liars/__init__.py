"""Liars: devices and policies with one bug each, and the guarantee whose tests must detect it. They test the kit.

A liar is a mixin over the class of an honest device (any device: ``hal conform NAME --liars``), a Policy, or a patch in
force while the liar's device is open. Most are rows of tables, and :mod:`.rows` makes their classes. One that fits no
row is a class that :func:`liar` registers::

    @liar(11, "the row tail of the block table is not reset", seen="FastDeploy")
    class NoRowReset(Lie): ...

To add one, write it into the module of its kind, or a new module named in :data:`MODULES`, and run ``hal conform cpu
--liars --only G11``. ``seen`` names where the fault was met. One outside this package is named by its module:
``--liar my_liars:NoRowReset``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hal_core.errors import InvalidValue
from hal_core.runtime.policy import Policy

from ..harness.lies import Lie as Lie
from ..harness.lies import lay_over as lay_over
from .core_seams import put

if TYPE_CHECKING:
    from ..harness.subject import Subject

MODULES = (
    *("values", "sizes", "steps", "further", "matches", "postponed", "ring", "copies", "streams", "tickets", "life"),
    *("runtimes", "companions", "fields", "outputs", "policies", "handover", "ranks"),
)
"""The modules of this package that register liars."""

T = TypeVar("T", bound=type)
LIARS: list[Liar] = []


class Patch:
    """Base of liars in the core's own functions. ``lie(true)`` returns the replacement of ``seam``.

    A seam is a name in :data:`hal_conformance.liars.core_seams.SEAMS`; it is replaced while the liar is tested.
    """

    seam: ClassVar[str]

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function called instead of ``true``."""
        raise NotImplementedError(f"{cls.__name__} lies in no way")

    @classmethod
    def apply(cls) -> Callable[[], None]:
        """Apply the lie; return the function that undoes it."""
        return put(cls.seam, cls.lie)


@dataclass(frozen=True)
class Liar:
    """One liar: ``how`` is a :class:`Lie`, a :class:`Patch` or a :class:`hal_core.runtime.policy.Policy`."""

    name: str
    guarantee: int
    story: str
    how: type
    requires: tuple[str, ...] = ()
    seen: str = ""

    def corrupt(self, honest: Subject) -> Subject:
        """Return the subject with this bug."""
        if issubclass(self.how, Policy):
            return replace(honest, name=self.name, policy=self.how())
        if issubclass(self.how, Patch):
            return replace(honest, name=self.name, undo=self.how.apply())
        return replace(honest, name=self.name, open=lambda: lay_over(honest.open(), self.how))


def liar(guarantee: int, story: str, *, requires: str | tuple[str, ...] = (), seen: str = "") -> Callable[[T], T]:
    """Register a class as a liar against ``guarantee``, on devices that offer ``requires``.

    Raises :class:`InvalidValue` for a class of another kind, and for an ``__init__`` that no device would call.
    """

    def register(how: T) -> T:
        if not issubclass(how, Lie | Patch | Policy):
            raise InvalidValue(f"the liar {how.__name__} is of no kind", cure="derive it from Lie, Patch or Policy")
        if not issubclass(how, Policy) and how.__init__ is not object.__init__:
            what = f"the __init__ of the liar {how.__name__} is never called, as its device is open already"
            raise InvalidValue(what, cure="of a Lie, override laid(self); of a Patch, prepare in lie(true)")
        needs = (requires,) if isinstance(requires, str) else requires
        LIARS.append(Liar(how.__name__, guarantee, story, how, needs, seen))
        return how

    return register


def everyone() -> list[Liar]:
    """Return all liars, in the order of their guarantees."""
    for module in MODULES:
        import_module(f"{__name__}.{module}")
    return sorted(LIARS, key=lambda one: one.guarantee)


def by_name(name: str) -> Liar:
    """Return the liar with that name."""
    found = [one for one in everyone() if one.name == name]
    if not found:
        close = get_close_matches(name, [one.name for one in LIARS], 1)
        known = "hal conform cpu --liars lists them; one of your own is MODULE:CLASS"
        raise InvalidValue(f"no liar {name!r}", cure=f"did you mean {close[0]}?" if close else known, argument="--liar")
    return found[0]


def by_class(how: object, name: str) -> Liar:
    """Return the liar that a class is registered as. ``name``: as it was given, for the error."""
    found = [one for one in LIARS if one.how is how]
    if not found:
        cure = "register the class with hal_conformance.liars.liar"
        raise InvalidValue(f"{name!r} is no liar", cure=cure, argument="--liar")
    return found[0]
